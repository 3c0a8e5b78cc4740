package cluster

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/placement"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// places makes a plan with a real placer, and applies it.
func (w *world) places(count int) plan.Want {
	w.t.Helper()
	s, err := w.l.Observe(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	wants, err := placement.Spread{}.Place(s, plan.Alloc{{Function: "f.ns", Count: count, Batch: 1, Why: "asked"}})
	if err != nil {
		w.t.Fatal(err)
	}
	p := plan.Plan{Epoch: s.Epoch, Rev: s.Rev, At: s.At, Wants: wants}
	if err := errors.Join(p.Validate(s), w.l.Apply(w.t.Context(), p)); err != nil {
		w.t.Fatal(err)
	}
	synctest.Wait()
	return wants[0]
}

// where writes the replicas of f.ns as "node state", sorted.
func (w *world) where() string {
	var out []string
	for _, r := range w.l.Replicas(pipeline.ParseKey("f.ns")) {
		out = append(out, r.Node+" "+r.State.String())
	}
	slices.Sort(out)
	return strings.Join(out, ", ")
}

func TestDrainStartsReplacementsFirst(t *testing.T) {
	bubble(t, func(_ *testing.T, w *world, l *Local) {
		l.cfg.Cordons = &Cordons{}
		w.places(2)
		w.expect("before", w.where(), "a ready, a ready")
		l.Join(w.node("b"))
		l.Running("b", nil)
		starts := 0
		w.set(func() {
			w.start = func(ctx context.Context, _ node.Order) error {
				var takes time.Duration
				w.set(func() { starts++; takes = time.Duration(starts) * 2 * time.Second })
				return after(takes)(ctx, "")
			}
		})
		l.cfg.Cordons.Set("a", Cordon{Cause: "an operator drains it", Moving: true})
		w.places(2)
		w.expect("replacements start", w.where(), "a ready, a ready, b starting, b starting")
		w.places(2)
		w.expect("the next plan", w.where(), "a ready, a ready, b starting, b starting")
		time.Sleep(2*time.Second + time.Millisecond)
		w.places(2)
		w.expect("one is ready", w.where(), "a ready, b ready, b starting")
		time.Sleep(2*time.Second + time.Millisecond)
		w.places(2)
		w.expect("both are ready", w.where(), "b ready, b ready")
		for _, e := range w.told() {
			if e.Kind == Draining && e.Cause != "node a is being drained" {
				t.Errorf("drained because %q", e.Cause)
			}
		}
		l.cfg.Cordons.Lift("a")
		w.places(3)
		time.Sleep(10 * time.Second)
		w.expect("uncordoned", w.where(), "a ready, b ready, b ready")
	})
}

// TestLeavingNodesArePatient keeps the replica of a node that leaves until another one is ready, or
// until the node has no patience any more, or if no node has room.
func TestLeavingNodesArePatient(t *testing.T) {
	for what, x := range map[string]struct {
		patient, room, late bool
		want                string
	}{
		"patient":             {true, true, false, "a ready, b starting"},
		"no room":             {true, false, false, ""},
		"not patient":         {false, true, false, "b starting"},
		"not patient anymore": {true, true, true, "b starting"},
	} {
		bubble(t, func(_ *testing.T, w *world, l *Local) {
			w.places(1)
			if x.room {
				l.Join(w.node("b"))
				l.Running("b", nil)
			}
			w.set(func() {
				w.start = func(ctx context.Context, _ node.Order) error { return after(10*time.Second)(ctx, "") }
				w.nodes["a"].leaves, w.nodes["a"].patient = "it is being stopped", x.patient
			})
			for range 2 {
				w.places(1)
			}
			if x.late {
				w.set(func() { w.nodes["a"].patient = false })
				w.places(1)
			}
			w.expect(what, w.where(), x.want)
			time.Sleep(11 * time.Second)
			w.places(1)
			if x.room {
				w.expect(what+", in the end", w.where(), "b ready")
			}
		})
	}
}

func TestDrainWithoutRoomKeepsReplicas(t *testing.T) {
	bubble(t, func(_ *testing.T, w *world, l *Local) {
		l.cfg.Cordons = &Cordons{}
		w.places(2)
		l.cfg.Cordons.Set("a", Cordon{Cause: "an operator drains it", Moving: true})
		for range 3 {
			want := w.places(2)
			w.expect("no other node", w.where(), "a ready, a ready")
			w.expect("short", want.Short, "0 of 2 placed: none of 1 nodes takes a replica; a: an operator drains it")
		}
		w.places(1)
		w.expect("one is not wanted", w.where(), "a ready")
	})
}

// TestMachinesAreDrained drains the node of a closed machine. A cordon that an operator sets and
// lifts meanwhile changes nothing.
func TestMachinesAreDrained(t *testing.T) {
	bubble(t, func(_ *testing.T, w *world, l *Local) {
		closed := false
		l.cfg.Cordons = &Cordons{Machines: func(node string) (Cordon, bool) {
			return Cordon{Cause: "its machine is cordoned", Moving: true}, closed && node == "a"
		}}
		w.places(1)
		l.Join(w.node("b"))
		l.Running("b", nil)
		p, _ := w.plan(2)
		l.cfg.Cordons.Set("a", Cordon{Cause: "it is cordoned"})
		closed = true
		if err := l.Apply(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		w.expect("a plan from before", w.where(), "a ready")
		w.places(1)
		w.places(1)
		w.expect("drained", w.where(), "b ready")
		l.cfg.Cordons.Lift("a")
		w.places(2)
		w.expect("the operator's cordon is lifted", w.where(), "b ready, b ready")
		closed = false
		w.places(3)
		w.expect("the machine is open", w.where(), "a ready, b ready, b ready")
	})
}

func TestCordonHoldsAgainstOlderPlans(t *testing.T) {
	bubble(t, func(_ *testing.T, w *world, l *Local) {
		l.cfg.Cordons = &Cordons{}
		w.places(1)
		p, _ := w.plan(3)
		l.cfg.Cordons.Set("a", Cordon{Cause: "it is cordoned"})
		if err := l.Apply(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		w.expect("a plan from before the cordon", w.where(), "a ready")
		want := w.places(3)
		w.expect("a plan from after it", w.where(), "a ready")
		w.expect("short", want.Short, "1 of 3 placed: none of 1 nodes takes a replica; a: it is cordoned")
	})
}

// TestReviveAvoidsCordonedNodes revives an old revision whose node takes no new replicas.
func TestReviveAvoidsCordonedNodes(t *testing.T) {
	for device, want := range map[string]string{"": "b", "gpu-0": "b gpu-1"} {
		synctest.Test(t, func(t *testing.T) {
			w, l := newWorld(t, "a", "b")
			l.cfg.Cordons = &Cordons{}
			w.node("b").devices = []plan.Device{{ID: "gpu-1", Memory: 1 << 30}}
			old := spec("f", 1)
			if device != "" {
				old.GPU = 1
			}
			l.of(functionF).remember(old, plan.Slot{Node: "a", Device: device})
			w.set(func() { w.specs = []FunctionSpec{spec("f", 2)} })
			w.inSight()
			l.cfg.Cordons.Set("a", Cordon{Cause: "it is cordoned"})
			l.Revive(functionF, 1)
			if err := l.Apply(t.Context(), plan.Plan{Epoch: 1, Rev: 1, Wants: []plan.Want{{Function: "f.ns", Revision: 2}}}); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			got := ""
			for _, r := range l.Replicas(functionF) {
				got += strings.TrimSpace(r.Node + " " + r.Device)
			}
			w.expect("device "+device, got, want)
			if err := l.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}
