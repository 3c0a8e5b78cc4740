package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"

	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Items keeps large outputs of a node's replicas, and fetches items that nodes keep. Its methods
// are safe for concurrent use. Package items implements it.
type Items interface {
	// Keep keeps an item that is the first size bytes of f. After an error, the output goes to the
	// control plane as it is.
	Keep(owner wire.Owner, function string, f *os.File, size int64) (tensor.Ref, error)
	// Reserve waits for memory for items, until ctx ends. The caller calls release when the items
	// are not needed any more.
	Reserve(ctx context.Context, refs []tensor.Ref) (release func(), err error)
	// Fetch returns an item as a file, which the caller closes.
	Fetch(ctx context.Context, ref tensor.Ref) (*os.File, error)
	// Room returns how many bytes may be kept; 0: nothing is.
	Room() int64
}

// running names a replica and its function.
type running struct{ replica, function string }

// carry is the part of a relay that handles items: it gives large outputs to Items, and gets the
// items of batches from there. toReplica is called by one goroutine, and fromReplica by another
// one.
type carry struct {
	running

	items     Items
	far, near *wire.Outlet
	log       *slog.Logger
	ctx       context.Context
	end       context.CancelFunc
	work      sync.WaitGroup

	mu     sync.Mutex
	owners map[uint64]*owners // by batch, of batches whose outputs may be kept
	waits  wire.Waits         // batches whose items are fetched

	// order is held while a batch or a cancel of it is sent to the replica, so that the batch comes
	// first. mu is not held meanwhile, because a replica may have to write before it reads.
	order sync.Mutex
}

// owners has the owners of a batch's outputs, by call.
type owners struct {
	of   []wire.Owner
	left int // calls without an answer
}

func newCarry(items Items, of running, near, far *wire.Outlet, log *slog.Logger) *carry {
	c := &carry{
		running: of, items: items, far: far, near: near, log: log,
		owners: map[uint64]*owners{},
	}
	c.ctx, c.end = context.WithCancel(context.Background())
	return c
}

// close ends all fetches, and waits for them. The caller passes no frames after that.
func (c *carry) close() {
	c.end()
	c.work.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waits.Close()
}

// toReplica is the [wire.Edit] of frames to the replica.
func (c *carry) toReplica(f *wire.Frame) (wire.Edited, error) {
	switch {
	case f.Type == wire.FrameCancel:
		return c.hold(f)
	case f.Type != wire.FrameBatch || !f.Kept && !f.Keep:
		return wire.Unchanged, nil
	}
	payload := f.Payload
	if f.Kept { // the batch is sent later
		payload = bytes.Clone(payload)
	}
	b, err := wire.DecodeBatch(payload)
	if err != nil {
		return wire.Unchanged, fmt.Errorf("batch %d: %w", f.Batch, err)
	}
	if f.Keep {
		c.mu.Lock()
		c.owners[f.Batch] = &owners{wire.Owners(b), len(b.Calls)}
		c.mu.Unlock()
	}
	if !f.Kept {
		f.Keep = false // replicas do not know it
		return wire.Changed, nil
	}
	ctx, cancel := context.WithCancelCause(c.ctx)
	c.mu.Lock()
	c.waits.Add(f.Batch, len(b.Calls), cancel)
	c.mu.Unlock()
	number, files := f.Batch, f.Files
	c.work.Go(func() {
		defer cancel(nil)
		ctx, stop := context.WithTimeout(ctx, wire.FetchTime)
		defer stop()
		c.fetch(ctx, number, b, files)
	})
	return wire.Taken, nil
}

// hold handles a cancel. If the batch waits for items, hold answers the call, and the replica does
// not get the call. Outputs of canceled calls do not stay on the node, because nobody tells the
// node of their end.
func (c *carry) hold(f *wire.Frame) (wire.Edited, error) {
	m, err := wire.DecodeCancelFrame(f.Payload)
	if err != nil {
		return wire.Unchanged, err
	}
	c.order.Lock() // waits for a batch that is being sent to the replica
	defer c.order.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	canceled := c.waits.Cancel(f.Batch, m.Index)
	if o := c.owners[f.Batch]; o != nil {
		o.left -= len(canceled.Answer)
		if m.Index == wire.CancelAll || o.left <= 0 {
			delete(c.owners, f.Batch)
		} else if m.Index < len(o.of) {
			o.of[m.Index].Request = ""
		}
	}
	if len(canceled.Answer) > 0 {
		batch := f.Batch
		c.work.Go(func() { c.refuse(batch, canceled.Answer, wire.ErrCanceled) })
	}
	switch {
	case !canceled.Pass:
		return wire.Taken, nil
	case canceled.Index != m.Index:
		f.Payload = wire.Cancel{Index: canceled.Index}.Append(nil)
		return wire.Changed, nil
	}
	return wire.Unchanged, nil
}

