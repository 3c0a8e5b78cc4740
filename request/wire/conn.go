package wire

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

// Conn sends and receives frames over a [Socket]. Any number of goroutines may call Write, Gather
// and Flush. Only one at a time may call Read.
type Conn struct {
	c Socket

	wmu  sync.Mutex
	wbuf []byte // gathered and not sent yet
	// Error of the first write that ended within a frame. The receiver could not decode anything
	// after it.
	werr error

	rbuf  []byte // read and not consumed yet: rbuf[roff:rend]
	roff  int
	rend  int
	files []*os.File // received and not claimed by a frame yet
}

// NewConn returns a Conn over c. The Conn owns c from now on.
func NewConn(c Socket) *Conn { return &Conn{c: c, rbuf: make([]byte, 32<<10)} }

// copyLimit is the size in bytes up to which headers and payloads are joined for one system call.
const copyLimit = 64 << 10

// Write sends f after all gathered frames. When it returns, f is in the socket's buffer. The
// receiver gets duplicates of f's files; the caller still closes its own. After an error of the
// socket, each Write, Gather and Flush returns that error.
func (c *Conn) Write(f Frame) error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	if err := c.add(f); err != nil {
		return err
	}
	return c.flush()
}

// Gather copies f, so that the next Flush or Write sends it with other small frames, in order, in
// one system call. Gather sends a frame with files or with a large payload at once. It also sends
// the frames gathered so far when f would make them too large for one system call.
func (c *Conn) Gather(f Frame) error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	return c.add(f)
}

// Flush sends the gathered frames.
func (c *Conn) Flush() error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	return c.flush()
}

// add appends f to the gathered frames, and sends them all if f is not small. The caller holds wmu.
func (c *Conn) add(f Frame) error {
	if len(f.Payload) > MaxFrame || len(f.Files) > MaxFiles {
		return fmt.Errorf("frame %v of %d bytes and %d descriptors, want at most %d and %d", f.Type, len(f.Payload), len(f.Files), MaxFrame, MaxFiles)
	}
	if c.werr != nil {
		return fmt.Errorf("send %v: %w", f.Type, c.werr)
	}
	if len(c.wbuf)+len(f.Payload) > copyLimit {
		if err := c.flush(); err != nil {
			return err
		}
	}
	c.wbuf = appendHeader(c.wbuf, f)
	rest := f.Payload
	if len(rest) <= copyLimit {
		c.wbuf, rest = append(c.wbuf, rest...), nil
	}
	if len(f.Files) == 0 && len(rest) == 0 {
		return nil
	}
	if c.werr = c.send(f.Files, rest); c.werr != nil {
		return fmt.Errorf("send %v: %w", f.Type, c.werr)
	}
	return nil
}

func (c *Conn) flush() error {
	if c.werr == nil && len(c.wbuf) > 0 {
		c.werr = c.send(nil, nil)
	}
	if c.werr != nil {
		return fmt.Errorf("send: %w", c.werr)
	}
	return nil
}

// send writes the gathered bytes, with files on the first byte, and then the bytes of rest. A file
// may arrive before its frame, because the frames before it claim no files.
func (c *Conn) send(files []*os.File, rest []byte) error {
	b := c.wbuf
	c.wbuf = c.wbuf[:0]
	if len(files) > 0 {
		n, err := c.c.SendFiles(b, files)
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

// Read returns the next frame. The caller owns its payload and closes its files. Read returns
// io.EOF if the other side has closed between two frames.
func (c *Conn) Read() (Frame, error) {
	for {
		h, err := c.readHeader()
		if err != nil {
			return Frame{}, err
		}
		f := Frame{Type: h.kind, Batch: h.batch, Kept: h.flags&flagKept != 0, Keep: h.flags&flagKeep != 0}
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
			return header{}, err // io.EOF between frames is returned unchanged
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

// fillFor reads straight into p if p is larger than the buffer, else into the buffer.
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

// receive returns at least one byte or an error, and keeps the received files.
func (c *Conn) receive(p []byte) (int, error) {
	n, files, err := c.c.ReceiveFiles(p)
	c.files = append(c.files, files...)
	switch {
	case err != nil:
		return n, err
	case len(c.files) > 2*MaxFiles:
		return n, fmt.Errorf("%d descriptors that no frame has claimed, want at most %d", len(c.files), 2*MaxFiles)
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}

// SetWriteDeadline sets the deadline of Writes.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.c.SetWriteDeadline(t) }

// SetReadDeadline sets the deadline of Reads.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.c.SetReadDeadline(t) }

// Close closes the socket and ends a waiting Read. Release closes descriptors that no frame has
// claimed.
func (c *Conn) Close() error { return c.c.Close() }

// Release closes received descriptors that no frame has claimed. The reader calls it after its last
// frame.
func (c *Conn) Release() {
	closeAll(c.files)
	c.files = nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close() // nothing was written through it
	}
}
