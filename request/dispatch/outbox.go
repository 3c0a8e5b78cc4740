package dispatch

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// outbox writes frames to one replica, in the order in which they were pushed.
//
// Small frames are written by the goroutine that calls flush, which saves a switch to another
// goroutine. Such a write never waits for the replica, because flush writes only frames that fit
// into the socket's buffer. For that, flush assumes that the replica has read nothing since its
// last answer. The outbox's own goroutine writes the other frames, and those that need files
// opened. So a replica that does not read delays no other replica.
type outbox struct {
	link *link
	kick chan struct{} // work for the goroutine
	step func(Event)   // tells the function; a value, so that its caller's buffers stay on the stack

	mu      sync.Mutex
	queue   []parcel
	unread  unread
	writing bool // somebody writes now; the fields below belong to that goroutine

	head     []parcel
	frame    []byte
	calls    []wire.Call
	deadline time.Time
}

// parcel is a frame to write.
type parcel struct {
	effect Effect // Send, CancelCall, leaving, grant or moreThreads
	cost   int
}

// leaving is the frame Drain, and grant is the frame Credit for bytes of chunks. The Core does not
// ask for them.
type (
	leaving struct{}
	grant   struct{ bytes int }
)

func (leaving) effect() {}
func (grant) effect()   {}

// roomLimit is how many bytes may be in the socket's buffer before a write could block. frameCost
// is the kernel's overhead per frame. Linux's default buffer is 208 KiB.
const (
	roomLimit = 96 << 10
	frameCost = 1 << 10
)

// push queues a frame.
func (o *outbox) push(e Effect) {
	p := parcel{e, cost(e)}
	o.mu.Lock()
	o.queue = append(o.queue, p)
	o.mu.Unlock()
}

// flush writes the queued frames, or wakes the goroutine to write them.
func (o *outbox) flush() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for len(o.queue) > 0 && !o.writing {
		n, room := 0, roomLimit-o.unread.bytes()
		for n < len(o.queue) && o.queue[n].cost <= room {
			room -= o.queue[n].cost
			n++
		}
		if n == 0 {
			select {
			case o.kick <- struct{}{}:
			default:
			}
			return
		}
		o.writeHead(n)
	}
}

// run is the outbox's goroutine.
func (o *outbox) run() {
	for {
		select {
		case <-o.link.gone:
			return
		case <-o.kick:
		}
		o.mu.Lock()
		for len(o.queue) > 0 && !o.writing {
			o.writeHead(1)
		}
		o.mu.Unlock()
	}
}

// writeHead removes the first n frames from the queue and writes them, small ones in one system
// call. It releases mu while it writes.
func (o *outbox) writeHead(n int) {
	o.head = append(o.head[:0], o.queue[:n]...)
	o.queue = slices.Delete(o.queue, 0, n)
	for _, p := range o.head {
		o.unread.add(p)
	}
	o.writing = true
	o.mu.Unlock()
	if err := o.write(o.head); errors.Is(err, os.ErrDeadlineExceeded) {
		o.link.fail(fmt.Sprintf("the replica does not read: %v", err), false)
	} else if err != nil {
		_ = o.link.conn.Close() // the reader notices and finds out why
	}
	clear(o.head)
	o.mu.Lock()
	o.writing = false
}

func (o *outbox) write(parcels []parcel) error {
	if err := o.extend(); err != nil {
		return err
	}
	for _, p := range parcels {
		if err := o.gather(p.effect); err != nil {
			return err
		}
	}
	return o.link.conn.Flush()
}

// extend moves the deadline of the replica's reads. It does so rarely, because setting a deadline
// costs more than reading a clock.
func (o *outbox) extend() error {
	now := time.Now()
	if o.deadline.Sub(now) >= o.link.f.shell.bounds.write/2 {
		return nil
	}
	o.deadline = now.Add(o.link.f.shell.bounds.write)
	return o.link.conn.SetWriteDeadline(o.deadline)
}

// gather encodes a frame to be written with others.
func (o *outbox) gather(e Effect) error {
	switch e := e.(type) {
	case Send:
		return o.send(e)
	case CancelCall:
		o.frame = wire.Cancel{Index: e.Call}.Append(o.frame[:0])
		return o.link.conn.Gather(wire.Frame{Type: wire.FrameCancel, Batch: e.Batch, Payload: o.frame})
	case grant:
		o.frame = wire.Credit{Amount: uint64(e.bytes)}.Append(o.frame[:0])
		return o.link.conn.Gather(wire.Frame{Type: wire.FrameCredit, Payload: o.frame})
	case moreThreads:
		o.frame = wire.Threads{Total: e.total}.Append(o.frame[:0])
		return o.link.conn.Gather(wire.Frame{Type: wire.FrameThreads, Payload: o.frame})
	default:
		return o.link.conn.Gather(wire.Frame{Type: wire.FrameDrain})
	}
}

