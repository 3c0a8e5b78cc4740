package tunnel

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/yamux"
)

// stream is a [net.Conn] over a stream of the multiplexer. Close closes both directions, and
// CloseWrite one.
type stream struct {
	s       *session
	y       *yamux.Stream
	reading sync.Mutex // held by Read
	rest    []byte     // read after the first line
	got     int        // bytes read since its buffer was given back
	closed  atomic.Bool
}

// chunk is how much of a stream goes into one frame, so that large writes of one stream leave room
// for others between their frames. With the frame's header, a chunk fills whole TLS records.
const chunk = 4 * 16384

// giveBack is the number of bytes after which a stream without unread data gives back its buffer,
// which may be as large as the window.
const giveBack = 1 << 20

func newStream(s *session, y *yamux.Stream) *stream {
	s.open.Add(1)
	return &stream{s: s, y: y}
}

// line reads the first line, without its end. Bytes after it are left for Read.
func (c *stream) line() ([]byte, error) {
	var line []byte
	b := make([]byte, 4<<10)
	for len(line) < maxFirst {
		n, err := c.y.Read(b)
		if end := bytes.IndexByte(b[:n], '\n'); end >= 0 {
			c.rest = b[end+1 : n]
			return append(line, b[:end]...), nil
		}
		if line = append(line, b[:n]...); err != nil {
			return nil, fmt.Errorf("first line: %w", c.explain(err))
		}
	}
	return nil, fmt.Errorf("a first line of more than %d bytes", maxFirst)
}

// Read implements net.Conn.
func (c *stream) Read(b []byte) (int, error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	if c.closed.Load() {
		return 0, net.ErrClosed
	}
	if len(c.rest) > 0 {
		n := copy(b, c.rest)
		c.rest = c.rest[n:]
		return n, nil
	}
	if c.got >= giveBack {
		c.got = 0
		c.y.Shrink() // unless there is something to read
	}
	n, err := c.y.Read(b)
	c.got += n
	if err != nil {
		err = c.explain(err)
	}
	return n, err
}

// Write implements net.Conn.
func (c *stream) Write(b []byte) (int, error) {
	if c.closed.Load() { // the multiplexer may learn it a moment later
		return 0, net.ErrClosed
	}
	total := 0
	for len(b) > 0 {
		n, err := c.y.Write(b[:min(len(b), chunk)])
		if total += n; err != nil {
			return total, c.explain(err)
		}
		b = b[n:]
	}
	return total, nil
}

// explain turns the multiplexer's errors into those of package net.
func (c *stream) explain(err error) error {
	switch {
	case c.closed.Load():
		err = net.ErrClosed
	case c.s.ended(): // whatever the multiplexer says: it may be less than the peer has sent
		err = syscall.ECONNRESET
	case errors.Is(err, io.EOF):
		return io.EOF
	case errors.Is(err, yamux.ErrTimeout):
		err = os.ErrDeadlineExceeded
	case errors.Is(err, yamux.ErrConnectionReset), errors.Is(err, yamux.ErrStreamClosed):
		err = syscall.ECONNRESET
	}
	return &net.OpError{Op: "tunnel", Net: "tls", Addr: c.RemoteAddr(), Err: err}
}

// CloseWrite ends what is written. The peer's Read returns io.EOF after it.
func (c *stream) CloseWrite() error {
	if c.closed.Load() {
		return net.ErrClosed
	}
	return c.y.Close()
}

// Close implements net.Conn. It does not wait for the peer.
func (c *stream) Close() error {
	if c.closed.Swap(true) {
		return net.ErrClosed
	}
	c.s.open.Add(-1)
	_ = c.y.SetReadDeadline(time.Unix(1, 0)) // ends a Read that waits
	if !c.s.spawn(c.end) {
		_ = c.y.Close() // at once: the session has ended
	}
	return nil
}

// end tells the peer that the stream is closed, and waits until the peer closes it, too. Meanwhile
// the peer may read what was sent. If the peer goes on to write, end resets the stream, as a closed
// TCP connection does: the peer loses what it has not read. Without the reset, the multiplexer
// would keep what arrives, and the peer could wait for room for an hour.
func (c *stream) end() {
	_ = c.y.Close()
	c.reading.Lock() // after the latest Read
	defer c.reading.Unlock()
	for round := range lingers {
		n, err := c.discard()
		if err != nil && !errors.Is(err, yamux.ErrTimeout) {
			return // the peer has closed it, or the session has ended
		}
		if err == nil || n > 0 && round > 0 { // the peer has sent it after the stream was closed
			break
		}
		c.y.Shrink()
	}
	c.s.conn.reset(c.y.StreamID())
	if _, err := c.discard(); err == nil {
		c.s.t.cfg.Log.Warn("tunnel is closed: the peer writes to a stream that was reset", "peer", c.s.peer.String())
		c.s.close()
	}
	c.y.Shrink()
}

// discard reads what the peer writes, until the peer closes or resets the stream, or for a while.
// The error is nil if the peer has written more than could have been on its way.
func (c *stream) discard() (n int64, err error) {
	_ = c.y.SetReadDeadline(time.Now().Add(c.s.t.cfg.linger))
	return io.CopyN(io.Discard, c.y, int64(c.s.t.cfg.window)+1)
}

// LocalAddr implements net.Conn.
func (c *stream) LocalAddr() net.Addr { return c.y.LocalAddr() }

// RemoteAddr implements net.Conn.
func (c *stream) RemoteAddr() net.Addr { return c.y.RemoteAddr() }

// SetDeadline implements net.Conn.
func (c *stream) SetDeadline(t time.Time) error { return c.y.SetDeadline(t) }

// SetReadDeadline implements net.Conn.
func (c *stream) SetReadDeadline(t time.Time) error { return c.y.SetReadDeadline(t) }

// SetWriteDeadline implements net.Conn.
func (c *stream) SetWriteDeadline(t time.Time) error { return c.y.SetWriteDeadline(t) }
