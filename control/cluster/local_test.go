package cluster

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

func after(d time.Duration) func(context.Context, string) error {
	return func(ctx context.Context, _ string) error {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(d):
			return nil
		}
	}
}

// TestLinesFollowAPlanBeforeReplicasAreReleased applies plans with fewer replicas, twice and late.
func TestLinesFollowAPlanBeforeReplicasAreReleased(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.drain = after(time.Second)
		old, _ := w.plan(1)
		w.want(1)
		p := w.want(0)
		w.expect("released", w.states(), "f-00001 draining")
		if got, want := w.published[len(w.published)-1], fmt.Sprintf("plan %d with %q", p.Rev, []string{"f-00001"}); got != want {
			t.Errorf("the lines got %q, want %q", got, want)
		}
		n := len(w.published)
		if err := l.Apply(t.Context(), old); !errors.Is(err, plan.ErrStale) || len(w.published) != n {
			t.Errorf("a stale plan: %v, published %q, want it refused first", err, w.published[n:])
		}
		if err := l.Apply(t.Context(), p); err != nil || len(w.published) != n+1 {
			t.Errorf("the same plan again: %v, published %q", err, w.published[n:])
		}
	})
}

func TestAReplicasLife(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.attach, w.drain = after(100*time.Millisecond), after(time.Second)
		w.want(1)
		w.expect("ordered", w.states(), "f-00001 starting")
		time.Sleep(100 * time.Millisecond)
		synctest.Wait()
		w.expect("attached", w.states(), "f-00001 ready")
		if w.changed != 1 {
			t.Errorf("changed %d times, want once", w.changed)
		}
		l.Answered("f-00001", 30*time.Millisecond, time.Millisecond)
		w.want(1)
		w.expect("kept", w.states(), "f-00001 ready")
		w.want(0)
		w.expect("let go", w.states(), "f-00001 draining")
		w.want(1)
		w.expect("a draining one is not revived", w.states(), "f-00001 draining, f-00002 starting")
		time.Sleep(time.Second)
		synctest.Wait()
		w.expect("in the end", w.states(), "f-00002 ready")
		w.expect("timeline", w.kinds(), "f-00001 ordered, f-00001 started, f-00001 ready, f-00001 first answer, f-00001 draining, "+
			"f-00002 ordered, f-00002 started, f-00002 ready, f-00001 stopped")
		for _, e := range l.Events(pipeline.ParseKey("f.ns")) {
			if e.At.IsZero() || e.Function.String() != "f.ns" || e.Node != "a" ||
				e.Kind == Draining && e.Cause != "want 0" || e.Kind == Process && (e.Path != "fork" || len(e.Phases) != 1) {
				t.Errorf("event %+v", e)
			}
		}
		s, err := l.Observe(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if f := s.Functions[0]; f.Slots != 2 || f.Batch != 1 || len(f.Replicas) != 1 {
			t.Errorf("observed %+v, want slots and batch as the replica said", f)
		}
	})
}

func TestApplyingTwiceChangesNothing(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.attach = after(time.Second)
		p := w.want(3)
		for range 5 {
			if err := l.Apply(t.Context(), p); err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		w.expect("starting", w.states(), "f-00001 starting, f-00002 starting, f-00003 starting")
		time.Sleep(time.Second)
		synctest.Wait()
		if err := l.Apply(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		w.expect("ready", w.states(), "f-00001 ready, f-00002 ready, f-00003 ready")
		q, _ := w.plan(1)
		for range 3 {
			if err := l.Apply(t.Context(), q); err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		w.expect("fewer", w.states(), "f-00001 ready")
		if err := l.Apply(t.Context(), p); !errors.Is(err, plan.ErrStale) {
			t.Errorf("an older plan: %v, want stale", err)
		}
		q.Epoch = 0
		if err := l.Apply(t.Context(), q); !errors.Is(err, plan.ErrStale) {
			t.Errorf("another epoch's plan: %v, want stale", err)
		}
	})
}

func TestOnlyTheChangedFunctionIsSkipped(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.specs = []FunctionSpec{spec("f", 1), spec("g", 1), spec("h", 1)}
		p, _ := w.plan(1)
		w.set(func() { w.specs = []FunctionSpec{spec("f", 2), spec("g", 1)} })
		if err := l.Apply(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		w.expect("f was redeployed", w.states(), "")
		if len(l.Replicas(pipeline.ParseKey("g.ns"))) != 1 || len(l.Replicas(pipeline.ParseKey("h.ns"))) != 0 {
			t.Errorf("g has %v, h has %v", l.Replicas(pipeline.ParseKey("g.ns")), l.Replicas(pipeline.ParseKey("h.ns")))
		}
	})
}

