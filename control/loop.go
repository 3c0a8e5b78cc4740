package control

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/plan"
	"github.com/stagecoach-serving/stagecoach/policy"
)

// Observer is the half of the world that the loop reads.
type Observer interface {
	Observe(ctx context.Context) (plan.Snapshot, error)
}

// Applier is the half that the loop changes. Apply returns without waiting for replicas to come or go; applying a plan
// twice changes nothing. A plan that is older than what somebody else applied is refused with a [plan.ErrStale].
type Applier interface {
	Apply(ctx context.Context, p plan.Plan) error
}

// Config says how a loop ticks. A zero field means its default.
type Config struct {
	Tick     time.Duration // between ticks; 1 s
	Gap      time.Duration // least time between a tick and a poked one; 20 ms
	Timeout  time.Duration // of Observe and Apply together; 5 s
	Policies policy.Names
	Recorder Recorder // gets every decision; nil: none does
}

// Loop steers a cluster. Build it with [New], run it with [Loop.Run].
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

	memory policy.Memory // of the last applied plan; Run's goroutine alone
	logged string        // the complaint logged last; Run's goroutine alone

	mu       sync.Mutex
	snapshot plan.Snapshot
	plan     plan.Plan
	trouble  string // why the latest tick went wrong, in whole or in part; empty: it did not
}

// New returns a loop that reads from o and writes to a. It registers its metrics with reg. An unknown policy is an error.
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
			Help: "Domains that stayed as they were for a tick because a policy had no answer.",
		}),
		planning: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: "stagecoach", Subsystem: "control", Name: "plan_seconds",
			Help: "Time to decide and validate a plan.", Buckets: prometheus.ExponentialBuckets(1e-5, 4, 9),
		}),
	}
	for _, c := range []prometheus.Collector{l.ticks, l.held, l.planning, newPlanned(l)} {
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

// Poke asks for an early tick. It never blocks; pokes before the tick begins are one.
func (l *Loop) Poke() {
	select {
	case l.poked <- struct{}{}:
	default:
	}
}

// Run ticks until ctx ends and returns its error. It must be called once.
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
		case <-l.poked: // what it says is there to be observed
		default:
		}
		l.tick(ctx)
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

// tick runs one round and says how it went.
func (l *Loop) tick(ctx context.Context) {
	result, err := l.round(ctx)
	if ctx.Err() != nil {
		return
	}
	l.ticks.WithLabelValues(result).Inc()
	l.complain(err)
}

// complain logs err unless it is what was logged last: a fault that lasts is one line, not one a second, though a panic's stack has
// other addresses each time.
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
		l.log.Info("control goes on as planned")
		return
	}
	l.log.Warn("control goes on with what it has", "error", err)
}

func (l *Loop) round(ctx context.Context) (result string, err error) {
	ctx, cancel := context.WithTimeout(ctx, l.cfg.Timeout)
	defer cancel()
	s, err := l.observer.Observe(ctx)
	if err != nil {
		return "failed", fmt.Errorf("observe: %w", err)
	}
	start := time.Now()
	p, memory, stay, err := l.policies.Decide(s, l.memory)
	l.planning.Observe(time.Since(start).Seconds())
	l.held.Add(float64(len(stay)))
	if l.cfg.Recorder != nil {
		l.cfg.Recorder.Record(Decision{Policies: l.policies.Names(), Snapshot: s, Memory: l.memory, Plan: p, Err: err})
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
	l.memory = memory // only an applied plan is remembered
	l.mu.Lock()
	l.snapshot, l.plan = s, p
	l.mu.Unlock()
	return "applied", stayed(stay)
}

// stayedTold is how many domains that stay as they are get an error of their own: what fails for one often fails for all.
const stayedTold = 3

// stayed says which domains stay as they are, and why.
func stayed(stay []policy.Held) error {
	var errs []error
	for i, h := range stay {
		if i == stayedTold {
			errs = append(errs, fmt.Errorf("and so do %d more domains", len(stay)-i))
			break
		}
		errs = append(errs, fmt.Errorf("domain of %q stays as it is: %w", h.Domain.Functions[0], h.Err))
	}
	return errors.Join(errs...)
}

// Last returns the plan applied last and the snapshot it was made from: each Want's Why and Short say what was decided and
// for which reason. Both are zero before the first plan and must not be changed.
func (l *Loop) Last() (plan.Snapshot, plan.Plan) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.snapshot, l.plan
}

// Trouble says why the latest tick went wrong, in whole or in part: what [Loop.Last] has may be old then. Empty: it did not.
func (l *Loop) Trouble() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.trouble
}

// Policies returns the names of the policies that decide.
func (l *Loop) Policies() policy.Names { return l.policies.Names() }
