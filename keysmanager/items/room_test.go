package items

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/tensor"
)

// TestRoomBoundsFetchedItems checks that batches wait for memory, in the order in which they came,
// and that a batch gets the memory of all of its items together.
func TestRoomBoundsFetchedItems(t *testing.T) {
	r := newRoom(1000)
	refs := func(sizes ...int64) (out []tensor.Ref) {
		for _, size := range sizes {
			out = append(out, tensor.Ref{Size: size})
		}
		return out
	}
	type got struct {
		what    string
		release func()
		err     error
	}
	done := make(chan got, 10)
	waits := int64(0)
	begin := func(ctx context.Context, what string, sizes ...int64) {
		t.Helper()
		waits++
		go func() {
			release, err := r.reserve(ctx, refs(sizes...))
			done <- got{what, release, err}
		}()
		until(t, what+" to wait", func() bool { return r.stats().Waiting == waits })
	}
	next := func(want string) got {
		t.Helper()
		waits--
		g := <-done
		if g.what != want {
			t.Fatalf("%s gets memory, want %s", g.what, want)
		}
		return g
	}
	first, err := r.reserve(t.Context(), refs(300, 300))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	begin(ctx, "canceled", 500)
	begin(t.Context(), "too large", 900, 900)
	begin(t.Context(), "small", 100)
	cancel(errors.New("nobody waits for it"))
	if g := next("canceled"); g.err == nil || !strings.Contains(g.err.Error(), "no room for 500 bytes, 600 of 1000 are in use: nobody waits for it") {
		t.Errorf("a canceled batch: %v", g.err)
	}
	if got := r.stats(); got.Used != 600 || got.Waiting != 2 {
		t.Errorf("while two wait: %+v, want that none of them has anything", got)
	}
	first()
	large := next("too large")
	if got := r.stats(); got.Used != 1800 || got.Waiting != 1 {
		t.Errorf("with a batch that is larger than all of it: %+v", got)
	}
	large.release()
	next("small").release()
	if got := r.stats(); got.Used != 0 || got.Waiting != 0 || got.Waited == 0 {
		t.Errorf("in the end: %+v", got)
	}
}

// TestRoomIsForItemsOfOtherNodes checks that items of the node itself need no memory, because they
// are not copied.
func TestRoomIsForItemsOfOtherNodes(t *testing.T) {
	c := newCluster(t)
	a := c.node("a", 1<<20)
	release, err := a.Reserve(t.Context(), []tensor.Ref{
		{Size: 300 << 10, Keeper: tensor.Keeper{Node: "a"}}, {Size: 200 << 10, Keeper: tensor.Keeper{Node: "b"}},
	})
	if err != nil || a.Fetching().Used != 200<<10 {
		t.Errorf("%+v, %v", a.Fetching(), err)
	}
	release()
	if got := a.Fetching().Used; got != 0 {
		t.Errorf("%d bytes are in use after the release", got)
	}
}