func TestOldRevisionServesDuringARedeploy(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.want(2)
		w.set(func() { w.specs, w.attach = []FunctionSpec{spec("f", 2)}, after(time.Second) })
		w.want(2)
		w.expect("the old ones serve on", w.states(), "f-00001 ready, f-00002 ready, f-00003 starting, f-00004 starting")
		time.Sleep(time.Second)
		synctest.Wait()
		w.want(2)
		w.expect("until a new one does", w.states(), "f-00003 ready, f-00004 ready")

		// If a new revision never becomes ready, the old one keeps serving.
		w.set(func() {
			w.specs = []FunctionSpec{spec("f", 3)}
			w.start = func(context.Context, node.Order) error { return errors.New("bad image") }
			w.waiting["f.ns"] = 1
		})
		for range 300 {
			w.want(2)
			time.Sleep(100 * time.Millisecond)
		}
		w.expect("a bad image", w.states(), "f-00003 ready, f-00004 ready")
		if len(w.failed) != 0 {
			t.Errorf("waiting tasks were told %q although there are replicas", w.failed)
		}

		// If the new revision finds no room, the old one makes room.
		w.want(0)
		w.expect("no room", w.states(), "")
	})
}

// TestRedeployWithLittleRoomKeepsOldReplicas checks that if one of two new replicas finds room, the
// old ones serve until it is ready.
func TestRedeployWithLittleRoomKeepsOldReplicas(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.want(2)
		w.set(func() { w.specs, w.attach = []FunctionSpec{spec("f", 2)}, after(time.Second) })
		for _, want := range []string{"f-00001 ready, f-00002 ready, f-00003 starting", "f-00003 ready"} {
			p, _ := w.plan(1)
			p.Wants[0].Short = "no room for the second"
			if err := l.Apply(t.Context(), p); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			w.expect("with a successor", w.states(), want)
			time.Sleep(time.Second)
			synctest.Wait()
		}
	})
}

// TestRedeployDoesNotWakeSleepingFunction checks that a sleeping function's old replicas need not
// wait for a successor.
func TestRedeployDoesNotWakeSleepingFunction(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.want(1)
		s := spec("f", 2)
		s.Zero = true
		w.set(func() { w.specs = []FunctionSpec{s} })
		p, _ := w.plan(0)
		p.Wants[0].Short = ""
		if err := l.Apply(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		w.expect("after the redeploy", w.states(), "")
	})
}

func TestStartingReplicasTakeMemory(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.specs[0].Memory = 100
		w.attach = after(time.Second)
		w.want(3)
		s, _ := l.Observe(t.Context())
		if got := s.Nodes[0].MemoryUsed; got != 300 {
			t.Errorf("%d bytes taken while three start, want 300", got)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		s, _ = l.Observe(t.Context())
		if got := s.Nodes[0].MemoryUsed; got != 0 {
			t.Errorf("%d bytes taken when they are ready, want what the node says, 0", got)
		}
	})
}

func TestDrainsAreBounded(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.want(2)
		w.set(func() { w.drain = after(time.Hour) })
		w.want(0)
		// While it drains.
		l.Lost("f-00001", task.Death{Cause: "exit status 1", End: task.EndItself})
		synctest.Wait()
		w.expect("one died, one drains", w.states(), "f-00002 draining")
		time.Sleep(30 * time.Second)
		synctest.Wait()
		w.expect("given up", w.states(), "")
		if got := w.lost["f-00002"]; !strings.Contains(got, "not drained within 30s") {
			t.Errorf("the dispatcher was told %q", got)
		}
		if w.ends["f-00001"] != task.EndItself || w.ends["f-00002"] != task.EndShared {
			t.Errorf("the dispatcher was told %v, want that the first ended by itself, and the platform ended the second", w.ends)
		}
	})
}

