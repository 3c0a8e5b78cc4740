package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/autoscaler/placement"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/control"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/dispatch"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// A dispatch.Shell implements both interfaces, without an adapter.
var (
	_ Replicas = (*dispatch.Shell)(nil)
	_ Lines    = (*dispatch.Shell)(nil)
)

// trouble makes all calls slow, and some fail randomly.
func (w *world) trouble(rng *rand.Rand) {
	chance := func(ctx context.Context) error {
		w.mu.Lock()
		took, fails := time.Duration(rng.IntN(3000))*time.Millisecond, rng.IntN(4) == 0
		w.mu.Unlock()
		if err := after(took)(ctx, ""); err != nil {
			return err
		}
		if fails {
			return errors.New("by chance")
		}
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.start = func(ctx context.Context, _ node.Order) error { return chance(ctx) }
	w.attach = func(ctx context.Context, _ string) error { return chance(ctx) }
	w.drain = func(ctx context.Context, _ string) error { return chance(ctx) }
	w.warm = func(ctx context.Context, _ *fakeNode) error { return chance(ctx) }
}

// TestRandomHistoryEndsAsPlanned deploys, changes and removes functions at random. Replicas fail
// and die, and plans are applied twice or late. At the end, the cluster, the nodes and the
// dispatcher must have exactly the replicas that the plan wants.
func TestRandomHistoryEndsAsPlanned(t *testing.T) {
	for seed := range uint64(25) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, l := newWorld(t, "a", "b")
				rng := rand.New(rand.NewPCG(seed, 5))
				w.trouble(rand.New(rand.NewPCG(seed, 6)))
				counts := map[string]int{"f.ns": 1, "g.ns": 1, "h.ns": 1}
				var old plan.Plan
				for range 150 {
					w.chance(rng, counts)
					p := w.tick(counts)
					if rng.IntN(5) == 0 {
						_ = l.Apply(t.Context(), p)   // again
						_ = l.Apply(t.Context(), old) // late, and therefore refused
					}
					old = p
					time.Sleep(time.Duration(rng.IntN(1500)) * time.Millisecond)
					for _, f := range []string{"f.ns", "g.ns", "h.ns"} {
						if have := l.Replicas(pipeline.ParseKey(f)); len(have) > 0 && rng.IntN(10) == 0 {
							l.Lost(have[rng.IntN(len(have))].Name, task.Death{Cause: "by chance"})
						}
					}
				}
				w.set(func() { w.start, w.attach, w.drain, w.warm = nil, nil, nil, nil })
				for range 90 {
					w.tick(counts)
					time.Sleep(time.Second)
				}
				synctest.Wait()
				w.settled(counts)
				if err := l.Close(t.Context()); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// chance randomly changes the deployments and the wanted counts.
func (w *world) chance(rng *rand.Rand, counts map[string]int) {
	name := []string{"f", "g", "h"}[rng.IntN(3)]
	switch rng.IntN(8) {
	case 0, 1, 2:
		counts[name+".ns"] = 1 + rng.IntN(5)
	case 3:
		w.set(func() {
			i := slices.IndexFunc(w.specs, func(s FunctionSpec) bool { return s.Key.String() == name+".ns" })
			switch {
			case i < 0:
				w.specs = append(w.specs, spec(name, uint64(1+rng.IntN(1e6))))
			case rng.IntN(2) == 0:
				w.specs[i].Revision++
			default:
				w.specs = slices.Delete(w.specs, i, i+1)
			}
		})
	}
}

// tick is one round of control with given counts instead of an allocator.
func (w *world) tick(counts map[string]int) plan.Plan {
	w.t.Helper()
	s, err := w.l.Observe(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	var a plan.Alloc
	for _, f := range s.Functions {
		a = append(a, plan.Line{Function: f.Name, Count: counts[f.Name], Why: "chance"})
	}
	p := plan.Plan{Epoch: s.Epoch, Rev: s.Rev, At: s.At}
	if p.Wants, err = (placement.Spread{}).Place(s, a); err != nil {
		w.t.Fatal(err)
	}
	if err := p.Validate(s); err != nil {
		w.t.Fatal(err)
	}
	if err := w.l.Apply(w.t.Context(), p); err != nil {
		w.t.Fatal(err)
	}
	return p
}

// settled checks that counts are right everywhere.
func (w *world) settled(counts map[string]int) {
	w.t.Helper()
	names := map[string]bool{}
	for _, s := range w.Functions() {
		have := w.l.Replicas(s.Key)
		if len(have) != counts[s.Key.String()] {
			w.t.Errorf("function %q: %d replicas, want %d: %v", s.Key, len(have), counts[s.Key.String()], have)
		}
		for _, r := range have {
			names[r.Name] = true
			if r.State != plan.Ready || r.Revision != s.Revision {
				w.t.Errorf("function %q of revision %d: %+v, want it ready and of that revision", s.Key, s.Revision, r)
			}
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	running := map[string]bool{}
	for _, n := range w.nodes {
		maps.Copy(running, n.running)
	}
	if !maps.Equal(names, running) || !maps.Equal(names, w.attached) {
		w.t.Errorf("replicas %v, running %v, with work %v, want them the same", names, running, w.attached)
	}
}

// TestWakingTakesMilliseconds runs the control loop over a Local. A task comes for a sleeping
// function, and its replica must be ready as soon as the node can fork it.
func TestWakingTakesMilliseconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, l := newWorld(t, "a")
		s := spec("f", 1)
		s.declare(pipeline.Scale{Max: 5, Zero: true, ZeroAge: 30 * time.Second})
		w.specs = []FunctionSpec{s}
		w.attach = after(15 * time.Millisecond)
		loop, err := control.New(l, l, control.Config{}, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- loop.Run(ctx) }()
		time.Sleep(3500 * time.Millisecond)
		w.expect("asleep", w.states(), "")
		w.set(func() {
			if len(w.warmed) == 0 || len(w.warmed[0]) != 1 {
				t.Errorf("the node was told to keep %v warm, want the sleeper", w.warmed)
			}
		})
		for range 3 {
			w.set(func() { w.waiting["f.ns"], w.last["f.ns"] = 1, time.Now() })
			loop.Poke()
			time.Sleep(16 * time.Millisecond)
			synctest.Wait()
			if got := l.Replicas(pipeline.ParseKey("f.ns")); len(got) != 1 || got[0].State != plan.Ready {
				t.Fatalf("16ms after the poke: %v, want a ready replica", got)
			}
			w.set(func() { w.waiting["f.ns"] = 0 })
			time.Sleep(29 * time.Second)
			if len(l.Replicas(pipeline.ParseKey("f.ns"))) != 1 {
				t.Error("it sleeps too early")
			}
			time.Sleep(2100 * time.Millisecond)
			w.expect("asleep again", w.states(), "")
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		if err := l.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}
