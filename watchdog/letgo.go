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

// A call of a function in mode http is over for its caller when its exchange with the gateway has
// ended. The program may still work on the request. The program has ended the request when it closes
// its side of the connection, or writes an answer. Until then the call keeps its slot: a canceled
// call without an answer tells the dispatcher that the handler still runs (docs/adr/0061).

const (
	// holdMost bounds how long a call waits for the program after its cancellation and its deadline.
	// The dispatcher ends the replica long before.
	holdMost = 2 * time.Minute
	// holdLook is the time between two checks whether a program has read a request at all.
	holdLook = 250 * time.Millisecond
)

// holds are the requests that the program has not ended, by call.
type holds struct {
	ending <-chan struct{} // closed when the replica is told to end
	mu     sync.Mutex
	all    map[*stage.Call]*hold
	group  sync.WaitGroup // the goroutines that watch connections
	look   func()         // called at each check of a connection; nil, except in tests
}

func newHolds(ending <-chan struct{}) *holds {
	return &holds{ending: ending, all: map[*stage.Call]*hold{}}
}

// hold is a request that the program may still work on.
type hold struct {
	all   *holds
	begun time.Time
	due   time.Time     // the call's deadline; zero: it has none
	done  chan struct{} // closed when the handler has returned and the request is on no connection

	mu       sync.Mutex
	conn     *programConn // carries the request; nil: none
	returned bool         // the request's handler has returned
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

// end notes that the request's handler has returned. If the request is still on a connection, this
// connection is closed or will be, and its Close releases the request.
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

// wait returns when the program has ended the call's request, or the replica is told to end.
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
	t := time.NewTimer(h.maxWait())
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
	held  atomic.Pointer[hold] // the request that it carries; nil: none
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

// share returns a connection that has the same socket, and shuts the socket down for writing.
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

// watch returns when the program has closed the connection or written to it.
func (h *hold) watch(rest net.Conn, c *programConn) {
	var b [1]byte
	until := time.Now().Add(h.maxWait())
	for {
		_ = rest.SetReadDeadline(time.Now().Add(holdLook)) // fails when closed; then Read does
		if _, err := rest.Read(b[:]); !errors.Is(err, os.ErrDeadlineExceeded) {
			return // the program has closed it, or writes, and will learn that nobody reads
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

// maxWait returns how long, from now, the call waits for the program at most.
func (h *hold) maxWait() time.Duration { return max(time.Until(h.due), 0) + holdMost }

// queued reports whether the program has read nothing of this request although it answers others.
// Then no handler runs: the request waits inside the program.
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
