package dispatch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"os"
	"slices"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Items fetches items that nodes keep, for replicas without a daemon that fetches them. Its methods
// are safe for concurrent use. Package items implements it.
type Items interface {
	// Reserve waits for memory for items, until ctx ends. The caller calls release when the items
	// are not needed any more.
	Reserve(ctx context.Context, refs []tensor.Ref) (release func(), err error)
	// Fetch returns an item as a file, which the caller closes.
	Fetch(ctx context.Context, ref tensor.Ref) (*os.File, error)
}

// errEnded means that a replica ended before it got a batch.
var errEnded = errors.New("the replica ended before it got the batch")

// prepared is the frame of a batch whose items were fetched.
type prepared struct {
	wire.Frame
	got *fetched
}

// close closes the frame's files.
func (r prepared) close() {
	r.got.drop(r.Files)
	r.got.close()
}

func (prepared) effect() {}

// far returns the items that nodes keep.
func far(items tensor.Activation) iter.Seq[tensor.Ref] {
	return func(yield func(tensor.Ref) bool) {
		for i := range items {
			if ref := items[i].Ref; ref != nil && ref.Node != "" && !yield(*ref) {
				return
			}
		}
	}
}

// needed returns the items of a batch that this process has to fetch from nodes, each item once.
func (l *link) needed(e Send) (refs []tensor.Ref) {
	used, known := 0, map[tensor.Ref]bool{}
	for _, t := range e.Tasks {
		for _, p := range t.Input {
			if attached(used, p.Items) {
				used += separate(p.Items)
				if l.at != nil {
					continue // the replica's daemon fetches them
				}
			}
			for ref := range far(p.Items) {
				if !known[ref] {
					known[ref] = true
					refs = append(refs, ref)
				}
			}
		}
	}
	return refs
}

// fetch starts a goroutine that fetches the items of a batch and then queues the batch's frame.
// Other frames pass meanwhile. The caller holds o.mu.
func (o *outbox) fetch(e Send, refs []tensor.Ref) {
	if o.ctx.Err() != nil {
		return // its calls are answered when the Core hears of the replica's end
	}
	ctx, end := context.WithCancelCause(o.ctx)
	o.waits.Add(e.Batch, len(e.Tasks), end)
	o.work.Go(func() {
		defer end(nil)
		ctx, stop := context.WithTimeout(ctx, wire.FetchTime)
		defer stop()
		o.get(ctx, e, refs)
		o.flush()
	})
}

// get fetches the items of a batch. Then it queues the batch's frame, or answers its calls.
func (o *outbox) get(ctx context.Context, e Send, refs []tensor.Ref) {
	release, err := func() {}, error(nil)
	store := o.link.f.shell.cfg.Items
	if store == nil {
		err = errors.New("the batch needs items of nodes, and there are no nodes on other machines")
	} else if release, err = store.Reserve(ctx, refs); err != nil {
		err = fmt.Errorf("memory for items of nodes: %w", err)
	}
	if err != nil {
		o.giveUp(ctx, e, func(call int) *task.Reply { return refusal(wire.Refusal(call, err)) })
		return
	}
	got := o.fetchAll(ctx, store, refs)
	if !o.prepare(ctx, e, got, release) {
		got.close()
		release()
	}
}

// fetchAll fetches items from nodes.
func (o *outbox) fetchAll(ctx context.Context, from Items, refs []tensor.Ref) *fetched {
	got := &fetched{Store: o.link.f.shell.cfg.Store, files: map[tensor.Ref]*os.File{}, errs: map[tensor.Ref]error{}}
	files, errs := wire.Fetch(refs, func(ref tensor.Ref) (*os.File, error) { return from.Fetch(ctx, ref) })
	for i, ref := range refs {
		got.files[ref], got.errs[ref] = files[i], errs[i]
	}
	return got
}

// prepare queues the frame of a batch, without the calls that were canceled meanwhile. It returns
// false if it has answered the calls instead. The caller then closes got and calls release.
func (o *outbox) prepare(ctx context.Context, e Send, got *fetched, release func()) bool {
	for {
		o.mu.Lock()
		calls := o.waits.Left(e.Batch)
		o.mu.Unlock()
		if err := got.lost(e, calls); err != nil || len(calls) == 0 || ctx.Err() != nil {
			err = cmp.Or(err, context.Cause(ctx))
			o.giveUp(ctx, e, func(call int) *task.Reply { return refusal(wire.Refusal(call, err)) })
			return false
		}
		left := Send{Replica: e.Replica, Batch: e.Batch}
		for _, call := range calls {
			left.Tasks = append(left.Tasks, e.Tasks[call])
		}
		enc := encoder{link: o.link, store: got}
		frame, bad, err := enc.batch(left)
		if err != nil {
			got.drop(frame.Files)
			o.giveUp(ctx, e, func(call int) *task.Reply { return unsent(call == calls[bad], err) })
			return false
		}
		if o.give(prepared{frame, got}, calls, release) {
			return true
		}
		got.drop(frame.Files) // one of its calls was canceled meanwhile
	}
}