// fetch gets the items of a batch and gives it to the replica. If an item is lost, it answers the
// batch.
func (c *carry) fetch(ctx context.Context, number uint64, b wire.Batch, files []*os.File) {
	release, err := c.items.Reserve(ctx, wire.KeptRefs(b))
	if err != nil {
		closeFiles(files)
		c.refuseAll(number, fmt.Errorf("memory for items of nodes: %w", err))
		return
	}
	got := wire.FetchBatch(b, files, func(ref tensor.Ref) (*os.File, error) { return c.items.Fetch(ctx, ref) })
	defer got.Close()
	c.order.Lock()
	defer c.order.Unlock()
	c.mu.Lock()
	calls := c.waits.Left(number)
	c.mu.Unlock()
	f, err := got.Frame(number, calls)
	if err != nil || len(calls) == 0 {
		release()
		c.refuseAll(number, err)
		return
	}
	c.mu.Lock()
	c.waits.Give(number, calls, release) // no call was canceled since: order is held
	c.mu.Unlock()
	if err := c.near.Send(f); err != nil {
		c.log.Debug("failed to give a batch to a replica, which has ended", "replica", c.replica, "error", err)
	}
}

// refuseAll answers the calls of a batch that have no answer yet. The replica does not get it.
func (c *carry) refuseAll(number uint64, why error) {
	c.mu.Lock()
	delete(c.owners, number)
	calls := c.waits.Refuse(number)
	c.mu.Unlock()
	c.refuse(number, calls, why)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waits.Forget(number)
}

// refuse answers calls that the replica does not get, with the error why.
func (c *carry) refuse(number uint64, calls []int, why error) {
	if c.ctx.Err() != nil {
		return
	}
	for _, call := range calls {
		if err := c.far.Send(wire.Frame{Type: wire.FrameError, Batch: number, Payload: wire.Refusal(call, why).Append(nil)}); err != nil {
			c.log.Debug("failed to refuse a batch; the control plane is gone", "replica", c.replica, "error", err)
			return
		}
	}
}

// fromReplica is the [wire.Edit] of frames from the replica. Frames that break the protocol pass:
// the control plane finds out.
func (c *carry) fromReplica(f *wire.Frame) (wire.Edited, error) {
	if f.Kept || f.Keep {
		return wire.Unchanged, fmt.Errorf("the replica has sent %v with flags that only daemons use", f.Type)
	}
	switch f.Type {
	case wire.FrameError:
		m, err := wire.DecodeError(f.Payload)
		if err != nil {
			break
		}
		if m.OfDaemon() {
			return wire.Unchanged, errors.New("the replica says that its input is lost, which only daemons know")
		}
		call, _ := c.answered(f.Batch, m.Index)
		return renumber(f, m.Index, call), nil
	case wire.FrameChunk:
		return c.chunk(f)
	case wire.FrameResult:
		return c.result(f)
	}
	return wire.Unchanged, nil
}

// chunk is fromReplica for a piece of an output.
func (c *carry) chunk(f *wire.Frame) (wire.Edited, error) {
	at, err := wire.AnswerIndex(f.Payload)
	if err != nil {
		return wire.Unchanged, nil
	}
	c.mu.Lock()
	call := c.waits.Call(f.Batch, at)
	c.mu.Unlock()
	return renumber(f, at, call), nil
}

// result is fromReplica for an output.
func (c *carry) result(f *wire.Frame) (wire.Edited, error) {
	at, err := wire.AnswerIndex(f.Payload)
	if err != nil {
		return wire.Unchanged, nil
	}
	call, owner := c.answered(f.Batch, at)
	edited := renumber(f, at, call)
	if owner.Request == "" || len(f.Files) == 0 {
		return edited, nil
	}
	changed, err := wire.KeepFiles(f, func(item *os.File, size int64) (tensor.Ref, bool) {
		ref, err := c.items.Keep(owner, c.function, item, size)
		if err != nil {
			c.log.Debug("an output goes through the control plane", "function", c.function, "replica", c.replica, "error", err)
		}
		return ref, err == nil
	})
	if err == nil && changed {
		return wire.Changed, nil
	}
	return edited, nil
}

// renumber changes the number of the call that a frame is about.
func renumber(f *wire.Frame, at, call int) wire.Edited {
	if at == call {
		return wire.Unchanged
	}
	f.Payload = wire.WithIndex(f.Payload, call)
	return wire.Changed
}

// answered notes the answer of a call. It returns the control plane's number of the call, and the
// owner of the call's outputs. If the owner has no request, the outputs are not kept.
func (c *carry) answered(batch uint64, at int) (call int, owner wire.Owner) {
	c.mu.Lock()
	defer c.mu.Unlock()
	call = c.waits.Answered(batch, at)
	o := c.owners[batch]
	if o == nil || call < 0 || call >= len(o.of) {
		return call, owner
	}
	if o.left--; o.left <= 0 {
		delete(c.owners, batch)
	}
	return call, o.of[call]
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		_ = f.Close() // opened for reading only
	}
}
