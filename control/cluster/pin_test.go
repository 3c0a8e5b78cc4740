package cluster

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// TestPinKeepsOneReplica checks that while a function is pinned, a policy may give it only one
// replica, with the pin's CPU limit. After Unpin or the end of the lease, everything must be as
// before.
func TestPinKeepsOneReplica(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		limits := func() (least, most int, profile []plan.Point) {
			t.Helper()
			s, err := l.Observe(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			return s.Functions[0].Min, s.Functions[0].Max, s.Functions[0].Profile
		}
		w.set(func() { w.specs[0].Profile = []plan.Point{{CPUMilli: 250, N: 7}} })
		if least, most, profile := limits(); least != 1 || most != 10 || len(profile) != 1 || profile[0].N != 7 {
			t.Fatalf("before: %d to %d replicas, profile %v", least, most, profile)
		}
		w.give(500)
		pin := func(holder string, milli int) Held {
			t.Helper()
			h, err := l.Pin(pipeline.ParseKey("f.ns"), Pin{holder, milli, time.Now().Add(10 * time.Second)})
			if err != nil {
				t.Fatal(err)
			}
			return h
		}
		w.set(func() { w.specs[0].Min, w.specs[0].Zero = 3, true })
		changed := w.changed
		if h := pin("me", 1500); h.Name != "f-00001" || h.State != plan.Ready || !h.Alone || h.Slots != 2 || h.Batch != 1 || h.CPUMilli != 500 {
			t.Errorf("held %+v, want the replica with what it has now", h)
		}
		if w.changed != changed+1 {
			t.Error("control does not look at once")
		}
		if least, most, _ := limits(); least != 1 || most != 1 {
			t.Errorf("pinned: %d to %d replicas, want one", least, most)
		}
		w.give(700)
		w.has(1500, 2)
		if h := pin("me", 1500); h.CPUMilli != 1500 || h.Unbounded {
			t.Errorf("held %+v, want it to have 1500m", h)
		}
		w.setCPU = func(string) error { return errors.ErrUnsupported }
		pin("me", 2500)
		w.give(700)
		if h := pin("me", 2500); h.CPUMilli != 2500 || !h.Unbounded {
			t.Errorf("held %+v by a node without cgroups, want that to be said", h)
		}
		w.setCPU = nil
		if _, err := l.Pin(pipeline.ParseKey("f.ns"), Pin{"you", 100, time.Now().Add(time.Minute)}); !errors.Is(err, ErrPinned) {
			t.Errorf("a second holder: %v, want ErrPinned", err)
		}
		if l.Unpin(pipeline.ParseKey("f.ns"), "you"); !l.PinnedBy(pipeline.ParseKey("f.ns"), "me") || l.PinnedBy(pipeline.ParseKey("f.ns"), "you") {
			t.Error("another one's pin is ended by who has none")
		}
		l.Unpin(pipeline.ParseKey("f.ns"), "me")
		if least, most, _ := limits(); least != 3 || most != 10 || l.PinnedBy(pipeline.ParseKey("f.ns"), "me") {
			t.Errorf("let go: %d to %d replicas, want 3 to 10", least, most)
		}
		w.give(700)
		w.has(700, 3)

		pin("me", 900) // the holder does not come back
		w.give(700)
		w.has(900, 3)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if least, most, _ := limits(); least != 3 || most != 10 || l.PinnedBy(pipeline.ParseKey("f.ns"), "me") {
			t.Errorf("the lease is over: %d to %d replicas, want 3 to 10", least, most)
		}
		w.give(700)
		w.has(700, 3)
		if h := pin("you", 0); h.Name == "" {
			t.Errorf("held %+v, want the replica", h)
		}
	})
}

// TestPinWhoseFunctionIsUsed checks that a function that is or recently was in use cannot be
// pinned.
func TestPinWhoseFunctionIsUsed(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		// As if the wall clock had been set forward by an hour.
		l.clock.wall = l.clock.wall.Add(-time.Hour)
		pin := func(want error) {
			t.Helper()
			if _, err := l.Pin(pipeline.ParseKey("f.ns"), Pin{"me", 100, time.Now().Add(10 * time.Second)}); !errors.Is(err, want) {
				t.Errorf("error %v, want %v", err, want)
			}
		}
		w.set(func() { w.waiting["f.ns"] = 1 })
		pin(ErrInUse)
		w.set(func() { w.waiting["f.ns"], w.last["f.ns"] = 0, time.Now() })
		time.Sleep(Quiet - 1)
		pin(ErrInUse)
		if !w.apart.IsZero() {
			t.Error("its line was told of a pin that was refused")
		}
		time.Sleep(time.Nanosecond)
		pin(nil)
		until := time.Now().Add(10 * time.Second)
		if !w.apart.Equal(until) {
			t.Errorf("its line counts nothing until %v, want until %v", w.apart, until)
		}
		if at, ok := l.PinnedUntil(pipeline.ParseKey("f.ns")); !ok || !at.Equal(until) {
			t.Errorf("people are told that it is held until %v, %t, want %v", at, ok, until)
		}
		w.set(func() { w.waiting["f.ns"] = 1 }) // from the holder itself
		pin(nil)
		l.Unpin(pipeline.ParseKey("f.ns"), "you")
		if w.apart.IsZero() {
			t.Error("its line counts again while it is pinned")
		}
		l.Unpin(pipeline.ParseKey("f.ns"), "me")
		if !w.apart.IsZero() {
			t.Error("its line was not told that it counts again")
		}
	})
}

// TestBatchesOfASnapshot checks that a function has the batch that it declares, up to what its
// stage takes (8 here). While a function is pinned, it has the largest batch that may be chosen.
func TestBatchesOfASnapshot(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.give(500)
		check := func(what string, declared, auto, batch, choice int) {
			t.Helper()
			w.set(func() { w.specs[0].Batch, w.specs[0].AutoBatch = declared, auto })
			s, err := l.Observe(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if f := s.Functions[0]; f.Batch != batch || f.AutoBatch != choice {
				t.Errorf("%s: batch %d of up to %d, want %d of up to %d", what, f.Batch, f.AutoBatch, batch, choice)
			}
		}
		check("nothing declared", 0, 0, 1, 0)
		check("a smaller batch", 4, 0, 4, 0)
		check("a larger batch", 32, 0, 8, 0)
		check("auto", 1, 32, 1, 8)
		w.set(func() { w.signals = map[string]plan.Signals{"f.ns": {Survived: 3}} })
		check("replicas end under larger ones", 4, 0, 3, 0)
		check("auto, and replicas end under larger ones", 1, 32, 1, 3)
		w.set(func() { w.signals = nil })
		pin := func(batch int) {
			t.Helper()
			if h, err := l.Pin(pipeline.ParseKey("f.ns"), Pin{"me", 0, time.Now().Add(10 * time.Second)}); err != nil || h.Batch != batch {
				t.Fatalf("pinned with batches of %d, %v, want %d", h.Batch, err, batch)
			}
		}
		pin(8)
		check("auto, pinned", 1, 32, 8, 0)
		check("the annotation changed", 5, 0, 5, 0)
		pin(5) // the replica started with 1
	})
}
