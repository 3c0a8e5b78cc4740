package gateway

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// maxReplay bounds in bytes what is kept of a body, so that another replica can have it.
const maxReplay = 64 << 10

// maxDrain is how many bytes of a body that nobody wants are read, so that the connection can be kept; net/http's number.
const maxDrain = 256 << 10

// source is a request's body, which can be read again from its beginning as long as that is kept.
type source struct {
	rc    *http.ResponseController // for deadlines; nil: there are none
	stall time.Duration            // that the client has for the next piece; 0: as long as it likes
	keep  int64                    // bytes at most

	deadline sync.Mutex // who sets it; may be locked under mu
	ended    bool       // it is not pace's to set any more
	broken   bool       // by cut

	mu   sync.Mutex // held while r is read
	r    io.Reader
	head []byte
	sent atomic.Int64 // bytes that were read of r
	err  error        // that ended it
}

// source makes the body of a call's request. It ends with the call.
func (g *Gateway) source(w http.ResponseWriter, r *http.Request, c *call) *source {
	s := &source{rc: http.NewResponseController(w), stall: g.cfg.Stall, keep: maxReplay, r: r.Body}
	if r.ContentLength >= 0 {
		s.keep = min(r.ContentLength, maxReplay)
	}
	if g.takeMemory(c, s.keep) != nil {
		s.keep = 0 // it goes on, and cannot be tried again
	}
	if r.ContentLength != 0 {
		c.body = s
	}
	return s
}

// state returns how much was read, whether that is more than can be read again, and what is wrong with the body.
func (s *source) state() (sent int64, lost bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	err = s.err
	if errors.Is(err, io.EOF) {
		err = nil
	}
	sent = s.sent.Load()
	return sent, sent > int64(len(s.head)), err
}

// again returns the body from its beginning. The reader before it must have been closed.
func (s *source) again() io.ReadCloser { return &reading{s: s} }

// pace gives the client a while for the next piece.
func (s *source) pace() {
	if s.stall <= 0 || s.rc == nil {
		return
	}
	s.deadline.Lock()
	defer s.deadline.Unlock()
	if !s.ended {
		_ = s.rc.SetReadDeadline(time.Now().Add(s.stall)) // net/http clears it when the body has been read
	}
}

// longAgo is a deadline that has passed.
var longAgo = time.Unix(1, 0)

// whole tells whether all has been read, as far as that can be told without waiting.
func (s *source) whole() bool {
	if !s.mu.TryLock() {
		return false
	}
	defer s.mu.Unlock()
	return errors.Is(s.err, io.EOF)
}

// cut ends a Read that waits for the client, if there is one, and those to come: the transport would wait for it.
func (s *source) cut() {
	s.deadline.Lock()
	defer s.deadline.Unlock()
	if !s.ended && !s.whole() {
		s.ended, s.broken = true, true
		_ = s.rc.SetReadDeadline(longAgo)
	}
}

// end ends the reading: a Read that waits for the client has time until then, and so has the rest of the body, if it is not
// too large; with longAgo, nobody waits. Afterwards nobody reads. It returns whether all has been read, and what comes next on
// the connection is another request.
//
// Without it, a Read that meets the body's end after the handler has returned would read on in net/http's name, at the same
// time as net/http itself, which panics; and one that net/http breaks off would leave the rest of a chunked body, which net/http
// would take for the next request.
func (s *source) end(until time.Time) bool {
	s.deadline.Lock()
	s.ended = true
	if s.broken {
		until = longAgo
	} else if s.whole() { // by far the most are: no deadline is touched
		s.deadline.Unlock()
		return true
	}
	err := s.rc.SetReadDeadline(until)
	s.deadline.Unlock()
	if err != nil {
		return false // a recorder in a test, which has nothing to wait for, or a connection that is closed
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.head = nil
	if s.err == nil && !until.Equal(longAgo) { // a body that broke off has no end
		n, err := io.CopyN(io.Discard, s.r, maxDrain+1)
		s.sent.Add(n)
		s.err = err
	}
	if errors.Is(s.err, io.EOF) && s.rc.SetReadDeadline(time.Time{}) == nil && (until.IsZero() || time.Now().Before(until)) {
		return true
	}
	if s.err == nil {
		s.err = http.ErrBodyReadAfterClose
	}
	_ = s.rc.SetReadDeadline(longAgo) // net/http closes the body, for which it would read on
	return false
}

// endBody ends the reading of a call's body, as net/http wants it before the handler returns. status is the answer's; it
// has been flushed, unless the connection is to be aborted.
func (c *call) endBody(w http.ResponseWriter, r *http.Request, status int) {
	s, until := c.body, longAgo
	if s == nil {
		return
	}
	h := w.Header()
	// A client that waits for the 100, or that has read that the connection closes, does not send the rest.
	kept := !r.Close && r.ProtoMajor == 1 && r.Header.Get("Expect") == "" && !strings.EqualFold(h.Get("Connection"), "close")
	switch {
	case c.broken || status == statusClientGone || !kept || r.ContentLength > s.sent.Load()+maxDrain:
	case r.Method == http.MethodHead || h.Get("Content-Length") != "" || status == http.StatusNoContent || status == http.StatusNotModified:
		if until = (time.Time{}); s.stall > 0 { // it has all of the answer
			until = time.Now().Add(s.stall)
		}
	default:
		until = time.Now().Add(settleTime) // it waits for the answer's end
	}
	if !s.end(until) {
		closeAfter(w)
	}
}

// closeAfter has the server close the connection after the answer, as MaxBytesReader can although the header has been sent.
func closeAfter(w http.ResponseWriter) {
	for {
		u, ok := w.(interface{ Unwrap() http.ResponseWriter })
		if !ok {
			break
		}
		w = u.Unwrap()
	}
	_, _ = http.MaxBytesReader(w, io.NopCloser(strings.NewReader("x")), 0).Read(make([]byte, 1))
}

// reading is one attempt's view of a source.
type reading struct {
	s      *source
	off    int
	closed atomic.Bool
}

// Read implements io.Reader.
func (b *reading) Read(p []byte) (int, error) {
	s := b.s
	s.mu.Lock()
	defer s.mu.Unlock()
	if b.closed.Load() {
		return 0, http.ErrBodyReadAfterClose
	}
	if b.off < len(s.head) {
		n := copy(p, s.head[b.off:])
		b.off += n
		return n, nil
	}
	if s.err != nil {
		return 0, s.err
	}
	s.pace()
	n, err := s.r.Read(p)
	if sent := s.sent.Add(int64(n)); sent == int64(len(s.head)+n) && sent <= s.keep {
		s.head = append(s.head, p[:n]...)
		b.off += n
	}
	s.err = err
	return n, err
}

// Close implements io.Closer. It does not wait for a Read that waits for the client: the next reader does, and end.
func (b *reading) Close() error {
	b.closed.Store(true)
	return nil
}
