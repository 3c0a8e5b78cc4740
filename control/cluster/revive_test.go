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

var functionF = pipeline.ParseKey("f.ns")

// pass lets time pass.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// TestStartingReplicasOfASkippedRevisionEnd checks three revisions. Replicas of the middle one that
// are not ready end at once, and the oldest ones serve until a newer one does.
func TestStartingReplicasOfASkippedRevisionEnd(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.want(2)
		w.set(func() { w.specs, w.attach = []FunctionSpec{spec("f", 2)}, after(time.Second) })
		w.want(2)
		w.set(func() { w.specs = []FunctionSpec{spec("f", 3)} })
		w.want(2)
		w.expect("the middle one ends", w.states(), "f-00001 ready, f-00002 ready, f-00005 starting, f-00006 starting")
		pass(time.Second)
		w.want(2)
		w.expect("the old one ends", w.states(), "f-00005 ready, f-00006 ready")
	})
}

// TestNewerOldRevisionServes checks that of two old ready revisions, the newer one serves until the
// wanted one does.
func TestNewerOldRevisionServes(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.want(2)
		w.set(func() { w.specs, w.attach = []FunctionSpec{spec("f", 2)}, after(time.Second) })
		w.want(1)
		pass(time.Second)
		w.set(func() { w.specs = []FunctionSpec{spec("f", 3)} })
		w.want(1)
		w.expect("after the second update", w.states(), "f-00003 ready, f-00004 starting")
	})
}

// redeployed sets up a replica of revision 2, and none of revision 1 although requests began on it.
func redeployed(w *world) {
	w.want(1)
	w.set(func() { w.specs = []FunctionSpec{spec("f", 2)} })
	w.want(1)
	w.want(1)
	w.expect("after the update", w.states(), "f-00002 ready")
	w.l.Revive(functionF, 1)
}

// TestReviveStartsAnOldRevision starts a replica of an old revision beside the wanted one. No plan
// may end it before it is ready.
func TestReviveStartsAnOldRevision(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		var orders []node.Order
		w.set(func() {
			w.start = func(_ context.Context, o node.Order) error { w.set(func() { orders = append(orders, o) }); return nil }
		})
		changed := w.changed
		redeployed(w)
		if w.changed == changed {
			t.Error("control was not told")
		}
		w.set(func() { w.attach = after(3 * time.Second) })
		for range 3 {
			w.want(1)
			w.expect("while it starts", w.states(), "f-00002 ready, f-00003 starting")
		}
		if revision := revisionOf(orders[2]); revision != 1 {
			t.Errorf("revision %d was ordered, want 1", revision)
		}
		w.set(func() { w.drain = after(5 * time.Second) })
		pass(3 * time.Second)
		w.want(1)
		w.expect("once it is ready", w.states(), "f-00002 ready, f-00003 draining")
		pass(5 * time.Second)
		w.want(1)
		w.expect("once nobody needs it", w.states(), "f-00002 ready")
	})
}

// TestRevivedReplicaThatIsLostIsStartedAgain checks that the dispatcher asks again when the replica
// is lost, even before the cluster knows that it has ended.
func TestRevivedReplicaThatIsLostIsStartedAgain(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		redeployed(w)
		w.set(func() { w.drain = after(5 * time.Second) })
		w.want(1)
		l.Revive(functionF, 1)
		l.Lost("f-00003", task.Death{Cause: "killed"})
		synctest.Wait()
		w.want(1)
		w.want(1)
		w.expect("after its loss", w.states(), "f-00002 ready, f-00004 draining")
	})
}

func TestReviveGivesUpAfterFailedStarts(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		redeployed(w)
		starts := 0
		w.set(func() {
			w.start = func(context.Context, node.Order) error { w.set(func() { starts++ }); return errors.New("bad image") }
		})
		for range 100 {
			w.want(1)
			pass(100 * time.Millisecond)
		}
		want := fmt.Sprintf("1: %d replicas of revision 1 did not start; the last failure: start: bad image", maxFailures)
		if len(w.none) != 1 || w.none[0] != want || starts != maxFailures {
			t.Errorf("%d starts, told %q, want %d and %q", starts, w.none, maxFailures, want)
		}
		if count, _, _ := l.Failure(functionF); count != 0 || len(w.failed) > 0 {
			t.Errorf("%d failures of the deployed revision, told %q, want none", count, w.failed)
		}
		l.Revive(functionF, 77)
		if len(w.none) != 2 || !strings.Contains(w.none[1], "revision 77 is not known") {
			t.Errorf("told %q, want that revision 77 is not known", w.none)
		}
	})
}