// give queues a frame that has these calls of its batch. It returns false if one of them was
// canceled.
func (o *outbox) give(r prepared, calls []int, release func()) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.waits.Give(r.Batch, calls, release) {
		return false
	}
	o.queue = append(o.queue, parcel{r, roomLimit + 1})
	o.settle()
	return true
}

// settle queues the Drain that waited for batches, if no batch waits any more. The caller holds
// o.mu.
func (o *outbox) settle() {
	if o.drain && o.waits.Waiting() == 0 {
		o.drain = false
		o.queue = append(o.queue, parcel{leaving{}, frameCost})
	}
}

// giveUp answers the calls of a batch that the replica does not get.
func (o *outbox) giveUp(ctx context.Context, e Send, answer func(call int) *task.Reply) {
	if errors.Is(context.Cause(ctx), errEnded) {
		answer = func(int) *task.Reply { return &task.Reply{Code: task.InputLost, Message: errEnded.Error()} }
	}
	o.mu.Lock()
	calls := o.waits.Refuse(e.Batch)
	o.mu.Unlock()
	for _, call := range calls {
		o.step(Result{Replica: e.Replica, Batch: e.Batch, Call: call, Reply: answer(call)})
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.waits.Forget(e.Batch)
	o.settle()
}

// answer answers calls that were canceled while their batch waited for items. The caller holds
// o.mu.
func (o *outbox) answer(e CancelCall, calls []int) {
	if o.ctx.Err() != nil || len(calls) == 0 {
		return
	}
	o.work.Go(func() { // a goroutine, because push is called while the Core is locked
		for _, call := range calls {
			o.step(Result{Replica: e.Replica, Batch: e.Batch, Call: call, Reply: &task.Reply{Code: task.Canceled, Message: wire.ErrCanceled.Error()}})
		}
	})
}

// close ends all fetches, waits for them, and releases their files and memory. The outbox writes no
// frames after that: the connection is closed, or will be.
func (o *outbox) close() {
	o.mu.Lock()
	o.end(errEnded)
	o.mu.Unlock()
	o.work.Wait()
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, p := range o.queue {
		if r, ok := p.effect.(prepared); ok {
			r.close()
		}
	}
	o.queue = nil
	o.waits.Close()
}

// refusal returns the reply of this process in place of a replica's answer.
func refusal(m wire.Error) *task.Reply {
	return &task.Reply{Code: m.Code, Message: m.Message, Lost: m.Lost}
}

// fetched is a Store that also has items of nodes, as files that were fetched.
type fetched struct {
	Store

	files map[tensor.Ref]*os.File // nil: the item is lost
	errs  map[tensor.Ref]error
}

// lost returns a [wire.LostError] if calls of a batch need items that could not be fetched.
func (f *fetched) lost(e Send, calls []int) error {
	var lost wire.LostError
	for _, call := range calls {
		for _, p := range e.Tasks[call].Input {
			for ref := range far(p.Items) {
				if err := f.errs[ref]; err != nil {
					lost = append(lost, wire.LostItem{Call: call, Ref: ref, Err: err})
				}
			}
		}
	}
	if lost == nil {
		return nil
	}
	return lost
}

// Open returns an item as a file for reading. The caller closes the file, except for an item of a
// node: that file stays open until close.
func (f *fetched) Open(ref tensor.Ref) (*os.File, error) {
	if ref.Node == "" {
		return f.Store.Open(ref)
	}
	if file := f.files[ref]; file != nil {
		return file, nil
	}
	return nil, fmt.Errorf("item %s of node %q was not fetched", ref.Blob, ref.Node)
}

// Get returns an encoded item.
func (f *fetched) Get(ref tensor.Ref) ([]byte, error) {
	if ref.Node == "" {
		return f.Store.Get(ref)
	}
	file, err := f.Open(ref)
	if err != nil {
		return nil, err
	}
	return io.ReadAll(io.NewSectionReader(file, 0, ref.Size))
}

// drop closes the files of a frame, except for those that were fetched.
func (f *fetched) drop(files []*os.File) {
	own := slices.Collect(maps.Values(f.files))
	for _, file := range files {
		if !slices.Contains(own, file) {
			_ = file.Close() // opened for reading only
		}
	}
}

// close closes the files that were fetched.
func (f *fetched) close() {
	for _, file := range f.files {
		if file != nil {
			_ = file.Close() // it is in memory
		}
	}
}
