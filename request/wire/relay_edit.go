package wire

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
)

// Outlet is an end of a [Socket] to which several goroutines send whole frames.
type Outlet struct {
	mu sync.Mutex
	s  Socket
	b  []byte
}

// NewOutlet returns the Outlet of a Socket.
func NewOutlet(s Socket) *Outlet { return &Outlet{s: s} }

// Send sends a frame. The caller still closes the frame's files.
func (o *Outlet) Send(f Frame) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.b = appendFrame(o.b[:0], f)
	err := put(o.s, o.b, f.Files)
	if cap(o.b) > 2*relayRoom {
		o.b = nil
	}
	return err
}

// pass sends the bytes of whole frames, with files at the first byte.
func (o *Outlet) pass(b []byte, files []*os.File) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return put(o.s, b, files)
}

// Edited says what an [Edit] has done with a frame.
type Edited uint8

// The outcomes of an Edit.
const (
	Unchanged Edited = iota // the frame passes
	Changed                 // f passes in its place
	Taken                   // nothing passes; the Edit owns the frame's files, but not its payload
)

// Edit may change a frame on its way through a relay. The payload belongs to the relay. If the
// frame is Changed, the relay closes the files that it has then, and the Edit those that it has
// taken out. An error ends the relay.
type Edit func(f *Frame) (Edited, error)

// Relay copies frames from one Socket to another until the first one ends, and returns nil then. It
// sends whole frames only, so that the receiver never has a part of a frame when either end is
// lost. Frames whose type is known are edited. Their version may be a later one, because a [Conn]
// takes those, too. Without an Edit, all frames pass as they are.
func Relay(to *Outlet, from Socket, edit Edit) error {
	r := newFrames(from)
	defer r.release()
	for {
		if err := r.read(); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("relay: %w", err)
		}
		e := edits{run: run{frames: r, send: to.pass}, to: to, edit: edit}
		if err := e.pass(); err != nil {
			return fmt.Errorf("relay: %w", err)
		}
	}
}

// edits passes on the frames of one read.
type edits struct {
	run

	to   *Outlet
	edit Edit
}

func (e *edits) pass() error {
	for {
		f, ok, err := e.next()
		if err == nil && ok {
			err = e.one(f)
		}
		if err != nil || !ok {
			return errors.Join(err, e.flush()) // what is before it passes
		}
	}
}

// one has a frame edited, and passes on the outcome.
func (e *edits) one(f span) error {
	if f.skip || e.edit == nil {
		return e.add(f)
	}
	waiting := e.run.files // of frames before it, that were not sent
	frame := Frame{
		Type: f.kind, Batch: f.batch, Payload: e.payload(f), Files: e.frames.files[waiting : waiting+f.files : waiting+f.files],
		Kept: f.flags&flagKept != 0, Keep: f.flags&flagKeep != 0,
	}
	as, err := e.edit(&frame)
	switch {
	case err != nil:
		return err
	case as == Unchanged:
		return e.add(f)
	}
	err = e.flush()
	e.take(f.files)
	if as == Changed {
		if err == nil {
			err = e.to.Send(frame)
		}
		closeAll(frame.Files)
	}
	return err
}
