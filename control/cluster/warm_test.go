package cluster

import (
	"context"
	"errors"
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
)

func TestWarmListsSupersedeOneAnother(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.warm = func(ctx context.Context, _ *fakeNode) error { return after(10*time.Second)(ctx, "") }
		for i := range 5 {
			p, _ := w.plan(0)
			p.Warm = []plan.Warm{{Function: "f.ns", Node: "a", Warmth: plan.Host, Key: i == 4}, {Function: "gone.ns", Node: "a"}}
			if err := l.Apply(t.Context(), p); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		time.Sleep(30 * time.Second)
		synctest.Wait()
		if len(w.warmed) != 2 || len(w.warmed[1]) != 1 || !w.warmed[1][0].Key || w.warmed[1][0].Spec.Function != "f.ns" {
			t.Errorf("the node was told %+v, want the first and the last list", w.warmed)
		}
	})
}

func TestWarmToldOnlyWhatBelongsInMemory(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.set(func() { w.specs = []FunctionSpec{spec("disk", 1), spec("host", 1), spec("key", 1), spec("parked", 1)} })
		p, _ := w.plan(0)
		p.Wants = nil
		p.Warm = []plan.Warm{
			{Function: "disk.ns", Node: "a", Warmth: plan.File},
			{Function: "host.ns", Node: "a", Warmth: plan.Host},
			{Function: "key.ns", Node: "a", Warmth: plan.Host, Key: true},
			{Function: "parked.ns", Node: "a", Warmth: plan.Parked},
		}
		if err := l.Apply(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		want := []node.Wanted{{Spec: spec("host", 1).Spec}, {Spec: spec("key", 1).Spec, Key: true}, {Spec: spec("parked", 1).Spec}}
		if len(w.warmed) != 1 || !reflect.DeepEqual(w.warmed[0], want) {
			t.Errorf("the node was told %+v, want %+v", w.warmed, want)
		}
	})
}

func TestFailedWarmListIsRetriedWithBackoff(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.warm = func(context.Context, *fakeNode) error { return errors.New("bad model") }
		pass := func(key bool) {
			p, _ := w.plan(0)
			p.Warm = []plan.Warm{{Function: "f.ns", Node: "a", Warmth: plan.Host, Key: key}}
			if err := l.Apply(t.Context(), p); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		for range 80 { // 8 s: at 0, 0.5, 1.5, 3.5, 7.5 s
			pass(false)
			time.Sleep(100 * time.Millisecond)
		}
		if len(w.warmed) != 5 {
			t.Errorf("the node was told %d times, want 5", len(w.warmed))
		}
		pass(true)
		if len(w.warmed) != 6 {
			t.Errorf("told %d times after the list changed, want 6: another list may work", len(w.warmed))
		}
	})
}

// TestWarmListIsToldWhenSomethingChanges applies the same list again and again. The node must be
// told when the list, its replicas or its parameters change, when it joins again, and otherwise
// every ten seconds.
func TestWarmListIsToldWhenSomethingChanges(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		replicas, key, told := 0, false, 0
		tick := func(what string, more int) {
			t.Helper()
			p, _ := w.plan(replicas)
			p.Warm = []plan.Warm{{Function: "f.ns", Node: "a", Warmth: plan.Host, Key: key}}
			if err := l.Apply(t.Context(), p); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			if got := len(w.warmed) - told; got != more {
				t.Errorf("%s: told %d times, want %d", what, got, more)
			}
			told = len(w.warmed)
			time.Sleep(time.Second)
			synctest.Wait()
		}
		tick("the first list", 1)
		for range 9 {
			tick("no change", 0)
		}
		tick("after ten seconds", 1)
		tick("no change", 0)
		key = true
		tick("a key stage", 1)
		tick("no change", 0)
		replicas = 1
		tick("a replica is ordered", 1)
		tick("the replica is ready", 1)
		tick("no change", 0)
		w.set(func() { w.zygotes = []plan.Zygote{{Function: "f.ns", Idle: true}} })
		tick("parameters are there", 1)
		tick("no change", 0)
		w.set(func() { w.zygotes = []plan.Zygote{{Function: "f.ns"}} })
		tick("parameters are in use", 1)
		l.Join(l.nodes["a"].hands)
		tick("another daemon", 1)
		tick("no change", 0)
	})
}