// send encodes a batch. If the input of a call cannot be opened, the batch is not sent. Then this
// call fails, and the other calls may be tried again.
func (o *outbox) send(e Send) error {
	var files []*os.File
	defer func() {
		for _, f := range files {
			_ = f.Close() // opened for reading only
		}
		clear(o.calls)
	}()
	o.calls = o.calls[:0]
	frame := wire.Frame{Type: wire.FrameBatch, Batch: e.Batch, Keep: o.link.at != nil}
	kept := 0
	for i, t := range e.Tasks {
		in, more, err := o.input(t.Input, len(files), &kept)
		files = append(files, more...)
		if err != nil {
			o.refuse(e, i, fmt.Errorf("input: %w", err))
			return nil
		}
		frame.Keep = frame.Keep && t.Keep
		o.calls = append(o.calls, wire.Call{Key: t.Key, Deadline: t.Deadline, Traceparent: t.Traceparent, Header: t.Header, Input: in})
	}
	o.frame = wire.Batch{Calls: o.calls}.Append(o.frame[:0])
	if len(o.frame) > wire.MaxFrame {
		o.refuse(e, 0, fmt.Errorf("a batch of %d bytes, want at most %d: pass fewer or larger items", len(o.frame), wire.MaxFrame))
		return nil
	}
	frame.Payload, frame.Files, frame.Kept = o.frame, files, kept > 0
	if err := o.extend(); err != nil { // it may have taken long to open the files
		return err
	}
	err := o.link.conn.Gather(frame)
	if cap(o.frame) > 1<<20 {
		o.frame = nil
	}
	return err
}

// input returns a copy of the input with the large items as files, for a frame that already has n
// files and kept references to items that nodes keep. If there would be too many of both, the items
// stay inline.
func (o *outbox) input(in tensor.Input, n int, kept *int) (out tensor.Input, files []*os.File, err error) {
	if !large(in) {
		return in, nil, nil
	}
	store := o.link.f.shell.cfg.Store
	open := func(ref tensor.Ref) (*os.File, error) {
		if o.link.at != nil && ref.Node != "" {
			*kept++ // the replica's daemon gets it
			return nil, nil
		}
		return store.Open(ref)
	}
	out = slices.Clone(in)
	for i := range out {
		var more []*os.File
		if n+len(files)+*kept+len(out[i].Items) <= wire.MaxFiles {
			out[i].Items, more, err = wire.Attach(out[i].Items, n+len(files), open)
		} else {
			out[i].Items, err = tensor.Resolve(store, out[i].Items)
		}
		files = append(files, more...)
		if err != nil {
			return nil, files, err
		}
	}
	return out, files, nil
}

// refuse answers the calls of a batch that is not sent. The call at the index bad fails with the
// reason why. The other calls are answered with InputLost without items, so that they run again.
func (o *outbox) refuse(e Send, bad int, why error) {
	for i := range e.Tasks {
		r := &task.Reply{Code: task.InputLost, Message: fmt.Sprintf("another call of its batch could not be sent: %v", why)}
		if i == bad {
			r.Code, r.Message = task.Unavailable, why.Error()
			var lost *task.LostError
			if errors.As(why, &lost) {
				r.Code, r.Lost = task.InputLost, []string{lost.Item}
			}
		}
		o.step(Result{Replica: e.Replica, Batch: e.Batch, Call: i, Reply: r})
	}
}

// large reports whether an input has an item that is not sent inline.
func large(in tensor.Input) bool {
	for _, p := range in {
		for i := range p.Items {
			if p.Items[i].Ref != nil || p.Items[i].Size() > tensor.InlineLimit {
				return true
			}
		}
	}
	return false
}

// cost estimates how much of the socket's buffer a frame takes. If files must be opened for it,
// cost returns more than the buffer has.
func cost(e Effect) int {
	s, ok := e.(Send)
	if !ok {
		return frameCost
	}
	n := frameCost
	for _, t := range s.Tasks {
		if large(t.Input) {
			return roomLimit + 1
		}
		n += 64 + len(t.Request) + len(t.Traceparent)
		for _, h := range t.Header {
			n += len(h.Name) + len(h.Value) + 8
		}
		for _, p := range t.Input {
			n += len(p.From) + 8
			for i := range p.Items {
				n += p.Items[i].Size() + len(p.Items[i].ContentType) + 16
			}
		}
	}
	return n
}

// unread counts the bytes that were sent to a replica, and estimates how many of them the replica
// has not read yet. A replica reads in order, so its answer to a batch shows that it has read
// everything up to that batch.
type unread struct {
	sent, read int
	marks      []mark // of the unanswered batches, in order
}

// mark is how many bytes had been sent after a batch.
type mark struct {
	batch uint64
	sent  int
}

func (u *unread) bytes() int { return u.sent - u.read }

func (u *unread) add(p parcel) {
	u.sent += min(p.cost, roomLimit)
	if s, ok := p.effect.(Send); ok {
		u.marks = append(u.marks, mark{s.Batch, u.sent})
	}
}

func (u *unread) answered(batch uint64) {
	if i := slices.IndexFunc(u.marks, func(m mark) bool { return m.batch == batch }); i >= 0 {
		u.read = u.marks[i].sent
		u.marks = slices.Delete(u.marks, 0, i+1)
	}
}

// answered records that the replica has read everything up to the batch.
func (o *outbox) answered(batch uint64) {
	o.mu.Lock()
	o.unread.answered(batch)
	o.mu.Unlock()
}
