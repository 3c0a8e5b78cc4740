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

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/stage"
)

// For its caller, a call in mode http ends when its exchange with the gateway ends. But the program
// may still work on the request. The program has ended the request when it closes its side of the
// connection or writes an answer. Until then, the call keeps its slot. As long as a canceled call
// has no answer, the dispatcher knows that the handler still runs (docs/adr/0061).

const (
	// holdMost bounds how long a call waits for the program after its cancellation and its
	// deadline. The dispatcher ends the replica long before.
	holdMost = 2 * time.Minute
	// holdLook is the time between two checks whether a program has read a request at all.
	holdLook = 250 * time.Millisecond
)

// holds has the requests that the program has not ended, by call.
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

// hold is a request that the program may still be working on.
type hold struct {
	all   *holds
	begun time.Time
	due   time.Time // the call's deadline; zero: none
	// Closed when the handler has returned and the request is on no connection.
	done chan struct{}

	mu       sync.Mutex
	conn     *programConn // connection with the request; nil: none
	returned bool         // the request's handler has returned
}

// take records that the request is on c. h and c may be nil.
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

// release records that the request is no longer on c.
func (h *hold) release(c *programConn) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.conn == c && c != nil {
		if h.conn = nil; h.returned {
			close(h.done)
		}
	}
}

// end records that the request's handler has returned. If the request is still on a connection,
// that connection is or will be closed, and its Close releases the request.
func (h *hold) end() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.returned = true; h.conn == nil {
		close(h.done)
	}
}

// holdKey is the context key of the hold of a request to the program.
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

// releaseAnswered records that the answer was read. The request is then no longer on its
// connection, whether or not the connection is closed. h may be nil.
func (h *hold) releaseAnswered() {
	if h == nil {
		return
	}
	h.mu.Lock()
	c := h.conn
	h.mu.Unlock()
	if c != nil {
		c.held.CompareAndSwap(h, nil) // the connection may already carry the next request
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
	select { // usual case
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
	network *os.File             // see child
	heard   *atomic.Int64        // time of the program's last answer, on any connection
	held    atomic.Pointer[hold] // the request on it; nil: none
	sent    atomic.Int64         // bytes of that request
	ended   atomic.Bool          // Close was called
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

// Close implements net.Conn. If a request is on the connection, Close tells the program that nobody
// waits for the answer, but keeps the socket open until the program ends the request. If several
// goroutines call Close, only the first call closes, so that a second one cannot close the socket
// that the first has kept.
func (c *programConn) Close() error {
	if c.ended.Swap(true) {
		return net.ErrClosed
	}
	h := c.held.Swap(nil)
	if h == nil {
		return c.TCPConn.Close()
	}
	rest, err := c.share()
	if err != nil { // it is closed already, or there are no descriptors left
		h.release(c)
		return c.TCPConn.Close()
	}
	h.all.group.Go(func() {
		defer h.release(c)
		defer rest.Close()
		h.watch(rest, c)
	})
	return c.TCPConn.Close() // stops readers and writers; the socket stays open for rest
}

// share returns a connection with the same socket, after shutting the socket down for writing.
func (c *programConn) share() (*net.TCPConn, error) {
	file, err := c.File()
	if err != nil {
		return nil, err
	}
	defer file.Close() // FileConn has duplicated it
	rest, err := net.FileConn(file)
	if err != nil {
		return nil, err
	}
	t := rest.(*net.TCPConn) //nolint:forcetypeassert // it is a TCP socket
	_ = t.CloseWrite()       // fails if the program has closed it
	return t, nil
}

// watch waits until the program has closed the connection or written to it.
func (h *hold) watch(rest net.Conn, c *programConn) {
	var b [1]byte
	until := time.Now().Add(h.maxWait())
	for {
		// fails if closed, and then Read fails too.
		_ = rest.SetReadDeadline(time.Now().Add(holdLook))
		if _, err := rest.Read(b[:]); !errors.Is(err, os.ErrDeadlineExceeded) {
			return // the program has closed it, or writes and will notice that nobody reads
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

// maxWait returns how long the call still waits for the program at most.
func (h *hold) maxWait() time.Duration { return max(time.Until(h.due), 0) + holdMost }

// queued reports whether the program has read nothing of this request although it answers others.
// Then no handler runs: the request waits inside the program.
func (h *hold) queued(rest net.Conn, c *programConn) bool {
	if c.heard.Load() < h.begun.UnixNano() {
		return false // the program answers nobody
	}
	var n int
	var err error
	entered := sandbox.InNetwork(c.network, func() { n, err = unread(rest) })
	return entered == nil && err == nil && n > 0 && int64(n) >= c.sent.Load()
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
		return &programConn{TCPConn: t, network: p.network, heard: &p.heard}, nil
	}
	return c, nil
}
