package sim

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// Progress says how far the runs are.
type Progress struct {
	Runs, Done int
	Events     uint64
	Simulated  time.Duration // sum over all runs
	Of         time.Duration
}

// String returns a line for people.
func (p Progress) String() string {
	return fmt.Sprintf("%d of %d runs, %.0f %%, %.1f million events", p.Done, p.Runs, 100*min(p.Simulated.Seconds()/p.Of.Seconds(), 1), float64(p.Events)/1e6)
}

// Run simulates each policy on each seed and summarizes the figures: see [Model.Runs].
func (m *Model) Run(ctx context.Context, report func(Progress)) (Result, error) {
	runs, err := m.Runs(ctx, report)
	if err != nil {
		return Result{}, err
	}
	return m.Result(runs), nil
}

// Runs simulates each policy on each seed and returns the figures by policy, then seed. It runs one
// simulation per processor at a time. If report is not nil, Runs calls it now and then, one call at
// a time. The figures depend only on the scenario. If ctx ends, Runs returns the context's error
// early.
func (m *Model) Runs(ctx context.Context, report func(Progress)) ([][]Figures, error) {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	seeds := m.scenario.Seeds
	total := len(m.policies) * seeds
	runs := make([][]Figures, len(m.policies))
	for p := range runs {
		runs[p] = make([]Figures, seeds)
	}
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
				runs[i/seeds][i%seeds] = f
			}
		})
	}
	group.Wait()
	if err := context.Cause(ctx); err != nil {
		return nil, fmt.Errorf("simulate: %w", err)
	}
	return runs, nil
}

// One simulates one policy, by its index in the scenario, on one seed. It runs on the caller's
// goroutine, for studies that have many models and schedule the runs themselves.
func (m *Model) One(ctx context.Context, policy int, seed uint64) (Figures, error) {
	f, err := m.one(ctx, policy, seed, &meter{})
	if err != nil {
		return f, fmt.Errorf("simulate: %w", err)
	}
	return f, nil
}

// meter sums up how far the runs are.
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
func (m *Model) one(ctx context.Context, p int, seed uint64, seen *meter) (Figures, error) {
	w, err := m.newWorld(p, seed)
	if err != nil {
		return Figures{}, err
	}
	var popped uint64
	var now int64
	report := func() {
		at := min(w.now, w.end)
		seen.add(w.popped-popped, time.Duration(at-now), 0)
		popped, now = w.popped, at
	}
	if err := w.run(ctx, report); err != nil {
		return Figures{}, err
	}
	seen.add(w.popped-popped, time.Duration(w.end-now), 1)
	return w.figures(p), nil
}
