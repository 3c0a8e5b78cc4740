package dispatch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync/atomic"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// link is the connection to one replica. Its reader passes answers to the Core, and its outbox
// writes frames.
type link struct {
	f     *function
	name  string
	conn  *wire.Conn
	at    *wire.AtNode // nil: no daemon keeps its outputs
	out   *outbox
	cause chan task.Death // holds the first reported reason for its end
	idle  chan struct{}   // closed when the replica drains and has nothing left
	gone  chan struct{}   // closed when the Core knows that the replica is gone

	told     atomic.Bool // Lost has reported its end
	left     atomic.Bool // it was asked to leave
	attached time.Time
	start    time.Duration // start-up time that the replica reported
	waited   bool          // tasks were waiting when it was attached

	answered bool // used by the reader alone, as is streams
	streams  streams
}

var (
	// The replica sent something that the protocol forbids.
	errProtocol = errors.New("it broke the protocol")
	errRemoved  = errors.New("the function was removed")
)

// attach makes c a replica of the function.
func (f *function) attach(ctx context.Context, name string, revision uint64, c wire.Socket) (wire.Hello, error) {
	l := &link{
		f: f, name: name, conn: wire.NewConn(c), cause: make(chan task.Death, 1),
		idle: make(chan struct{}), gone: make(chan struct{}),
	}
	l.at, _ = c.(*wire.AtNode)
	l.out = newOutbox(l)
	if err := f.register(l); err != nil {
		_ = c.Close() // nothing was sent
		return wire.Hello{}, err
	}
	hello, err := l.greet(ctx)
	if err != nil {
		if hangup(err) {
			death := l.why(err, f.shell.bounds.early, ctx.Done())
			err = fmt.Errorf("no hello: %s (%w)", death.Cause, err)
		}
		l.unregister()
		return wire.Hello{}, err
	}
	o := f.lock()
	spec := f.spec
	waiting := 0
	if lane := o.core.Lane(f.lane); lane != nil {
		waiting = lane.Waiting()
	}
	l.attached, l.waited, l.start = time.Now(), waiting > 0, hello.Load+hello.Place
	o.mu.Unlock()
	f.step(ReplicaUp{
		Lane: f.lane, Name: name, Revision: revision, Slots: spec.slots(uint64(hello.Slots)), MaxBatch: hello.MaxBatch, Timeout: spec.Timeout,
	})
	if !l.run() { // last, so that its end comes after its start
		l.out.close()
		// While it is listed, the Core may send to it.
		f.step(ReplicaDown{Name: name, Cause: errRemoved.Error()})
		l.unregister()
		return wire.Hello{}, errRemoved
	}
	return hello, nil
}

// run starts the link's goroutines, unless the function has ended.
func (l *link) run() bool {
	o := l.f.lock()
	defer o.mu.Unlock()
	if !l.f.closed {
		l.f.group.Go(l.read)
		l.f.group.Go(l.out.run)
	}
	return !l.f.closed
}

func (f *function) register(l *link) error {
	o := f.lock()
	defer o.mu.Unlock()
	if f.closed || f.bare || f.removed.Load() {
		return errRemoved
	}
	if o.links[l.name] != nil {
		return errors.New("a replica with this name is attached already")
	}
	o.links[l.name] = l
	return nil
}

// unregister closes the connection and removes the link.
func (l *link) unregister() {
	_ = l.conn.Close() // it may be closed already
	l.conn.Release()
	o := l.f.lock()
	delete(o.links, l.name)
	o.mu.Unlock()
	close(l.gone)
}

