package keysmanager

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

func TestInvalidateReplacesTheZygote(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	n := newNode(t, nil)
	if got, err := n.Invalidate(ctx, "f.ns"); err != nil || got.Digest != "" {
		t.Errorf("of what is unknown: %+v, %v", got, err)
	}
	if _, err := n.Load(t.Context(), withModel); err != nil {
		t.Fatal(err)
	}
	z := n.zygote()
	got, err := n.Invalidate(ctx, "f.ns")
	if err != nil || got.Generation != 1 || got.Digest == "" || len(got.Replicas) != 0 || got.Took <= 0 {
		t.Errorf("idle: %+v, %v", got, err)
	}
	proctest.Gone(t, z)
	if inv := n.Inventory(); len(inv.Zygotes) != 0 || inv.Evicted.Invalidated != 1 || inv.Evictions != 0 {
		t.Errorf("inventory %+v, want nothing, and one invalidated", inv)
	}
	old := n.start("old", withModel)
	n.answers(old)
	z = n.zygote()
	if got, err = n.Invalidate(ctx, "f.ns"); err != nil || got.Generation != 2 || !slices.Equal(got.Replicas, []string{"old"}) {
		t.Errorf("with a replica: %+v, %v", got, err)
	}
	if inv := n.Inventory(); len(inv.Zygotes) != 1 || inv.Zygotes[0].State != Retiring || inv.Zygotes[0].Generation != 1 || inv.Zygotes[0].Function != "f.ns" {
		t.Errorf("zygotes %+v, want the old one to retire", inv.Zygotes)
	}
	n.answers(n.start("new", withModel))
	inv := n.Inventory()
	i := slices.IndexFunc(inv.Zygotes, func(i ZygoteInfo) bool { return i.State == Ready })
	if len(inv.Zygotes) != 2 || i < 0 || inv.Zygotes[i].PID == z || inv.Zygotes[i].Replicas != 1 || inv.Zygotes[i].Generation != 2 {
		t.Errorf("zygotes %+v, want a new one", inv.Zygotes)
	}
	if err := n.Stop(t.Context(), "old", time.Minute); err != nil {
		t.Fatal(err)
	}
	proctest.Gone(t, z)
	if inv := n.Inventory(); len(inv.Zygotes) != 1 || inv.Zygotes[0].State != Ready {
		t.Errorf("zygotes %+v, want the new one", inv.Zygotes)
	}
}

// TestInvalidateDuringALoad invalidates parameters during their load. Orders that wait for the load
// get the new parameters.
func TestInvalidateDuringALoad(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
	defer cancel()
	n := newNode(t, nil)
	started := make(chan *startedReplica, 1)
	go func() {
		r, err := n.Start(ctx, node.Order{Replica: "a", Spec: withModel})
		if err != nil {
			t.Error(err)
		}
		started <- r
	}()
	proctest.Until(t, "the load to begin", func() bool {
		z := n.Inventory().Zygotes
		return len(z) == 1 && z[0].State == Loading && z[0].Bytes > 1<<20 && z[0].Function == "f.ns"
	})
	got, err := n.Invalidate(ctx, "f.ns")
	if err != nil || got.Generation != 1 {
		t.Errorf("%+v, %v", got, err)
	}
	if r := <-started; r != nil {
		defer r.Conn.Close()
		n.answers(r)
	}
	if inv := n.Inventory(); len(inv.Zygotes) != 1 || inv.Zygotes[0].Generation != 1 || len(inv.Failures) != 0 {
		t.Errorf("inventory %+v, want the parameters of the next generation", inv)
	}
}

// TestAnInvalidationOvertakesAStart invalidates parameters while a replica uses them. At that time,
// another start has chosen the old parameters but has not asked for them yet.
func TestAnInvalidationOvertakesAStart(t *testing.T) {
	n := newNode(t, nil)
	n.start("old", withModel)
	n.store.mu.Lock()
	seen := n.store.uses["f.ns"]
	n.store.mu.Unlock()
	if _, err := n.Invalidate(t.Context(), "f.ns"); err != nil {
		t.Fatal(err)
	}
	image, err := n.cfg.Images.Resolve(withModel.Image)
	if err != nil {
		t.Fatal(err)
	}
	z, _, release, err := n.loader.borrow(t.Context(), seen, withModel, image)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	if z.Key.Generation != seen.Generation+1 {
		t.Errorf("it got generation %d, want %d", z.Key.Generation, seen.Generation+1)
	}
}

