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

// Items keeps large outputs of a node's replicas, and gets items that nodes keep. Its methods are
// safe for concurrent use. Package items implements it.
type Items interface {
	// Keep keeps an item that is the first size bytes of f. After an error, the output goes to the
	// control plane as it is.
	Keep(owner wire.Owner, function string, f *os.File, size int64) (tensor.Ref, error)
	// Get returns an item as a file, which the caller closes.
	Get(ctx context.Context, ref tensor.Ref) (*os.File, error)
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

	// Held while a batch or a cancel of it is sent to the replica, so that they stay in order. Not
	// held with mu: a replica may have to write before it reads.
	order  sync.Mutex
	coming map[uint64]*coming // by batch: those whose items are on their way
}

// owners has the owners of a batch's outputs, by call.
type owners struct {
	of   []wire.Owner
	left int // calls without an answer
}

// coming is a batch whose items are on their way.
type coming struct {
	cancel   context.CancelCauseFunc
	canceled map[int]bool // indexes of calls
	after    [][]byte     // payloads of frames that cancel a call
	calls    int
}

func newCarry(items Items, of running, near, far *wire.Outlet, log *slog.Logger) *carry {
	c := &carry{
		running: of, items: items, far: far, near: near, log: log,
		owners: map[uint64]*owners{}, coming: map[uint64]*coming{},
	}
	c.ctx, c.end = context.WithCancel(context.Background())
	return c
}

// close ends what is under way, and waits for it.
func (c *carry) close() {
	c.end()
	c.work.Wait()
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
	c.order.Lock()
	c.coming[f.Batch] = &coming{cancel: cancel, canceled: map[int]bool{}, calls: len(b.Calls)}
	c.order.Unlock()
	number, files := f.Batch, f.Files
	c.work.Go(func() {
		defer cancel(nil)
		c.fetch(ctx, number, b, files)
	})
	return wire.Taken, nil
}

// hold handles a cancel. If the batch waits for items, the cancel is kept and sent after the batch.
// Outputs of canceled calls do not stay on the node, because nobody tells it of their end.
func (c *carry) hold(f *wire.Frame) (wire.Edited, error) {
	m, err := wire.DecodeCancelFrame(f.Payload)
	if err != nil {
		return wire.Unchanged, err
	}
	c.mu.Lock()
	if o := c.owners[f.Batch]; o != nil && m.Index == wire.CancelAll {
		delete(c.owners, f.Batch)
	} else if o != nil && m.Index < len(o.of) {
		o.of[m.Index].Request = ""
	}
	c.mu.Unlock()
	c.order.Lock()
	defer c.order.Unlock()
	w := c.coming[f.Batch]
	if w == nil {
		return wire.Unchanged, nil
	}
	w.after = append(w.after, bytes.Clone(f.Payload))
	w.canceled[m.Index] = true
	if w.canceled[wire.CancelAll] || len(w.canceled) == w.calls {
		w.cancel(wire.ErrCanceled)
	}
	return wire.Taken, nil
}

// fetch gets the items of a batch and gives it to the replica. If an item is lost, it answers the
// batch.
func (c *carry) fetch(ctx context.Context, number uint64, b wire.Batch, files []*os.File) {
	f, err := wire.Fetched(number, b, files, func(ref tensor.Ref) (*os.File, error) { return c.items.Get(ctx, ref) })
	c.order.Lock()
	defer c.order.Unlock()
	w := c.coming[number]
	delete(c.coming, number)
	if err != nil {
		closeFiles(files)
		if c.ctx.Err() == nil {
			c.refuse(number, b, errors.Join(err, context.Cause(ctx)))
		}
		return
	}
	err = c.near.Send(f)
	closeFiles(f.Files)
	for _, payload := range w.after {
		if err == nil {
			err = c.near.Send(wire.Frame{Type: wire.FrameCancel, Batch: number, Payload: payload})
		}
	}
	if err != nil {
		c.log.Debug("failed to give a batch to a replica, which has ended", "replica", c.replica, "error", err)
	}
}

// refuse answers the calls of a batch that the replica does not get.
func (c *carry) refuse(number uint64, b wire.Batch, why error) {
	c.mu.Lock()
	delete(c.owners, number)
	c.mu.Unlock()
	for _, payload := range wire.Refusals(b, why) {
		if err := c.far.Send(wire.Frame{Type: wire.FrameError, Batch: number, Payload: payload}); err != nil {
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
		if m, err := wire.DecodeError(f.Payload); err == nil {
			if m.OfDaemon() {
				return wire.Unchanged, errors.New("the replica says that its input is lost, which only daemons know")
			}
			c.answered(f.Batch, m.Index)
		}
	case wire.FrameResult:
		i, err := wire.AnswerIndex(f.Payload)
		if err != nil {
			break
		}
		owner, ok := c.answered(f.Batch, i)
		if !ok || len(f.Files) == 0 {
			break
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
	}
	return wire.Unchanged, nil
}

// answered notes the answer of a call. It returns the owner of the call's outputs; ok is false if
// they are not to be kept.
func (c *carry) answered(batch uint64, call int) (owner wire.Owner, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	o := c.owners[batch]
	if o == nil || call < 0 || call >= len(o.of) {
		return owner, false
	}
	if o.left--; o.left <= 0 {
		delete(c.owners, batch)
	}
	return o.of[call], o.of[call].Request != ""
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		_ = f.Close() // opened for reading only
	}
}
