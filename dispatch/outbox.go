package dispatch

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
	"github.com/stagecoach-serving/stagecoach/wire"
)

// outbox writes frames to one replica, in the order in which they were pushed.
//
// Small frames are written by whoever brings them, which saves the switch to another goroutine, but only while all that
// the replica may not have read yet fits into the socket's buffer, so that the write cannot wait for the replica. What is
// larger, or needs a file opened, is left to the outbox's own goroutine: a replica that stands still holds up nobody else.
type outbox struct {
	link *link
	kick chan struct{} // there is something for the goroutine

	mu      sync.Mutex
	queue   []parcel
	unread  unread
	writing bool // someone is; the fields below are theirs

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

// leaving and grant are frames that the Core does not ask for: Drain, and Credit for so many bytes of chunks.
type (
	leaving struct{}
	grant   struct{ bytes int }
)

func (leaving) effect() {}
func (grant) effect()   {}

// roomLimit is how many bytes may lie in the socket's buffer before a write could block, and frameCost what the kernel
// takes for a frame besides its bytes. Linux's default is 208 KiB.
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

// flush writes what is queued, or has it written.
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

// writeHead takes the first n frames out of the queue and writes them, small ones in one system call, without holding mu
// meanwhile.
func (o *outbox) writeHead(n int) {
	o.head = append(o.head[:0], o.queue[:n]...)
	o.queue = slices.Delete(o.queue, 0, n)
	for _, p := range o.head {
		o.unread.add(p)
	}
	o.writing = true
	o.mu.Unlock()
	if err := o.write(o.head); errors.Is(err, os.ErrDeadlineExceeded) {
		o.link.fail(fmt.Sprintf("the replica reads no more: %v", err), false)
	} else if err != nil {
		_ = o.link.conn.Close() // the reader sees it and finds out why
	}
	clear(o.head)
	o.mu.Lock()
	o.writing = false
}

func (o *outbox) write(parcels []parcel) error {
	if now := time.Now(); o.deadline.Sub(now) < o.link.f.shell.bounds.write/2 { // moved seldom, it costs more than a clock
		o.deadline = now.Add(o.link.f.shell.bounds.write)
		if err := o.link.conn.SetWriteDeadline(o.deadline); err != nil {
			return err
		}
	}
	for _, p := range parcels {
		if err := o.gather(p.effect); err != nil {
			return err
		}
	}
	return o.link.conn.Flush()
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

// send gathers a batch. When an input cannot be had, its call is answered and so are the others, which may be tried again.
func (o *outbox) send(e Send) error {
	var files []*os.File
	defer func() {
		for _, f := range files {
			_ = f.Close() // only read
		}
		clear(o.calls)
	}()
	o.calls = o.calls[:0]
	for i, t := range e.Tasks {
		in, more, err := o.input(t.Input, len(files))
		files = append(files, more...)
		if err != nil {
			o.refuse(e, i, fmt.Sprintf("input: %v", err))
			return nil
		}
		o.calls = append(o.calls, wire.Call{Key: t.Key, Deadline: t.Deadline, Traceparent: t.Traceparent, Header: t.Header, Input: in})
	}
	o.frame = wire.Batch{Calls: o.calls}.Append(o.frame[:0])
	if len(o.frame) > wire.MaxFrame {
		o.refuse(e, 0, fmt.Sprintf("a batch of %d bytes, want at most %d: pass fewer or larger items", len(o.frame), wire.MaxFrame))
		return nil
	}
	err := o.link.conn.Gather(wire.Frame{Type: wire.FrameBatch, Batch: e.Batch, Payload: o.frame, Files: files})
	if cap(o.frame) > 1<<20 {
		o.frame = nil
	}
	return err
}

// input returns in with its large items in files, for a frame that has n of them; inline, when they would be too many.
func (o *outbox) input(in tensor.Input, n int) (out tensor.Input, files []*os.File, err error) {
	if !large(in) {
		return in, nil, nil
	}
	store := o.link.f.shell.cfg.Store
	out = slices.Clone(in)
	for i := range out {
		var more []*os.File
		if n+len(files)+len(out[i].Items) <= wire.MaxFiles {
			out[i].Items, more, err = wire.Attach(out[i].Items, n+len(files), store.Open)
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

// refuse answers the calls of a batch that is not sent: the bad one with why, the others so that they are tried again.
func (o *outbox) refuse(e Send, bad int, why string) {
	for i := range e.Tasks {
		r := &task.Reply{Code: task.ReplicaLost, Message: "another call of its batch could not be sent: " + why}
		if i == bad {
			r.Code, r.Message = task.Unavailable, why
		}
		o.link.f.step(Result{Replica: e.Replica, Batch: e.Batch, Call: i, Reply: r})
	}
}

// large says whether an input has an item that does not go inline.
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

// cost is about what a frame takes of the socket's buffer; more than there is when files must be opened for it.
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

// unread bounds what a replica has been sent and may not have read. A replica reads in order, so that its answer to a
// batch says that it has read all up to that batch.
type unread struct {
	sent, read int
	marks      []mark // of the batches that have no answer, in order
}

// mark is how much had been sent when a batch had been.
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

// answered notes that the replica has read up to the batch.
func (o *outbox) answered(batch uint64) {
	o.mu.Lock()
	o.unread.answered(batch)
	o.mu.Unlock()
}