// greet waits for the Hello and answers it.
func (l *link) greet(ctx context.Context) (wire.Hello, error) {
	deadline := time.Now().Add(l.f.shell.bounds.hello)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	_ = l.conn.SetReadDeadline(deadline) // fails if closed, and then Read fails too
	stop := context.AfterFunc(ctx, func() { _ = l.conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	frame, err := l.conn.Read()
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return wire.Hello{}, err
	}
	closeFiles(frame.Files)
	if frame.Type != wire.FrameHello {
		return wire.Hello{}, fmt.Errorf("%w: %v as its first frame, want Hello", errProtocol, frame.Type)
	}
	hello, err := wire.DecodeHello(frame.Payload)
	if err != nil {
		return wire.Hello{}, fmt.Errorf("%w: %w", errProtocol, err)
	}
	if hello.Function != "" && hello.Function != l.f.lane {
		return wire.Hello{}, fmt.Errorf("%w: it says it is of function %q, want %q", errProtocol, hello.Function, l.f.name)
	}
	version, err := wire.Negotiate(hello)
	if err != nil {
		return wire.Hello{}, fmt.Errorf("%w: %w", errProtocol, err)
	}
	_ = l.conn.SetWriteDeadline(deadline)
	welcome := wire.Welcome{Version: version, Credit: streamCredit}
	if err := l.conn.Write(wire.Frame{Type: wire.FrameWelcome, Payload: welcome.Append(nil)}); err != nil {
		return wire.Hello{}, err
	}
	if !stop() {
		return wire.Hello{}, context.Cause(ctx)
	}
	return hello, l.conn.SetReadDeadline(time.Time{})
}

// read is the link's reader. It serves until the connection ends, then reports why.
func (l *link) read() {
	var err error
	for err == nil {
		err = l.next()
	}
	l.f.step(Credit{Replica: l.name}) // send nothing more to it while we find out why
	l.out.close()                     // the replica is not to blame for batches that it does not get
	patience := l.f.shell.bounds.cause
	if l.left.Load() {
		patience = 0
	}
	l.end(l.why(err, patience, nil))
}

// next reads a frame and applies it to the Core.
func (l *link) next() error {
	frame, err := l.conn.Read()
	if err != nil {
		return err
	}
	defer closeFiles(frame.Files)
	switch frame.Type {
	case wire.FrameResult:
		m, err := wire.DecodeResult(frame.Payload)
		if err != nil {
			return fmt.Errorf("%w: %w", errProtocol, err)
		}
		if m.Output, err = l.detach(m.Output, frame); err != nil {
			return fmt.Errorf("%w: output of call %d of batch %d: %w", errProtocol, m.Index, frame.Batch, err)
		}
		l.answer(frame.Batch, m.Index, &task.Reply{Service: m.Service, Header: m.Header, Output: m.Output})
	case wire.FrameError:
		m, err := wire.DecodeError(frame.Payload)
		if err == nil && m.OfDaemon() && l.at == nil {
			err = errors.New("a replica of this machine says that its input is lost")
		}
		if err != nil {
			return fmt.Errorf("%w: %w", errProtocol, err)
		}
		l.answer(frame.Batch, m.Index, &task.Reply{Code: m.Code, Message: m.Message, Service: m.Service, Lost: m.Lost})
	case wire.FrameCredit:
		m, err := wire.DecodeCredit(frame.Payload)
		if err != nil {
			return fmt.Errorf("%w: %w", errProtocol, err)
		}
		o := l.f.lock()
		spec := l.f.spec
		o.mu.Unlock()
		l.f.step(Credit{Replica: l.name, Slots: spec.slots(m.Amount)})
	case wire.FrameChunk:
		m, err := wire.DecodeChunk(frame.Payload)
		if err != nil {
			return fmt.Errorf("%w: %w", errProtocol, err)
		}
		return l.chunk(frame.Batch, m)
	default:
		return fmt.Errorf("%w: frame %v, want Result, Error, Chunk or Credit", errProtocol, frame.Type)
	}
	return nil
}

// chunk stores a piece of a call's output.
func (l *link) chunk(batch uint64, c wire.Chunk) error {
	c.Index = l.out.call(batch, c.Index)
	if !l.streams.begun(batch, c.Index) { // the Core is asked once per call
		o := l.f.lock()
		lane := o.core.of(l.name)
		open := lane != nil && lane.hasCall(l.name, batch, c.Index)
		o.mu.Unlock()
		if !open {
			return fmt.Errorf("%w: a chunk of call %d of batch %d, want one of a call that has no answer yet", errProtocol, c.Index, batch)
		}
	}
	n, over := l.streams.add(batch, c)
	if over {
		l.out.push(CancelCall{Replica: l.name, Batch: batch, Call: c.Index})
	}
	if n > 0 {
		l.out.push(grant{n})
	}
	l.out.flush()
	return nil
}

func (l *link) answer(batch uint64, call int, r *task.Reply) {
	call = l.out.answered(batch, call)
	l.streams.finish(batch, call, r)
	l.f.step(Result{Replica: l.name, Batch: batch, Call: call, Reply: r})
	if l.answered {
		return
	}
	l.answered = true
	after := time.Since(l.attached)
	start := l.start
	if l.waited {
		start += after
	}
	l.f.started(start)
	if tell := l.f.shell.cfg.FirstAnswer; tell != nil {
		tell(First{Function: l.f.name, Replica: l.name, After: after, Call: r.Service, Waited: l.waited})
	}
}

// slots bounds the number of slots that a replica asks for by the function's own limit.
func (s Spec) slots(said uint64) int {
	if s.Slots > 0 {
		said = min(said, uint64(s.Slots))
	}
	return int(min(said, 1<<16))
}

// why returns why the connection ended: a fault in the protocol, or the end of the replica's
// process. The socket of a process that dies is closed before the parent can report how the process
// ended. So why waits for that report. It waits no longer than patience, and stops when the channel
// enough is closed or the function ends.
func (l *link) why(err error, patience time.Duration, enough <-chan struct{}) task.Death {
	if !hangup(err) {
		return task.Death{Cause: err.Error(), End: task.EndItself}
	}
	wait := time.NewTimer(patience)
	defer wait.Stop()
	select {
	case death := <-l.cause:
		return death
	case <-wait.C:
	case <-enough:
	case <-l.f.done:
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return task.Death{Cause: "it sent nothing in time", End: task.EndItself}
	}
	return task.Death{Cause: "connection closed", End: task.EndUnclear}
}

// hangup reports whether err is the end of a connection, not a fault in the data.
func hangup(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}

// end tells the Core and the Dropped callback that the replica is gone.
func (l *link) end(death task.Death) {
	death.Busy = death.Busy || l.f.busy(l.name)
	l.f.step(ReplicaDown{Name: l.name, Cause: death.Cause, End: death.End})
	l.unregister()
	f := l.f
	select {
	case <-f.done:
		return
	default:
	}
	if l.left.Load() {
		return
	}
	f.metrics.lost().Inc()
	f.shell.cfg.Logger.Warn("replica lost", "function", f.name, "replica", l.name, "cause", death.Cause)
	if f.shell.cfg.Dropped != nil && !l.told.Load() {
		f.shell.cfg.Dropped(f.name, l.name, death)
	}
}

// fail gives the replica up for its own fault. busy says that it had unanswered calls.
func (l *link) fail(cause string, busy bool) {
	select {
	case l.cause <- task.Death{Cause: cause, End: task.EndItself, Busy: busy}:
	default: // an earlier reason is there
	}
	_ = l.conn.Close() // it may be closed already
}

// lost records why the replica's process ended, and lets the reader read what is still in the
// socket.
func (l *link) lost(death task.Death) {
	l.told.Store(true)
	select {
	case l.cause <- death:
	default:
	}
	// Fails only if the connection is closed; then Read fails too.
	_ = l.conn.SetReadDeadline(time.Now().Add(l.f.shell.bounds.tail))
}

// leave drains the replica and ends its connection. If the replica stays, it is not told to end.
func (l *link) leave(ctx context.Context, stays bool) error {
	l.f.step(ReplicaDrain{Name: l.name})
	select {
	case <-l.gone:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-l.idle:
	}
	l.left.Store(true)
	if stays {
		_ = l.conn.Close() // the reader notices
		return nil
	}
	l.out.push(leaving{})
	l.out.flush()
	// Fails if closed, and then the replica has left.
	_ = l.conn.SetReadDeadline(time.Now().Add(l.f.shell.bounds.leave))
	return nil
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		_ = f.Close() // opened for reading only
	}
}