func TestARemovedFunctionIsDrained(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.want(2)
		w.set(func() { w.specs = nil })
		w.want(2)
		w.expect("removed", w.states(), "")
		w.want(2)
		if got := l.Events(pipeline.ParseKey("f.ns")); got != nil {
			t.Errorf("still known: %v", got)
		}
	})
}

// TestRemovedFunctionFailsWaitingTasksFirst checks that replicas of a removed function lose their
// connections before the next plan, and that this is not a failure.
func TestRemovedFunctionFailsWaitingTasksFirst(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.want(1)
		w.set(func() { w.specs = nil })
		l.Lost("f-00001", task.Death{Cause: "exited"})
		synctest.Wait()
		w.expect("removed", w.states(), "")
		if count, _, cause := l.Failure(pipeline.ParseKey("f.ns")); count != 0 {
			t.Errorf("%d failures (%s), want none", count, cause)
		}
		if got := l.Events(pipeline.ParseKey("f.ns")); len(got) == 0 || got[len(got)-1].Kind != Stopped || got[len(got)-1].Cause != "the function was removed" {
			t.Errorf("the last of %v, want stopped because of the removal", got)
		}
	})
}

func TestCloseAtItsDeadlineStopsReplicas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, l := newWorld(t, "a", "b")
		w.want(2)
		w.set(func() { w.drain = after(time.Hour) })
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := l.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Close: %v, want that it gave up waiting", err)
		}
		w.expect("gone all the same", w.states(), "")
		if count, _, _ := l.Failure(pipeline.ParseKey("f.ns")); count != 0 {
			t.Errorf("%d failures, want none", count)
		}
		if _, err := l.Observe(t.Context()); !errors.Is(err, ErrClosed) {
			t.Errorf("Observe after Close: %v", err)
		}
		if err := l.Apply(t.Context(), plan.Plan{Epoch: 1}); !errors.Is(err, ErrClosed) {
			t.Errorf("Apply after Close: %v", err)
		}
		if err := l.Scale(t.Context(), pipeline.ParseKey("f.ns"), 1); !errors.Is(err, ErrClosed) {
			t.Errorf("Scale after Close: %v", err)
		}
	})
}

func TestScaleByHand(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		see := func() plan.Function {
			t.Helper()
			s, err := l.Observe(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			return s.Functions[0]
		}
		scale := func(n int) {
			t.Helper()
			if err := l.Scale(t.Context(), pipeline.ParseKey("f.ns"), n); err != nil {
				t.Fatal(err)
			}
		}
		scale(4)
		if f := see(); f.Min != 4 || !f.Demand.Last.Equal(time.Now()) {
			t.Errorf("scaled to 4: %+v", f)
		}
		scale(40)
		if f := see(); f.Min != 10 {
			t.Errorf("scaled to 40: at least %d, want the maximum, 10", f.Min)
		}
		scale(0)
		time.Sleep(time.Hour)
		if f := see(); f.Min != 0 || !f.Zero || f.ZeroAge != 0 {
			t.Errorf("scaled to 0: %+v, want it to sleep", f)
		}
		w.set(func() { w.last["f.ns"] = time.Now() })
		if f := see(); f.Min != 1 || f.Zero {
			t.Errorf("asked since: %+v, want what its labels say", f)
		}
		scale(4)
		see()
		w.set(func() { w.specs = []FunctionSpec{spec("f", 2)} })
		if f := see(); f.Min != 1 {
			t.Errorf("redeployed: at least %d, want 1", f.Min)
		}
	})
}

func TestTimelineKeepsTheLatest(t *testing.T) {
	var tl timeline
	for i := range 3*eventsKept + 7 {
		tl.add(Event{Replica: fmt.Sprint(i)})
	}
	got := tl.list()
	if len(got) != eventsKept {
		t.Fatalf("%d events, want %d", len(got), eventsKept)
	}
	for i, e := range got {
		if want := fmt.Sprint(2*eventsKept + 7 + i); e.Replica != want {
			t.Fatalf("event %d is %s, want %s", i, e.Replica, want)
		}
	}
}
