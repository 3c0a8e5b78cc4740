package cv

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/sim"
	"github.com/stagecoach-serving/stagecoach/sim/qna"
)

// Every five seconds, a decision of the run is kept, with the burstiness measured one window
// (Horizon) later. By then, a third of the measurement still comes from earlier gaps, because
// package dispatch lets gaps fade with a time constant of 20 s.
const (
	every   = 5 * time.Second
	Horizon = 20 * time.Second
	late    = 1500 * time.Millisecond // largest error of the later decision's time
)

// Recorded is what a smoother knew at a decision, and what was measured later.
type Recorded struct {
	Network qna.Network // with the factors of QNA
	Later   []float64   // squared coefficient of variation of arrivals, measured later; 0: unknown
	Depth   []int       // per station: number of links on the longest path to it
}

// Record simulates runs and returns what each run recorded. It runs one simulation per processor at
// a time. The result depends only on the runs.
func Record(ctx context.Context, runs []Run, report func(done, of int)) ([][]Recorded, error) {
	out := make([][]Recorded, len(runs))
	errs := make([]error, len(runs))
	var next, done atomic.Int64
	var group sync.WaitGroup
	var mu sync.Mutex
	for range min(runtime.GOMAXPROCS(0), len(runs)) {
		group.Go(func() {
			for i := int(next.Add(1)) - 1; i < len(runs); i = int(next.Add(1)) - 1 {
				out[i], errs[i] = runs[i].record(ctx)
				mu.Lock()
				report(int(done.Add(1)), len(runs))
				mu.Unlock()
			}
		})
	}
	group.Wait()
	return out, errors.Join(errs...)
}

func (r Run) record(ctx context.Context) ([]Recorded, error) {
	set, err := r.names().Choose()
	if err != nil {
		return nil, err
	}
	seen := &witness{}
	s := r.scenario
	s.Policies = []sim.Policy{{Name: r.Sizing, Make: func(sim.Run) (policy.Set, error) {
		return policy.WithCorrector(set, "witness", seen.corrector()), nil
	}}}
	m, err := s.Model(func(name string) (io.ReadCloser, error) { return nil, fmt.Errorf("%s: runs have no files", name) })
	if err != nil {
		return nil, fmt.Errorf("run %s, seed %d: %w", r.Shape, s.Seed, err)
	}
	if _, err := m.Run(ctx, nil); err != nil {
		return nil, fmt.Errorf("run %s, seed %d: %w", r.Shape, s.Seed, err)
	}
	return seen.pair(), nil
}

// witness records what a [Corrector] that predicts by QNA saw at its decisions.
type witness struct{ seen []sight }

// sight is a network at a decision.
type sight struct {
	at time.Time
	n  qna.Network
}

// corrector returns the corrector that w records.
func (w *witness) corrector() Corrector {
	c := NewCorrector(autoscaler.QuartConfig{}, qna.Predict)
	c.saw = w.saw
	return c
}

// saw records n, unless it recorded another network less than half a second earlier. Each decision
// makes a new network, so n does not change later.
func (w *witness) saw(at time.Time, n qna.Network) {
	if k := len(w.seen); k == 0 || at.Sub(w.seen[k-1].at) >= time.Second/2 {
		w.seen = append(w.seen, sight{at, n})
	}
}

// pair joins each kept sight with the sight one window later.
func (w *witness) pair() []Recorded {
	var out []Recorded
	if len(w.seen) == 0 {
		return nil
	}
	next := w.seen[0].at.Add(warmup)
	end := w.seen[0].at.Add(runLength) // later sights are of the last requests leaving
	for i, s := range w.seen {
		if s.at.Before(next) {
			continue
		}
		k, _ := slices.BinarySearchFunc(w.seen[i:], s.at.Add(Horizon), func(x sight, t time.Time) int { return x.at.Compare(t) })
		if k += i; k == len(w.seen) || w.seen[k].at.After(end) {
			break
		}
		if w.seen[k].at.Sub(s.at) > Horizon+late {
			continue
		}
		next = s.at.Add(every)
		r := Recorded{Network: s.n, Later: make([]float64, len(s.n.Stations)), Depth: depths(s.n)}
		for j, st := range w.seen[k].n.Stations {
			r.Later[j] = st.CA2
		}
		out = append(out, r)
	}
	return out
}

// depths returns for each station the number of links on the longest path to it.
func depths(n qna.Network) []int {
	out := make([]int, len(n.Stations))
	for range n.Stations {
		for _, l := range n.Links {
			out[l.To] = max(out[l.To], out[l.From]+1)
		}
	}
	return out
}