// TestReviveUsesAnotherNodeIfItsNodeIsAway checks that a replica of an old revision starts on the
// node of the previous replica. If that node is away and no device is needed, the replica starts on
// another node.
func TestReviveUsesAnotherNodeIfItsNodeIsAway(t *testing.T) {
	for device, want := range map[string]string{"": "1 on b", "gpu-0": "told 1: no replica of revision 1 has started within 1m0s; the last failure: node \"a\" is away"} {
		synctest.Test(t, func(t *testing.T) {
			w, l := newWorld(t, "a", "b")
			got := ""
			w.set(func() {
				w.start = func(_ context.Context, o node.Order) error {
					w.set(func() { got = fmt.Sprintf("%d on b", revisionOf(o)) })
					return nil
				}
			})
			l.of(functionF).remember(spec("f", 1), plan.Slot{Node: "a", Device: device})
			w.set(func() { w.specs = []FunctionSpec{spec("f", 2)} })
			l.Leave("a")
			l.Revive(functionF, 1)
			for range 70 {
				p := plan.Plan{Epoch: 1, Wants: []plan.Want{{Function: "f.ns", Revision: 2}}}
				if err := l.Apply(t.Context(), p); err != nil {
					t.Fatal(err)
				}
				pass(time.Second)
			}
			if len(w.none) > 0 {
				got = "told " + w.none[0]
			}
			if got != want {
				t.Errorf("device %q: %s, want %s", device, got, want)
			}
			if err := l.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestRevivalLeavesTheStatusOfTheDeployedRevision checks that a working old revision does not reset
// the failures of the deployed one.
func TestRevivalLeavesTheStatusOfTheDeployedRevision(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.want(1)
		w.set(func() {
			w.specs = []FunctionSpec{spec("f", 2)}
			w.start = func(ctx context.Context, o node.Order) error {
				if revisionOf(o) == 2 {
					return errors.New("bad image")
				}
				return after(time.Second)(ctx, "")
			}
		})
		w.want(1)
		pass(10 * time.Second)
		l.Lost("f-00001", task.Death{Cause: "killed", End: task.EndUnclear})
		synctest.Wait()
		l.Revive(functionF, 1)
		w.want(1)
		pass(time.Second)
		before := l.of(functionF).failure
		if !strings.Contains(w.states(), "f-00004 ready") || before.Count != 2 {
			t.Fatalf("%s, %d failures, want a revived replica beside two failures", w.states(), before.Count)
		}
		l.Answered("f-00004", time.Millisecond, time.Millisecond)
		pass(2 * settle)
		if _, err := l.Observe(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := l.of(functionF).failure; got != before {
			t.Errorf("after it answered: %+v, want %+v", got, before)
		}
	})
}

// TestKilledRevivalsAreRetried checks that starts that something else ends are retried.
func TestKilledRevivalsAreRetried(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		redeployed(w)
		starts := 0
		w.set(func() {
			w.start = func(_ context.Context, o node.Order) error {
				if starts++; starts <= 2*maxFailures {
					l.Lost(o.Replica, task.Death{Cause: "its zygote was killed", End: task.EndShared})
					return errors.New("its zygote was killed")
				}
				return nil
			}
		})
		for range 100 {
			w.want(1)
			pass(100 * time.Millisecond)
		}
		if len(w.none) > 0 || starts != 2*maxFailures+1 {
			t.Errorf("%d starts, told %q, want %d and nothing told", starts, w.none, 2*maxFailures+1)
		}
	})
}

// TestFormersAreBounded checks that after many updates, the latest revisions can still be started
// again, and no others.
func TestFormersAreBounded(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		const updates = 3 * formersKept
		for revision := range uint64(updates) {
			w.set(func() { w.specs = []FunctionSpec{spec("f", revision+1)} })
			w.want(1)
		}
		formers := l.functions[functionF].formers
		if len(formers) != formersKept || formers[updates] == nil || formers[updates-formersKept+1] == nil {
			t.Errorf("%d revisions kept, want the latest %d", len(formers), formersKept)
		}
		w.set(func() { w.specs = nil })
		w.want(1)
		w.want(1)
		if len(l.functions) > 0 {
			t.Errorf("%d functions known after the removal, want none", len(l.functions))
		}
	})
}

// TestDrainsWaitForDeadlines checks that a replica that requests need may drain until their
// deadline, and no longer.
func TestDrainsWaitForDeadlines(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.want(1)
		w.set(func() { w.drain, w.due = after(time.Hour), time.Now().Add(5*time.Minute) })
		w.want(0)
		pass(5*time.Minute - time.Second)
		w.expect("before the deadline", w.states(), "f-00001 draining")
		pass(2 * time.Second)
		w.expect("after it", w.states(), "")
		if got := w.lost["f-00001"]; !strings.Contains(got, "deadlines of its requests") {
			t.Errorf("the dispatcher was told %q", got)
		}
	})
}
