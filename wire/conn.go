package wire

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Conn sends and receives frames over a unix stream socket. Write may be called by many goroutines, Read by one at a time.
type Conn struct {
	c *net.UnixConn

	wmu  sync.Mutex
	wbuf []byte
	werr error // of the first Write that ended within a frame: what follows would not be understood

	rbuf  []byte // read and not yet consumed: rbuf[roff:rend]
	roff  int
	rend  int
	oob   []byte
	files []*os.File // received and not yet claimed by a frame
}

// NewConn returns a Conn over c, which it owns from now on.
func NewConn(c *net.UnixConn) *Conn {
	return &Conn{c: c, rbuf: make([]byte, 32<<10), oob: make([]byte, unix.CmsgSpace(4*MaxFiles))}
}

// copyLimit is the payload size up to which header and payload are joined for one system call.
const copyLimit = 64 << 10

// Write sends f: when it returns, f is in the socket's buffer. Its files are duplicated to the other side and stay the
// caller's to close. After an error of the socket every Write returns it.
//
// A small frame is one system call and is not gathered with others: under load it costs some 1.7 µs from Write to Read on
// two cores (BenchmarkFrames), little beside the rest of a task's way.
func (c *Conn) Write(f Frame) error {
	if len(f.Payload) > MaxFrame || len(f.Files) > MaxFiles {
		return fmt.Errorf("frame %v of %d bytes and %d descriptors, want at most %d and %d", f.Type, len(f.Payload), len(f.Files), MaxFrame, MaxFiles)
	}
	c.wmu.Lock()
	defer c.wmu.Unlock()
	if c.werr == nil {
		c.werr = c.send(f)
	}
	if c.werr != nil {
		return fmt.Errorf("send %v: %w", f.Type, c.werr)
	}
	return nil
}

// send writes f, with its files on the first byte.
func (c *Conn) send(f Frame) error {
	b := appendHeader(c.wbuf[:0], f)
	rest := f.Payload
	if len(rest) <= copyLimit {
		b, rest = append(b, rest...), nil
	}
	c.wbuf = b
	if len(f.Files) > 0 {
		fds := make([]int, len(f.Files))
		for i, file := range f.Files {
			fds[i] = int(file.Fd())
		}
		n, _, err := c.c.WriteMsgUnix(b, unix.UnixRights(fds...), nil)
		if err != nil {
			return err
		}
		b = b[n:]
	}
	for _, p := range [...][]byte{b, rest} {
		if len(p) == 0 {
			continue
		}
		if _, err := c.c.Write(p); err != nil {
			return err
		}
	}
	return nil
}

// Read returns the next frame. Its payload and files are the caller's. It returns io.EOF when the other side has closed
// between two frames.
func (c *Conn) Read() (Frame, error) {
	for {
		h, err := c.readHeader()
		if err != nil {
			return Frame{}, err
		}
		f := Frame{Type: h.kind, Batch: h.batch}
		if h.length > 0 {
			f.Payload = make([]byte, h.length)
			if err := c.readFull(f.Payload); err != nil {
				return Frame{}, fmt.Errorf("frame %v of %d bytes: %w", h.kind, h.length, err)
			}
		}
		if len(c.files) < h.files {
			return Frame{}, fmt.Errorf("frame %v came with %d descriptors, its header says %d", h.kind, len(c.files), h.files)
		}
		f.Files, c.files = c.files[:h.files:h.files], c.files[h.files:]
		if len(f.Files) == 0 {
			f.Files = nil
		}
		if !h.skip {
			return f, nil
		}
		closeAll(f.Files)
	}
}

func (c *Conn) readHeader() (header, error) {
	var b [headerSize]byte
	if c.roff == c.rend {
		if err := c.fill(); err != nil {
			return header{}, err // between frames: io.EOF stays io.EOF
		}
	}
	if err := c.readFull(b[:]); err != nil {
		return header{}, fmt.Errorf("frame header: %w", err)
	}
	return decodeHeader(&b)
}

func (c *Conn) readFull(p []byte) error {
	for len(p) > 0 {
		if c.roff == c.rend {
			if err := c.fillFor(&p); err != nil {
				if errors.Is(err, io.EOF) {
					return io.ErrUnexpectedEOF
				}
				return err
			}
			continue
		}
		n := copy(p, c.rbuf[c.roff:c.rend])
		c.roff += n
		p = p[n:]
	}
	return nil
}

// fillFor reads straight into p when p is larger than the buffer, or else into the buffer.
func (c *Conn) fillFor(p *[]byte) error {
	if len(*p) < len(c.rbuf) {
		return c.fill()
	}
	n, err := c.receive(*p)
	*p = (*p)[n:]
	return err
}

func (c *Conn) fill() error {
	c.roff, c.rend = 0, 0
	n, err := c.receive(c.rbuf)
	c.rend = n
	return err
}

// receive is one recvmsg: it returns at least one byte or an error, and keeps the descriptors that came.
func (c *Conn) receive(p []byte) (int, error) {
	n, oobn, flags, _, err := c.c.ReadMsgUnix(p, c.oob)
	if oobn > 0 {
		if kerr := c.keep(c.oob[:oobn]); kerr != nil && err == nil {
			err = kerr
		}
	}
	switch {
	case err != nil:
		return n, err
	case flags&unix.MSG_CTRUNC != 0:
		return n, fmt.Errorf("more than %d descriptors at a time", MaxFiles)
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}

// keep takes the descriptors out of a control message. Go's net package receives them close-on-exec.
func (c *Conn) keep(oob []byte) error {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return fmt.Errorf("control message: %w", err)
	}
	for _, m := range msgs {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			return fmt.Errorf("control message: %w", err)
		}
		for _, fd := range fds {
			c.files = append(c.files, os.NewFile(uintptr(fd), "received"))
		}
	}
	if len(c.files) > 2*MaxFiles {
		return fmt.Errorf("%d descriptors that no frame has claimed, want at most %d", len(c.files), 2*MaxFiles)
	}
	return nil
}

// SetWriteDeadline bounds Writes from now on.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.c.SetWriteDeadline(t) }

// SetReadDeadline bounds Reads from now on.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.c.SetReadDeadline(t) }

// Close closes the socket; a Read that waits returns. Descriptors that no frame has claimed are closed by Release.
func (c *Conn) Close() error { return c.c.Close() }

// Release closes descriptors that came and that no frame has claimed. The reader calls it when it has read its last frame.
func (c *Conn) Release() {
	closeAll(c.files)
	c.files = nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close() // nothing was written through it
	}
}
