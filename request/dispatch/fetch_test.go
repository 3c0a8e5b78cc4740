package dispatch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

var errGone = errors.New("the node is gone")

// fakeNodes are Items whose fetches end when the test says so.
type fakeNodes struct {
	t       *testing.T
	fetches chan fetching
	full    chan struct{} // nil: there is always memory

	mu       sync.Mutex
	reserved int
	open     []*os.File
}

// fetching is an item that is being fetched.
type fetching struct {
	blob  string
	gone  <-chan struct{} // its context has ended
	comes chan error      // nil: the item has come
}

// nodes makes the rig's shell fetch items of nodes.
func (r *rig) nodes() *fakeNodes {
	n := &fakeNodes{t: r.t, fetches: make(chan fetching, 100)}
	r.shell.cfg.Items = n
	r.t.Cleanup(func() {
		r.shell.Close()
		n.mu.Lock()
		defer n.mu.Unlock()
		if n.reserved != 0 {
			r.t.Errorf("memory of %d batches is still reserved", n.reserved)
		}
		for _, f := range n.open {
			if f.Fd() != ^uintptr(0) {
				r.t.Error("a file was not closed")
			}
		}
	})
	return n
}

func (n *fakeNodes) Reserve(ctx context.Context, _ []tensor.Ref) (func(), error) {
	if n.full != nil {
		select {
		case <-n.full:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.reserved++
	return sync.OnceFunc(func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.reserved--
	}), nil
}

func (n *fakeNodes) Fetch(ctx context.Context, ref tensor.Ref) (*os.File, error) {
	f := fetching{ref.Blob, ctx.Done(), make(chan error, 1)}
	n.fetches <- f
	select {
	case err := <-f.comes:
		if err != nil {
			return nil, err
		}
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	file, err := wire.NewMemory()
	if err == nil {
		_, err = file.Write(tensor.AppendItem(nil, text(ref.Blob)))
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.open = append(n.open, file)
	return file, err
}

// next returns the next fetch of an item. The test ends the fetch with a value on its channel
// comes.
func (n *fakeNodes) next(blob string) fetching {
	n.t.Helper()
	f := receive(n.t, n.fetches, "fetch of "+blob)
	if f.blob != blob {
		n.t.Fatalf("item %s is fetched, want %s", f.blob, blob)
	}
	return f
}

// item is an item of a node.
func (n *fakeNodes) item(blob string) tensor.Item {
	size := int64(len(tensor.AppendItem(nil, text(blob))))
	return tensor.Item{Ref: &tensor.Ref{Owner: "r", Blob: blob, Size: size, Keeper: tensor.Keeper{Node: "other"}}}
}

// gets reads a batch, and returns its number and the texts of its items.
func (a *actor) gets(want ...string) uint64 {
	a.t.Helper()
	f := a.read(wire.FrameBatch)
	defer closeFiles(f.Files)
	b, err := wire.DecodeBatch(f.Payload)
	if err != nil {
		a.t.Fatal(err)
	}
	var got []string
	for _, c := range b.Calls {
		for _, p := range c.Input {
			items, err := wire.Detach(p.Items, f.Files)
			if err != nil {
				a.t.Fatal(err)
			}
			for _, it := range items {
				got = append(got, string(it.Bytes))
			}
		}
	}
	if !slices.Equal(got, want) {
		a.t.Fatalf("the replica gets %q, want %q", got, want)
	}
	return f.Batch
}

// TestOtherFramesPassAFetch checks that a batch whose items are fetched delays no other frame of
// its replica, and that each item is fetched once.
func TestOtherFramesPassAFetch(t *testing.T) {
	r := newRig(t, Spec{})
	n := r.nodes()
	a := attach(t, r.shell, "r1", 3, 1)
	r.submit("k1", n.item("x"), n.item("y"), n.item("x"))
	x, y := receive(t, n.fetches, "fetch"), receive(t, n.fetches, "second fetch")
	r.submit("k2", text("small"))
	second := a.gets("small")
	r.submit("k3", text("other"))
	third := a.gets("other")
	r.cancel("k2")
	r.reply("k2", task.Canceled, "")
	if f := a.read(wire.FrameCancel); f.Batch != second {
		t.Errorf("cancel of batch %d, want %d", f.Batch, second)
	}
	a.write(wire.FrameChunk, third, wire.Chunk{Data: make([]byte, streamGrant)}.Append(nil))
	a.read(wire.FrameCredit)
	x.comes <- nil
	y.comes <- nil
	first := a.gets("x", "y", "x")
	a.answer(first, 0, text("done"))
	r.reply("k1", task.OK, "")
	if len(n.fetches) > 0 {
		t.Error("an item that is needed twice is fetched twice")
	}
}

// TestCanceledCallsDoNotWaitForItems checks that a call is answered at once if it is canceled while
// its batch waits for items, that the replica does not get it, and that the replica's answers to
// the other calls are theirs.
func TestCanceledCallsDoNotWaitForItems(t *testing.T) {
	r := newRig(t, Spec{Batch: 4})
	n := r.nodes()
	for _, k := range []string{"k1", "k2", "k3", "k4"} {
		r.submit(k, n.item(k))
	}
	a := attach(t, r.shell, "r1", 1, 4)
	items := map[string]fetching{}
	for range 4 {
		f := receive(t, n.fetches, "fetch")
		items[f.blob] = f
	}
	r.cancel("k1")
	r.reply("k1", task.Canceled, "")
	for blob, f := range items {
		if blob == "k1" {
			f.comes <- errGone // nobody needs it any more
		} else {
			f.comes <- nil
		}
	}
	batch := a.gets("k2", "k3", "k4")
	r.cancel("k3")
	r.reply("k3", task.Canceled, "")
	if f := a.read(wire.FrameCancel); f.Batch != batch || f.Payload[0] != 1 {
		t.Errorf("cancel of call %d of batch %d, want 1 of %d", f.Payload[0], f.Batch, batch)
	}
	a.write(wire.FrameChunk, batch, wire.Chunk{Index: 2, Data: []byte("of ")}.Append(nil))
	a.answer(batch, 2, tensor.Item{Bytes: []byte("k4")})
	if got := r.reply("k4", task.OK, ""); string(got.Output[0].Bytes) != "of k4" {
		t.Errorf("output %q", got.Output[0].Bytes)
	}
	a.answer(batch, 0, text("k2"))
	r.reply("k2", task.OK, "")
	r.submit("k5", text("next"))
	a.write(wire.FrameError, batch, wire.Error{Index: 1, Code: task.Canceled}.Append(nil))
	a.gets("next") // not before: the slot was taken
}

// TestFetchesEndAtTheLimit checks that a fetch ends when the calls of its batch have run for too
// long.
func TestFetchesEndAtTheLimit(t *testing.T) {
	r := newRig(t, Spec{Timeout: 50 * ms})
	n := r.nodes()
	attach(t, r.shell, "r1", 1, 1)
	r.submit("k1", n.item("x"))
	x := n.next("x")
	r.reply("k1", task.Expired, "it ran for longer than exec_timeout")
	receive(t, x.gone, "end of the fetch")
}

// TestFetchesEndWithTheirCalls checks that a fetch ends when all of its batch's calls are canceled.
// The replica is not to blame, and takes the next batch.
func TestFetchesEndWithTheirCalls(t *testing.T) {
	r := newRig(t, Spec{})
	n := r.nodes()
	a := attach(t, r.shell, "r1", 1, 1)
	r.submit("k1", n.item("x"))
	x := n.next("x")
	r.cancel("k1")
	r.reply("k1", task.Canceled, "")
	receive(t, x.gone, "end of the fetch")

	n.full = make(chan struct{})
	r.submit("k3", n.item("z"))
	r.cancel("k3")
	r.reply("k3", task.Canceled, "")
	close(n.full)

	r.submit("k4", text("next"))
	a.answer(a.gets("next"), 0, text("done"))
	r.reply("k4", task.OK, "")
}

// TestFetchesEndWithTheirReplica checks that fetches end when their replica does, and that their
// calls may run again even if their stage may run only once.
func TestFetchesEndWithTheirReplica(t *testing.T) {
	r := newRig(t, Spec{})
	r.shell.bounds.cause = ms
	n := r.nodes()
	a := attach(t, r.shell, "r1", 2, 1)
	r.submit("k1", n.item("x"))
	x := n.next("x")
	r.submit("k2", text("small"))
	a.gets("small")
	_ = a.conn.Close()
	receive(t, x.gone, "end of the fetch")
	if got := r.reply("k1", task.InputLost, errEnded.Error()); got.Lost != nil {
		t.Errorf("lost %q, want none", got.Lost)
	}
	r.reply("k2", task.ReplicaLost, "connection closed")
}

// TestUnwrittenBatchesAreClosed checks that nothing is left of a batch whose items have come, but
// that its replica does not read before it ends.
func TestUnwrittenBatchesAreClosed(t *testing.T) {
	r := newRig(t, Spec{})
	r.shell.bounds.cause = ms
	n := r.nodes()
	const waiting = 100
	a := attach(t, r.shell, "r1", 2*waiting, 1)
	for i := range waiting { // more than the socket takes
		r.submit(fmt.Sprint("k", i), tensor.Item{Bytes: make([]byte, 60<<10)})
	}
	r.submit("fetched", n.item("x"))
	n.next("x").comes <- nil
	out := r.shell.function(pipeline.ParseKey("f.ns")).link("r1").out
	proctest.Until(t, "the fetched batch to wait for the socket", func() bool {
		out.mu.Lock()
		defer out.mu.Unlock()
		return slices.ContainsFunc(out.queue, func(p parcel) bool { _, is := p.effect.(prepared); return is })
	})
	_ = a.conn.Close()
	for range waiting + 1 {
		receive(t, r.bus.replies, "reply")
	}
}

// TestDrainComesAfterFetchedBatches checks that a replica that drains gets the batch that waits for
// items, and is told to end only after that.
func TestDrainComesAfterFetchedBatches(t *testing.T) {
	r := newRig(t, Spec{})
	n := r.nodes()
	a := attach(t, r.shell, "r1", 1, 1)
	r.submit("k1", n.item("x"))
	x := n.next("x")
	l := r.shell.function(pipeline.ParseKey("f.ns")).link("r1")
	l.out.push(leaving{}) // the Core does so only when no batch is left
	l.out.push(grant{7})
	l.out.flush()
	a.read(wire.FrameCredit)
	x.comes <- nil
	batch := a.gets("x")
	a.read(wire.FrameDrain)
	a.answer(batch, 0, text("done"))
	r.reply("k1", task.OK, "")
}

// TestItemsThatCannotBeGot checks the answers to calls whose items are lost or find no memory.
func TestItemsThatCannotBeGot(t *testing.T) {
	r := newRig(t, Spec{Batch: 2})
	n := r.nodes()
	r.submit("k1", n.item("x"))
	r.submit("k2", text("small"))
	a := attach(t, r.shell, "r1", 1, 2) // takes both at once
	n.next("x").comes <- errGone
	if got := r.reply("k1", task.InputLost, `which node "other" keeps, is lost: the node is gone`); !slices.Equal(got.Lost, []string{"x"}) {
		t.Errorf("lost %q", got.Lost)
	}
	if got := r.reply("k2", task.InputLost, "another call of its batch could not be sent"); got.Lost != nil {
		t.Errorf("lost %q, want none", got.Lost)
	}
	r.submit("k3", n.item("y"), tensor.Item{Ref: &tensor.Ref{Owner: "r", Blob: "nowhere", Size: 100}})
	n.next("y").comes <- nil
	r.reply("k3", task.Unavailable, "nowhere")
	r.shell.cfg.Items = nil
	r.submit("k4", n.item("z"))
	r.reply("k4", task.Unavailable, "there are no nodes on other machines")
	r.submit("k5", text("next"))
	a.gets("next")
}

// TestSmallItemsTakeNoFiles has a daemon fetch an item of a batch that also has many small items.
func TestSmallItemsTakeNoFiles(t *testing.T) {
	r := newRig(t, Spec{})
	n := r.nodes()
	a := attachAt(t, r.shell, "r1")
	k := newTask("k1", 0)
	k.Input = tensor.Input{{From: "p", Items: make(tensor.Activation, wire.MaxFiles)}, {From: "q", Items: tensor.Activation{n.item("x")}}}
	for i := range k.Input[0].Items {
		k.Input[0].Items[i] = text("small")
	}
	r.shell.Submit(k)
	if f := a.read(wire.FrameBatch); !f.Kept || len(n.fetches) > 0 {
		t.Errorf("kept %v, %d fetches here; want a reference for the daemon", f.Kept, len(n.fetches))
	}
}

// TestManyItemsOfNodesComeInline checks a batch with more items than a frame can have files.
func TestManyItemsOfNodesComeInline(t *testing.T) {
	r := newRig(t, Spec{})
	n := r.nodes()
	a := attach(t, r.shell, "r1", 1, 1)
	var in []tensor.Item
	var want []string
	for i := range wire.MaxFiles + 1 {
		want = append(want, fmt.Sprint(i))
		in = append(in, n.item(want[i]))
	}
	r.submit("k1", in...)
	for range in {
		receive(t, n.fetches, "fetch").comes <- nil
	}
	a.gets(want...)
}
