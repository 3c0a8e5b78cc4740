package watchdog

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stagecoach-serving/stagecoach/stage"
)

// A call of a function in mode http is over for its caller when its exchange with the gateway is.
// The program may go on with it. It has let go of a request that was cut off when it closes its end
// of the connection, or goes on to write its answer. Until then the call keeps its slot: the missing
// end of the call is what tells the dispatcher that a handler is still running (docs/adr/0061).

const (
	// holdMost bounds how long a call waits for the program beyond its end and deadline. The dispatcher ends
	// the replica long before.
	holdMost = 2 * time.Minute
	// holdLook is the time between two looks whether a program has read a request at all.
	holdLook = 250 * time.Millisecond
)

// holds are the requests that the program has not let go of, by call.
type holds struct {
	ending <-chan struct{} // closed when the replica is told to end
	mu     sync.Mutex
	all    map[*stage.Call]*hold
	group  sync.WaitGroup // the goroutines that watch connections
	look   func()         // called at each look whether the program has let go; nil, except in tests
}

func newHolds(ending <-chan struct{}) *holds {
	return &holds{ending: ending, all: map[*stage.Call]*hold{}}
}

// hold is a request at the program.
type hold struct {
	all   *holds
	begun time.Time
	due   time.Time     // the call's deadline; zero: it has none
	done  chan struct{} // closed when the handler has returned and the request is on no connection

	mu       sync.Mutex
	conn     *programConn // that the request is on; nil: none
	returned bool         // the request's handler has
}

// take notes that the request is on c. h and c may be nil.
func (h *hold) take(c *programConn) {
	if h == nil || c == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.conn = c
	c.sent.Store(0)
	c.held.Store(h)
}

// release notes that the request is not on c any more.
func (h *hold) release(c *programConn) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.conn == c && c != nil {
		if h.conn = nil; h.returned {
			close(h.done)
		}
	}
}

// end notes that the request's handler has returned. If the request is still on a connection, that
// is closed, or about to be, and its Close releases it.
func (h *hold) end() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.returned = true; h.conn == nil {
		close(h.done)
	}
}

// holdKey is the key of the hold in the context of a request to the program.
type holdKey struct{}

// holdOf returns the hold of a request, or nil.
func holdOf(r *http.Request) *hold {
	h, _ := r.Context().Value(holdKey{}).(*hold)
	return h
}

// handler gives each request of a call a hold.
func (s *holds) handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		call, ok := r.Context().Value(callKey{}).(*stage.Call)
		if !ok {
			next.ServeHTTP(w, r)
			return
		}
		h := s.begin(call)
		defer h.end()
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), holdKey{}, h)))
	})
}

func (s *holds) begin(call *stage.Call) *hold {
	h := &hold{all: s, begun: time.Now(), due: call.Deadline, done: make(chan struct{})}
	s.mu.Lock()
	s.all[call] = h
	s.mu.Unlock()
	return h
}

// letGo notes that the answer was read: the request is not on its connection any more, whether that is closed or not. h may be nil.
func (h *hold) letGo() {
	if h == nil {
		return
	}
	h.mu.Lock()
	c := h.conn
	h.mu.Unlock()
	if c != nil {
		c.held.CompareAndSwap(h, nil) // the next request may be on it already
		h.release(c)
	}
}

// wait returns once the program has let go of the call's request, or the replica is told to end.
func (s *holds) wait(call *stage.Call) {
	s.mu.Lock()
	h := s.all[call]
	delete(s.all, call)
	s.mu.Unlock()
	if h == nil {
		return
	}
	select { // nearly always
	case <-h.done:
		return
	default:
	}
	t := time.NewTimer(h.patience())
	defer t.Stop()
	select {
	case <-h.done:
	case <-s.ending:
	case <-t.C:
	}
}

// programConn is a connection to the program.
type programConn struct {
	*net.TCPConn
	heard *atomic.Int64        // when the program last answered anything, on any connection
	held  atomic.Pointer[hold] // the request that is on it; nil: none
	sent  atomic.Int64         // bytes of that request
	ended atomic.Bool          // Close was called
}

// Read implements net.Conn.
func (c *programConn) Read(b []byte) (int, error) {
	n, err := c.TCPConn.Read(b)
	if n > 0 {
		c.heard.Store(time.Now().UnixNano())
	}
	return n, err
}

// Write implements net.Conn.
func (c *programConn) Write(b []byte) (int, error) {
	n, err := c.TCPConn.Write(b)
	c.sent.Add(int64(n))
	return n, err
}

// ReadFrom implements io.ReaderFrom.
func (c *programConn) ReadFrom(r io.Reader) (int64, error) {
	n, err := c.TCPConn.ReadFrom(r)
	c.sent.Add(n)
	return n, err
}

// Close implements net.Conn. If a request is on the connection, the program learns that nobody waits
// for the answer, and the connection stays open for it to let go. The first of several calls at a time closes it, so that none of
// them takes the socket away from the first.
func (c *programConn) Close() error {
	if c.ended.Swap(true) {
		return net.ErrClosed
	}
	h := c.held.Swap(nil)
	if h == nil {
		return c.TCPConn.Close()
	}
	rest, err := c.share()
	if err != nil { // it is closed already, or there are no descriptors
		h.release(c)
		return c.TCPConn.Close()
	}
	h.all.group.Go(func() {
		defer h.release(c)
		defer rest.Close()
		h.watch(rest, c)
	})
	return c.TCPConn.Close() // who reads or writes here stops; the socket stays open for rest
}

// share returns a connection with the same socket, after which nothing more is sent.
func (c *programConn) share() (*net.TCPConn, error) {
	file, err := c.File()
	if err != nil {
		return nil, err
	}
	defer file.Close() // FileConn has its own
	rest, err := net.FileConn(file)
	if err != nil {
		return nil, err
	}
	t := rest.(*net.TCPConn) //nolint:forcetypeassert // of a TCP socket
	_ = t.CloseWrite()       // fails when the program has closed
	return t, nil
}

// watch returns once the program has let go of a connection.
func (h *hold) watch(rest net.Conn, c *programConn) {
	var b [1]byte
	until := time.Now().Add(h.patience())
	for {
		_ = rest.SetReadDeadline(time.Now().Add(holdLook)) // fails when closed; then Read does
		if _, err := rest.Read(b[:]); !errors.Is(err, os.ErrDeadlineExceeded) {
			return // it has closed, or it writes, and will learn that nobody reads
		}
		if h.all.look != nil {
			h.all.look()
		}
		select {
		case <-h.all.ending:
			return
		default:
		}
		if time.Now().After(until) || h.queued(rest, c) {
			return
		}
	}
}

// patience returns how long the program is waited for from now on.
func (h *hold) patience() time.Duration { return max(time.Until(h.due), 0) + holdMost }

// queued reports whether a program that answers other requests has read nothing of this one. Then no
// handler runs: the request waits in the program's own line.
func (h *hold) queued(rest net.Conn, c *programConn) bool {
	if c.heard.Load() < h.begun.UnixNano() {
		return false // it answers nobody
	}
	n, err := unread(rest)
	return err == nil && n > 0 && int64(n) >= c.sent.Load()
}

// close waits for the goroutines that watch connections.
func (s *holds) close() { s.group.Wait() }

// connect dials the program.
func (p *child) connect(ctx context.Context, network, address string) (net.Conn, error) {
	c, err := p.dial(ctx, network, address)
	if err != nil {
		return nil, err
	}
	if t, ok := c.(*net.TCPConn); ok {
		return &programConn{TCPConn: t, heard: &p.heard}, nil
	}
	return c, nil
}
