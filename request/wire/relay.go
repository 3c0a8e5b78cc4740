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
	o.b = append(appendHeader(o.b[:0], f), f.Payload...)
	err := o.send(o.b, f.Files)
	if cap(o.b) > 2*relayRoom {
		o.b = nil
	}
	return err
}

// pass sends the bytes of whole frames, with files at the first byte.
func (o *Outlet) pass(b []byte, files []*os.File) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.send(b, files)
}

// send is pass for a caller that holds o.mu.
func (o *Outlet) send(b []byte, files []*os.File) error {
	if len(files) > 0 {
		n, err := o.s.SendFiles(b, files)
		if err != nil {
			return err
		}
		b = b[n:]
	}
	if len(b) == 0 {
		return nil
	}
	_, err := o.s.Write(b)
	return err
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
// lost. It changes nothing in them: frames of later versions pass as they are.
func Relay(to, from Socket) error { return RelayEdited(NewOutlet(to), from, nil) }

// RelayEdited is Relay with an Edit of the frames that are of this version or earlier ones; nil:
// there is none.
func RelayEdited(to *Outlet, from Socket, edit Edit) error {
	r := relay{from: from, to: to, edit: edit, buf: make([]byte, relayRoom)}
	defer func() { closeAll(r.files) }()
	for {
		n, files, err := from.ReceiveFiles(r.buf[r.end:])
		r.files = append(r.files, files...)
		r.end += n
		over := n == 0 && err == nil || errors.Is(err, io.EOF)
		switch {
		case over && r.end > 0:
			return fmt.Errorf("relay: read: %w within a frame", io.ErrUnexpectedEOF)
		case over:
			return nil
		case err != nil:
			return fmt.Errorf("relay: read: %w", err)
		}
		if err := r.pass(); err != nil {
			return fmt.Errorf("relay: %w", err)
		}
	}
}

// relayRoom is how much of small frames is passed on at once, in bytes.
const relayRoom = 64 << 10

type relay struct {
	from  Socket
	to    *Outlet
	edit  Edit
	buf   []byte // buf[:end] was read and not passed on
	end   int
	files []*os.File // received with it
}

// pass sends the whole frames in buf, and makes room for the rest of the next one.
func (r *relay) pass() error {
	sent, at, files, need := 0, 0, 0, 0
	for r.end-at >= headerSize {
		h, err := decodeHeader((*[headerSize]byte)(r.buf[at:]))
		if err != nil {
			return err
		}
		size := headerSize + h.length
		if r.end-at < size {
			need = size
			break
		}
		if h.files > 0 { // they go with the first byte of what is sent
			if err := r.send(sent, at, files); err != nil {
				return err
			}
			sent, files = at, 0
		}
		if r.edit != nil && !h.later {
			as, err := r.edited(h, sent, at, size, files)
			if err != nil {
				return errors.Join(err, r.send(sent, at, files)) // what is before it passes
			}
			if as != Unchanged {
				sent, at, files = at+size, at+size, 0
				continue
			}
		}
		files += h.files
		at += size
	}
	if err := r.send(sent, at, files); err != nil {
		return err
	}
	rest := r.buf[at:r.end]
	switch {
	case need > len(r.buf) || need == 0 && len(r.buf) > relayRoom:
		buf := make([]byte, max(need, relayRoom))
		r.end = copy(buf, rest)
		r.buf = buf
	default:
		r.end = copy(r.buf, rest)
	}
	return nil
}

// edited has the frame at buf[at:at+size] edited. buf[sent:at] was not sent yet. If the frame is
// changed or taken, both are sent. waiting is how many files belong to what was not sent.
func (r *relay) edited(h header, sent, at, size, waiting int) (Edited, error) {
	if len(r.files) < waiting+h.files {
		return Unchanged, errNoFiles
	}
	f := Frame{
		Type: h.kind, Batch: h.batch, Payload: r.buf[at+headerSize : at+size], Files: r.files[waiting : waiting+h.files : waiting+h.files],
		Kept: h.flags&flagKept != 0, Keep: h.flags&flagKeep != 0,
	}
	as, err := r.edit(&f)
	if err != nil || as == Unchanged {
		return as, err
	}
	err = r.send(sent, at, waiting)
	r.files = r.files[h.files:]
	if as == Changed {
		if err == nil {
			err = r.to.Send(f)
		}
		closeAll(f.Files)
	}
	return as, err
}

var errNoFiles = errors.New("a frame came without its files")

// send sends buf[begin:end] with the next files.
func (r *relay) send(begin, end, files int) error {
	b := r.buf[begin:end]
	if len(b) == 0 {
		return nil
	}
	if len(r.files) < files {
		return errNoFiles
	}
	err := r.to.pass(b, r.files[:files])
	closeAll(r.files[:files])
	r.files = r.files[files:]
	return err
}
