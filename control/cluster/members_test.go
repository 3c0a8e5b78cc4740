package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// node returns a fake node by name, and creates it if necessary.
func (w *world) node(name string) *fakeNode {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := w.nodes[name]
	if n == nil {
		n = &fakeNode{w: w, name: name, running: map[string]bool{}}
		w.nodes[name] = n
	}
	return n
}

// runs returns what runs on a fake node.
func (w *world) runs(name string) []string {
	n := w.node(name)
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Sorted(maps.Keys(n.running))
}

// inSight returns which nodes and how many replicas of f.ns a Snapshot has.
func (w *world) inSight() string {
	w.t.Helper()
	s, err := w.l.Observe(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	var nodes []string
	for _, n := range s.Nodes {
		nodes = append(nodes, n.Name)
	}
	return fmt.Sprintf("%s: %d", strings.Join(nodes, ","), len(s.Functions[0].Replicas))
}

// ends counts how often each replica ended.
func ends(events []Event) map[string]int {
	out := map[string]int{}
	for _, e := range events {
		if e.Kind == Stopped || e.Kind == Lost || e.Kind == Failed {
			out[e.Replica]++
		}
	}
	return out
}

func TestReplicasOfSilentNodeServeButAreNotCounted(t *testing.T) {
	bubble(t, func(_ *testing.T, w *world, l *Local) {
		w.want(3)
		w.expect("before", w.inSight(), "a: 3")
		l.Leave("a")
		l.Leave("a")
		w.expect("away", w.inSight(), ": 0")
		w.expect("known", w.states(), "f-00001 ready, f-00002 ready, f-00003 ready")
		if got := l.Counts()[pipeline.ParseKey("f.ns")]; got != (Count{Hidden: 3}) {
			t.Errorf("counts %+v, want three out of sight", got)
		}
		p, _ := w.plan(0)
		_ = l.Apply(t.Context(), p)
		synctest.Wait()
		w.expect("a plan lets none of them go", w.states(), "f-00001 ready, f-00002 ready, f-00003 ready")
		l.Lost("f-00002", task.Death{Cause: "its socket broke"})
		synctest.Wait()
		w.expect("a socket broke", w.states(), "f-00001 ready, f-00003 ready")
		w.set(func() {
			delete(w.nodes["a"].running, "f-00003") // it ended while the node was away
			w.nodes["a"].running["f-99999"] = true  // left by an earlier process
		})
		l.Running("a", w.runs("a"))
		synctest.Wait()
		w.expect("it says something before it has joined", strings.Join(w.runs("a"), " "), "f-00001 f-00002 f-99999")
		l.Join(w.node("a"))
		w.expect("joined, and has said nothing", w.inSight(), ": 0")
		l.Running("a", w.runs("a"))
		synctest.Wait()
		w.expect("back", w.inSight(), "a: 1")
		w.expect("what is left", w.states(), "f-00001 ready")
		w.expect("what runs", strings.Join(w.runs("a"), " "), "f-00001")
		w.set(func() {
			if got := w.lost["f-00003"]; got != `it ended while its node "a" was away` {
				t.Errorf("lost for %q", got)
			}
		})
		var kinds []string
		for _, e := range w.told() {
			if e.Replica == "" {
				kinds = append(kinds, string(e.Kind)+" "+e.Node)
			}
		}
		w.expect("events of nodes", strings.Join(kinds, ", "), "left a, joined a")
	})
}

func TestPlanFromBeforeAReturnKeepsReturnedReplicas(t *testing.T) {
	bubble(t, func(_ *testing.T, w *world, l *Local) {
		w.want(2)
		l.Leave("a")
		old, _ := w.plan(0)
		l.Join(w.node("a"))
		l.Running("a", w.runs("a"))
		if err := l.Apply(t.Context(), old); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		w.expect("not seen by the plan", w.states(), "f-00001 ready, f-00002 ready")
		w.want(1)
		w.expect("surplus", w.states(), "f-00001 ready")
	})
}

func TestAStartGoesOnWhileItsNodeIsAway(t *testing.T) {
	bubble(t, func(_ *testing.T, w *world, l *Local) {
		w.attach = after(2 * time.Second)
		w.want(1)
		l.Leave("a")
		time.Sleep(2 * time.Second)
		synctest.Wait()
		w.expect("its result counts", w.states(), "f-00001 ready")
		l.Join(w.node("a"))
		l.Running("a", nil) // older than the start
		w.expect("not lost yet", w.inSight(), "a: 1")
		l.Running("a", w.runs("a"))
		time.Sleep(missingFor)
		l.Running("a", nil)
		synctest.Wait()
		w.expect("listed in between", w.states(), "f-00001 ready")
		time.Sleep(missingFor)
		l.Running("a", nil)
		synctest.Wait()
		w.expect("missing for too long", w.states(), "")
	})
}

func TestUnknownReplicaIsStoppedOnceAtATime(t *testing.T) {
	bubble(t, func(_ *testing.T, w *world, l *Local) {
		stops := map[string]int{}
		w.stop = func(ctx context.Context, replica string) error {
			w.set(func() { stops[replica]++ })
			return after(time.Second)(ctx, "")
		}
		var strangers []string
		w.set(func() {
			for i := range 3 * stopsAtATime {
				name := fmt.Sprintf("x-%05d", i)
				strangers = append(strangers, name)
				w.nodes["a"].running[name] = true
			}
		})
		for range 5 {
			l.Running("a", strangers)
		}
		synctest.Wait()
		w.set(func() {
			if len(stops) != stopsAtATime {
				t.Errorf("%d stops at a time, want %d", len(stops), stopsAtATime)
			}
		})
		for range 3 {
			time.Sleep(time.Second)
			synctest.Wait()
			l.Running("a", w.runs("a"))
		}
		synctest.Wait()
		for name, n := range stops {
			if n != 1 {
				t.Errorf("%s stopped %d times, want once", name, n)
			}
		}
		if left := w.runs("a"); len(left) > 0 {
			t.Errorf("%v still run", left)
		}
	})
}

func TestAnnouncementFromBeforeAStopIsIgnored(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		stops := map[string]int{}
		fails := true
		w.stop = func(_ context.Context, replica string) error {
			w.mu.Lock()
			defer w.mu.Unlock()
			if stops[replica]++; replica == "f-00002" && fails {
				fails = false
				return errors.New("the order was lost")
			}
			return nil
		}
		expect := func(what string, first, second int) {
			t.Helper()
			synctest.Wait()
			w.mu.Lock()
			defer w.mu.Unlock()
			if stops["f-00001"] != first || stops["f-00002"] != second {
				t.Errorf("%s: stops %v, want %d and %d", what, stops, first, second)
			}
		}
		w.want(2)
		old := w.runs("a")
		w.want(0)
		expect("let go", 1, 1)
		l.Running("a", old)
		expect("at once", 1, 1)
		time.Sleep(missingFor)
		l.Running("a", w.runs("a"))
		expect("what still runs after a while", 1, 2)
		if left := w.runs("a"); len(left) > 0 {
			t.Errorf("%v still run", left)
		}
	})
}

func TestCloseWithNodesAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, l := newWorld(t, "a", "b")
		w.attach = func(ctx context.Context, name string) error {
			if name == "f-00002" {
				return after(time.Hour)(ctx, name)
			}
			return nil
		}
		w.want(2)
		l.Leave("a")
		w.stop = func(context.Context, string) error {
			t.Error("a node that is away is told to stop")
			return nil
		}
		begin := time.Now()
		if err := l.Close(t.Context()); err != nil || time.Since(begin) > time.Second {
			t.Errorf("closed after %v: %v", time.Since(begin), err)
		}
		l.Join(w.node("c")) // too late: no effect
		l.Leave("b")
		l.Running("b", []string{"x"})
	})
}

func TestPhasesOfAStart(t *testing.T) {
	bubble(t, func(_ *testing.T, w *world, l *Local) {
		w.start = func(ctx context.Context, _ node.Order) error { return after(5*time.Millisecond)(ctx, "") }
		w.attach = after(10 * time.Millisecond)
		w.want(1)
		time.Sleep(time.Second)
		l.Answered("f-00001", 985*time.Millisecond, 7*time.Millisecond)
		r := l.Replicas(pipeline.ParseKey("f.ns"))[0]
		got := fmt.Sprintf("%s %v total %v answered %v", r.Path, r.Phases, r.Total, r.Answered)
		w.expect("phases", got, "fork [{order 4ms} {fork 1ms} {place 10ms} {first inference 7ms}] total 15ms answered 1s")
		if n := testutil.CollectAndCount(l.metrics.starts); n != 5 {
			t.Errorf("%d series, want order, fork, place, first inference and total", n)
		}
		w.attach = func(_ context.Context, name string) error {
			// What had waited for it was quick.
			l.Answered(name, time.Millisecond, 7*time.Millisecond)
			time.Sleep(10 * time.Millisecond)
			return nil
		}
		w.want(2)
		time.Sleep(time.Second)
		w.expect("phases", fmt.Sprint(l.Replicas(pipeline.ParseKey("f.ns"))[1].Phases), "[{order 4ms} {fork 1ms} {place 10ms} {first inference 7ms}]")
	})
}

