package dispatch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// outbox writes frames to one replica, in the order in which they were pushed. Only a batch that
// needs items of nodes may come later: other frames pass while its items are fetched. A cancel
// never comes before its batch, and a Drain never before any batch.
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

	ctx  context.Context // of fetches; ends when the replica has ended
	end  context.CancelCauseFunc
	work sync.WaitGroup // goroutines that fetch items; started while mu is held

	mu      sync.Mutex
	queue   []parcel
	unread  unread
	waits   wire.Waits // batches whose items are fetched
	drain   bool       // the replica gets a Drain after the waiting batches
	writing bool       // somebody writes now; the fields below belong to that goroutine

	head     []parcel
	enc      encoder
	deadline time.Time
}

// parcel is a frame to write.
type parcel struct {
	effect Effect // Send, prepared, CancelCall, leaving, grant or moreThreads
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

// newOutbox returns the outbox of a link.
func newOutbox(l *link) *outbox {
	o := &outbox{link: l, kick: make(chan struct{}, 1), step: l.f.step, enc: encoder{link: l}}
	o.ctx, o.end = context.WithCancelCause(context.Background())
	return o
}

// push queues a frame. If a batch needs items of nodes, push starts to fetch them, and the frame is
// queued later.
func (o *outbox) push(e Effect) {
	p := parcel{e, cost(e)}
	o.mu.Lock()
	defer o.mu.Unlock()
	switch e := e.(type) {
	case Send:
		if p.cost <= roomLimit {
			break
		}
		if refs := o.link.needed(e); refs != nil {
			o.fetch(e, refs)
			return
		}
	case CancelCall:
		c := o.waits.Cancel(e.Batch, e.Call)
		if o.answer(e, c.Answer); !c.Pass {
			return
		}
		if c.Index != e.Call {
			e.Call = c.Index
			p.effect = e
		}
	case leaving:
		if o.waits.Waiting() > 0 {
			o.drain = true
			return
		}
	}
	o.queue = append(o.queue, p)
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

// write closes the files of batches, also of those that it does not write.
func (o *outbox) write(parcels []parcel) error {
	err := o.extend()
	for _, p := range parcels {
		if err == nil {
			err = o.gather(p.effect)
		} else if r, ok := p.effect.(prepared); ok {
			r.close()
		}
	}
	if err != nil {
		return err
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
	case prepared:
		defer e.close()
		return o.link.conn.Gather(e.Frame)
	case CancelCall:
		o.enc.frame = wire.Cancel{Index: e.Call}.Append(o.enc.frame[:0])
		return o.link.conn.Gather(wire.Frame{Type: wire.FrameCancel, Batch: e.Batch, Payload: o.enc.frame})
	case grant:
		o.enc.frame = wire.Credit{Amount: uint64(e.bytes)}.Append(o.enc.frame[:0])
		return o.link.conn.Gather(wire.Frame{Type: wire.FrameCredit, Payload: o.enc.frame})
	case moreThreads:
		o.enc.frame = wire.Threads{Total: e.total}.Append(o.enc.frame[:0])
		return o.link.conn.Gather(wire.Frame{Type: wire.FrameThreads, Payload: o.enc.frame})
	default:
		return o.link.conn.Gather(wire.Frame{Type: wire.FrameDrain})
	}
}

// send encodes and gathers a batch. If the input of a call cannot be opened, the batch is not sent.
// Then this call fails, and the other calls may be tried again.
func (o *outbox) send(e Send) error {
	frame, bad, err := o.enc.batch(e)
	defer closeFiles(frame.Files)
	defer o.enc.reset()
	if err != nil {
		for i := range e.Tasks {
			o.step(Result{Replica: e.Replica, Batch: e.Batch, Call: i, Reply: unsent(i == bad, err)})
		}
		return nil
	}
	if err := o.extend(); err != nil { // it may have taken long to open the files
		return err
	}
	return o.link.conn.Gather(frame)
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
	switch e := p.effect.(type) {
	case Send:
		u.marks = append(u.marks, mark{e.Batch, u.sent})
	case prepared:
		u.marks = append(u.marks, mark{e.Batch, u.sent})
	}
}

func (u *unread) answered(batch uint64) {
	if i := slices.IndexFunc(u.marks, func(m mark) bool { return m.batch == batch }); i >= 0 {
		u.read = u.marks[i].sent
		u.marks = slices.Delete(u.marks, 0, i+1)
	}
}

// answered records that the replica has read everything up to the batch, because it has answered
// one of its calls. It returns the Core's number of the call.
func (o *outbox) answered(batch uint64, call int) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.unread.answered(batch)
	return o.waits.Answered(batch, call)
}

// call returns the Core's number of a call.
func (o *outbox) call(batch uint64, call int) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.waits.Call(batch, call)
}
