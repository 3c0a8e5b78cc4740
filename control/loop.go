package control

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/autoscaler"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
)

// Observer returns the state of the cluster.
type Observer interface {
	Observe(ctx context.Context) (plan.Snapshot, error)
}

// Applier carries out plans. Apply does not wait for replicas. Applying a plan twice has no further
// effect. A plan that is older than another owner's plan is refused with a [plan.ErrStale].
type Applier interface {
	Apply(ctx context.Context, p plan.Plan) error
}

// Config configures a loop. A zero field means its default.
type Config struct {
	Tick     time.Duration // between ticks; 1 s
	Gap      time.Duration // shortest time between a tick and an early one; 20 ms
	Timeout  time.Duration // of Observe and Apply together; 5 s
	Policies policy.Names
	Recorder Recorder // gets every decision; nil: none
	Traffic  *Traffic // the requests between decisions, for the Recorder; nil: not counted
	// Applied is called with each plan after it was applied. It must not block. Nil: nothing is
	// called.
	Applied func(plan.Plan)
}

// Loop controls a cluster. [New] makes one, and [Loop.Run] runs it.
type Loop struct {
	observer Observer
	applier  Applier
	cfg      Config
	policies policy.Set
	log      *slog.Logger
	poked    chan struct{}

	ticks    *prometheus.CounterVec
	held     prometheus.Counter
	planning prometheus.Histogram

	memory policy.Memory // of the last applied plan; used by Run's goroutine only
	logged string        // the last logged complaint; used by Run's goroutine only
	watch  autoscaler.Watch

	mu       sync.Mutex
	snapshot plan.Snapshot
	plan     plan.Plan
	errors   map[string]autoscaler.ModelError
	trouble  string // why the latest tick failed completely or in part; empty: it did not
}

// New returns a loop that observes o and applies plans to a. It registers its metrics with reg. An
// unknown policy is an error.
func New(o Observer, a Applier, cfg Config, log *slog.Logger, reg prometheus.Registerer) (*Loop, error) {
	policies, err := cfg.Policies.Choose()
	if err != nil {
		return nil, err
	}
	orElse(&cfg.Tick, time.Second)
	orElse(&cfg.Gap, 20*time.Millisecond)
	orElse(&cfg.Timeout, 5*time.Second)
	l := &Loop{
		observer: o, applier: a, cfg: cfg, policies: policies, log: log, poked: make(chan struct{}, 1),
		ticks: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: "stagecoach", Subsystem: "control", Name: "ticks_total",
			Help: "Ticks by result: applied, invalid (the plan was refused), stale (another autoscaler was faster), failed (to observe or apply).",
		}, []string{"result"}),
		held: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: "stagecoach", Subsystem: "control", Name: "held_domains_total",
			Help: "Domains that kept their replicas for a tick because a policy failed.",
		}),
		planning: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: "stagecoach", Subsystem: "control", Name: "plan_seconds",
			Help: "Time to decide and validate a plan.", Buckets: prometheus.ExponentialBuckets(1e-5, 4, 9),
		}),
	}
	for _, c := range []prometheus.Collector{l.ticks, l.held, l.planning, newPlanned(l), newModelErrors(l)} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("control: %w", err)
		}
	}
	return l, nil
}

func orElse(d *time.Duration, fallback time.Duration) {
	if *d <= 0 {
		*d = fallback
	}
}

// Poke asks for an early tick. It never blocks. Several pokes before the tick count as one.
func (l *Loop) Poke() {
	select {
	case l.poked <- struct{}{}:
	default:
	}
}

// Run ticks until ctx ends, and returns ctx's error. It may be called only once.
func (l *Loop) Run(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-timer.C:
		}
		select {
		case <-l.poked: // the tick will observe the reason
		default:
		}
		if result, err := l.tick(ctx); ctx.Err() == nil {
			l.ticks.WithLabelValues(result).Inc()
			l.complain(err)
		}
		end := time.Now()
		timer.Reset(l.cfg.Tick)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-timer.C:
			timer.Reset(0)
		case <-l.poked:
			timer.Reset(l.cfg.Gap - time.Since(end))
		}
	}
}

// complain logs err unless it was logged last. So a lasting fault is one line, not one per second.
// A panic's stack is not compared, because its addresses differ each time.
func (l *Loop) complain(err error) {
	text := firstLines(err)
	if text == l.logged {
		return
	}
	l.logged = text
	l.mu.Lock()
	l.trouble = text
	l.mu.Unlock()
	if err == nil {
		l.log.Info("control works again")
		return
	}
	l.log.Warn("the control loop keeps its last plan", "error", err)
}

// tick observes, decides and applies once. It returns the result for the metric, and why the last
// plan stays in force.
func (l *Loop) tick(ctx context.Context) (result string, err error) {
	ctx, cancel := context.WithTimeout(ctx, l.cfg.Timeout)
	defer cancel()
	s, err := l.observer.Observe(ctx)
	if err != nil {
		return "failed", fmt.Errorf("observe: %w", err)
	}
	l.compare(&s)
	start := time.Now()
	p, memory, stay, err := l.policies.Decide(s, l.memory)
	l.planning.Observe(time.Since(start).Seconds())
	l.held.Add(float64(len(stay)))
	if l.cfg.Recorder != nil {
		l.cfg.Recorder.Record(Decision{Policies: l.policies.Names(), Snapshot: s, Memory: l.memory, Plan: p, Err: err, Traffic: l.cfg.Traffic.Take()})
	}
	if err != nil {
		return "invalid", fmt.Errorf("plan: %w", err)
	}
	switch err := l.applier.Apply(ctx, p); {
	case errors.Is(err, plan.ErrStale):
		return "stale", fmt.Errorf("apply: another autoscaler steers this cluster, too: %w", err)
	case err != nil:
		return "failed", fmt.Errorf("apply: %w", err)
	}
	if l.cfg.Applied != nil {
		l.cfg.Applied(p)
	}
	l.memory = memory // only an applied plan is remembered
	l.mu.Lock()
	l.snapshot, l.plan = s, p
	l.mu.Unlock()
	return "applied", stayed(stay)
}

// stayedTold is how many held domains get their own error. What fails for one often fails for all.
const stayedTold = 3

// stayed returns an error that says which domains keep their replicas, and why.
func stayed(stay []policy.Held) error {
	var errs []error
	for i, h := range stay {
		if i == stayedTold {
			errs = append(errs, fmt.Errorf("and so do %d more domains", len(stay)-i))
			break
		}
		errs = append(errs, fmt.Errorf("domain of %q keeps its replicas: %w", h.Domain.Functions[0], h.Err))
	}
	return errors.Join(errs...)
}

// Last returns the plan that was applied last, and its snapshot. Each Want's Why and Short give the
// reasons for its decision. Plan and snapshot are zero before the first plan. The caller must not
// change them.
func (l *Loop) Last() (plan.Snapshot, plan.Plan) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.snapshot, l.plan
}

// Trouble returns why the latest tick failed completely or in part, or "". After a failure,
// [Loop.Last] may be old.
func (l *Loop) Trouble() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.trouble
}

// Policies returns the names of the loop's policies.
func (l *Loop) Policies() policy.Names { return l.policies.Names() }