// TestWantedReplicasRunAfterNodesComeAndGo joins and removes nodes, ends processes, and applies
// plans and announcements at random. No replica may end twice. Once all nodes are back, exactly the
// wanted replicas must run.
func TestWantedReplicasRunAfterNodesComeAndGo(t *testing.T) {
	for seed := range uint64(25) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, l := newWorld(t, "a", "b")
				rng := rand.New(rand.NewPCG(seed, 11))
				w.trouble(rand.New(rand.NewPCG(seed, 12)))
				names := []string{"a", "b", "c", "d"}
				there := map[string]bool{"a": true, "b": true}
				counts := map[string]int{"f.ns": 1, "g.ns": 1, "h.ns": 1}
				stale := map[string][]string{}
				for range 200 {
					w.chance(rng, counts)
					w.comeAndGo(rng, names, there, stale)
					_ = l.Apply(t.Context(), w.tick(counts))
					time.Sleep(time.Duration(rng.IntN(1500)) * time.Millisecond)
				}
				w.set(func() { w.start, w.attach, w.drain, w.warm = nil, nil, nil, nil })
				for _, name := range names {
					l.Join(w.node(name))
				}
				for range 90 {
					for _, name := range names {
						l.Running(name, w.runs(name))
					}
					w.tick(counts)
					time.Sleep(time.Second)
				}
				synctest.Wait()
				w.settled(counts)
				for name, n := range ends(w.told()) {
					if n != 1 {
						t.Errorf("replica %q ended %d times", name, n)
					}
				}
				for _, c := range l.Counts() {
					if c.Hidden+c.Starting+c.Draining > 0 {
						t.Errorf("counts %+v with all nodes there", c)
					}
				}
				if err := l.Close(t.Context()); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// comeAndGo lets nodes join, leave and announce themselves, sometimes with old announcements, and
// lets processes end.
func (w *world) comeAndGo(rng *rand.Rand, names []string, there map[string]bool, stale map[string][]string) {
	for _, name := range names {
		running := w.runs(name)
		switch p := rng.IntN(20); {
		case p < 2 && there[name]:
			w.l.Leave(name)
			there[name] = false
		case p < 6 && !there[name]:
			w.l.Join(w.node(name))
			there[name] = true
			w.l.Running(name, running)
		case p < 8:
			w.l.Running(name, stale[name])
		case p < 16:
			w.l.Running(name, running)
		case p == 16 && len(running) > 0: // its end is reported, unless its node is away
			dies := running[rng.IntN(len(running))]
			n := w.node(name)
			w.set(func() { delete(n.running, dies) })
			if there[name] {
				w.l.Lost(dies, task.Death{Cause: "by chance"})
			}
		}
		stale[name] = running
	}
}

// TestNodeIsForgottenWithItsLastReplica checks that a node that is away is kept as long as it has
// replicas, and no longer.
func TestNodeIsForgottenWithItsLastReplica(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.want(2)
		l.Leave("a")
		for _, replica := range []string{"f-00001", "f-00002"} {
			if l.nodes["a"] == nil {
				t.Errorf("the node is forgotten, but has %s", w.states())
			}
			l.Lost(replica, task.Death{Cause: "its socket broke"})
			synctest.Wait()
		}
		if l.nodes["a"] != nil {
			t.Error("the node is kept, without a replica")
		}
	})
}
