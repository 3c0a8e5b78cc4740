package sim

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// Progress is how far the runs are.
type Progress struct {
	Runs, Done int
	Events     uint64
	Simulated  time.Duration // of all runs together
	Of         time.Duration
}

// String is a line for people.
func (p Progress) String() string {
	return fmt.Sprintf("%d of %d runs, %.0f %%, %.1f million events", p.Done, p.Runs, 100*min(p.Simulated.Seconds()/p.Of.Seconds(), 1), float64(p.Events)/1e6)
}

// Run simulates each policy on each seed, as many runs at a time as there are processors. report, if it is not nil, is called now and
// then, one call at a time. The result depends on the scenario alone. Ctx ends it early, with its error.
func (m *Model) Run(ctx context.Context, report func(Progress)) (Result, error) {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	seeds := m.scenario.Seeds
	total := len(m.policies) * seeds
	runs := make([]*figures, total) // by policy, then seed
	seen := &meter{report: report, last: Progress{Runs: total, Of: time.Duration(total) * m.duration}}
	var next atomic.Int64
	var group sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), total) {
		group.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= total {
					return
				}
				f, err := m.one(ctx, i/seeds, m.scenario.Seed+uint64(i%seeds), seen)
				if err != nil {
					stop(err)
					return
				}
				runs[i] = f
			}
		})
	}
	group.Wait()
	if err := context.Cause(ctx); err != nil {
		return Result{}, fmt.Errorf("simulate: %w", err)
	}
	return m.result(runs), nil
}

// meter adds up how far the runs are.
type meter struct {
	mu     sync.Mutex
	report func(Progress)
	last   Progress
}

func (m *meter) add(events uint64, simulated time.Duration, done int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.last.Events += events
	m.last.Simulated += simulated
	m.last.Done += done
	if m.report != nil {
		m.report(m.last)
	}
}

// one makes one run.
func (m *Model) one(ctx context.Context, p int, seed uint64, seen *meter) (*figures, error) {
	w, err := m.newWorld(p, seed)
	if err != nil {
		return nil, err
	}
	var popped uint64
	var now int64
	report := func() {
		at := min(w.now, w.end)
		seen.add(w.popped-popped, time.Duration(at-now), 0)
		popped, now = w.popped, at
	}
	if err := w.run(ctx, report); err != nil {
		return nil, err
	}
	seen.add(w.popped-popped, time.Duration(w.end-now), 1)
	c := &w.control
	f := &figures{
		rec: w.rec, events: float64(w.popped), ticks: float64(c.ticks), held: float64(c.held), refused: float64(c.refused), complaint: c.complaint,
	}
	f.predict(m)
	return f, nil
}

func (m *Model) result(runs []*figures) Result {
	s := &m.scenario
	out := Result{
		Schema: Schema, Scenario: s.Name, Duration: m.duration.Seconds(), Warmup: s.Warmup.Seconds(), Seed: s.Seed, Seeds: s.Seeds,
	}
	for i := range m.pipelines {
		p := &m.pipelines[i]
		out.Pipelines = append(out.Pipelines, Offer{Name: p.spec.Name, SLO: p.spec.SLO.Seconds(), Arrivals: p.about})
	}
	for i := range m.stages {
		out.Stages = append(out.Stages, m.stages[i].spec.Name)
	}
	for p := range m.policies {
		of := runs[p*s.Seeds : (p+1)*s.Seeds]
		is := m.summary(p, of)
		if p > 0 {
			is.Versus = m.versus(runs[:s.Seeds], of)
		}
		out.Policies = append(out.Policies, is)
	}
	return out
}