// TestStartsNeverForkFromWhatWasReplaced runs starts, invalidations and removals at the same time.
func TestStartsNeverForkFromWhatWasReplaced(t *testing.T) {
	n := newNode(t, nil)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var latest atomic.Uint64 // generation that an Invalidate has returned
	var wg sync.WaitGroup
	n.start("first", withModel)
	for g := range 4 {
		wg.Go(func() {
			for i := range 8 {
				name := fmt.Sprint("r", g, "-", i)
				least := latest.Load()
				r, err := n.Start(ctx, node.Order{Replica: name, Spec: withModel})
				if errors.Is(err, errForgotten) {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				n.store.mu.Lock()
				from := n.store.processes[name].zygote.Key.Generation
				n.store.mu.Unlock()
				if from < least {
					t.Errorf("%s forked from generation %d after %d had begun", name, from, least)
				}
				_ = r.Conn.Close()
				if err := n.Stop(ctx, name, time.Minute); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Go(func() {
		for i := range 12 {
			if i%4 == 3 {
				n.Forget("f.ns")
				continue
			}
			got, err := n.Invalidate(ctx, "f.ns")
			if err != nil {
				t.Error(err)
			}
			latest.Store(max(latest.Load(), got.Generation))
		}
	})
	wg.Wait()
	n.Forget("f.ns")
	if err := n.Stop(ctx, "first", time.Minute); err != nil {
		t.Fatal(err)
	}
	proctest.Until(t, "nothing to be left", func() bool {
		n.loader.tidy()
		n.store.mu.Lock()
		defer n.store.mu.Unlock()
		return n.store.slots.Len()+len(n.store.generations)+len(n.store.asks)+len(n.store.uses)+len(n.store.sizes)+len(n.store.going) == 0
	})
}

// forgetting removes a function while its image is being resolved.
type forgetting struct {
	Images
	do func()
}

func (f forgetting) Resolve(image string) (sandbox.Image, error) {
	f.do()
	return f.Images.Resolve(image)
}

func TestWhatIsForgottenDuringAStartDoesNotComeBack(t *testing.T) {
	var n *rig
	n = newNode(t, func(c *Config) { c.Images = forgetting{c.Images, func() { n.Forget("f.ns") }} })
	if _, err := n.Start(t.Context(), node.Order{Replica: "a", Spec: withModel}); !errors.Is(err, errForgotten) {
		t.Errorf("start: %v, want %v", err, errForgotten)
	}
	if _, err := n.Load(t.Context(), withModel); !errors.Is(err, errForgotten) {
		t.Errorf("load: %v, want %v", err, errForgotten)
	}
	if err := n.Warm(t.Context(), []node.Wanted{{Spec: withModel}}); err != nil {
		t.Errorf("warm: %v", err)
	}
	if inv := n.Inventory(); len(inv.Zygotes) != 0 || len(n.store.uses) != 0 || len(n.store.asks) != 0 {
		t.Errorf("left are %+v, %v, %v", inv.Zygotes, n.store.uses, n.store.asks)
	}
}

func TestARedeployWithoutAModelRetiresTheZygote(t *testing.T) {
	n := newNode(t, nil)
	n.start("a", withModel)
	z := n.zygote()
	n.start("b", node.Spec{Function: "f.ns", Namespace: "ns", Image: "test/wait:1"})
	if err := n.Stop(t.Context(), "a", time.Minute); err != nil {
		t.Fatal(err)
	}
	proctest.Gone(t, z)
}

func TestLoadAndEvictOnRequest(t *testing.T) {
	var changes atomic.Int64
	n := newNode(t, func(c *Config) { c.OnChange = func() { changes.Add(1) } })
	if _, err := n.Load(t.Context(), node.Spec{Function: "g.ns", Image: "test/wait:1"}); !errors.Is(err, ErrNoModel) {
		t.Errorf("without a model: %v, want %v", err, ErrNoModel)
	}
	if _, err := n.Evict(t.Context(), "f.ns"); !errors.Is(err, ErrNotCached) {
		t.Errorf("of nothing: %v, want %v", err, ErrNotCached)
	}
	one, err := n.Load(t.Context(), withModel)
	if err != nil || one.PID == 0 || one.Bytes < 1<<20 || one.State != Ready || one.Function != "f.ns" || one.Namespace != "ns" || one.Model != "model.onnx" || !one.LastUsed.IsZero() {
		t.Errorf("loaded %+v, %v", one, err)
	}
	if again, err := n.Load(t.Context(), withModel); err != nil || again.PID != one.PID {
		t.Errorf("again: %+v, %v, want the same", again, err)
	}
	if changes.Load() == 0 {
		t.Error("nobody was told of a change")
	}
	n.start("a", withModel)
	for _, what := range []string{"f.ns", one.Digest} {
		if _, err := n.Evict(t.Context(), what); !errors.Is(err, ErrBusy) || !containsAll(err.Error(), "1 replicas run from it (a)", "scale the function down") {
			t.Errorf("busy: %v, want %v and the replica", err, ErrBusy)
		}
	}
	if inv := n.Inventory(); inv.Zygotes[0].LastUsed.IsZero() {
		t.Errorf("zygote %+v, want when it was used last", inv.Zygotes[0])
	}
	if err := n.Stop(t.Context(), "a", time.Minute); err != nil {
		t.Fatal(err)
	}
	before := changes.Load()
	if bytes, err := n.Evict(t.Context(), one.Digest); err != nil || bytes != one.Bytes {
		t.Errorf("evicted %d bytes, %v, want %d", bytes, err, one.Bytes)
	}
	proctest.Gone(t, one.PID)
	if inv := n.Inventory(); len(inv.Zygotes) != 0 || inv.Evicted.Asked != 1 || changes.Load() == before {
		t.Errorf("inventory %+v, %d changes", inv, changes.Load()-before)
	}
}
