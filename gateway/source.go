package gateway

import (
	"errors"
	"io"
	"maps"
	"net/http"
	"slices"
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
	made  time.Time
	since atomic.Int64 // when the Read began that waits for the client, in nanoseconds after made; 0: none waits

	deadline sync.Mutex // who sets it; may be locked under mu
	ended    bool       // it is not pace's to set any more
	broken   bool       // by cut

	mu   gate          // held while r is read
	from *http.Request // whose Trailer net/http sets when r ends
	r    io.Reader
	kept sync.Mutex
	head []byte       // read with mu or kept held, changed with both, so that readers of these bytes do not wait for the client
	sent atomic.Int64 // bytes that were read of r
	err  error        // that ended it
}

// firstPiece is how many bytes of a body are read at most before its task is queued.
const firstPiece = 4 << 10

// gate is a mutex for waits as long as a client is silent: a goroutine that waits at it counts as blocked in a test's bubble.
type gate chan struct{}

func newGate() gate { return make(gate, 1) }

// Lock implements sync.Locker.
func (g gate) Lock() { g <- struct{}{} }

// Unlock implements sync.Locker.
func (g gate) Unlock() { <-g }

// TryLock is that of sync.Mutex.
func (g gate) TryLock() bool {
	select {
	case g <- struct{}{}:
		return true
	default:
		return false
	}
}

// source makes the body of a call's request. It ends with the call.
func (g *Gateway) source(w http.ResponseWriter, r *http.Request, c *call) *source {
	s := &source{rc: http.NewResponseController(w), stall: g.cfg.Stall, keep: maxReplay, made: time.Now(), mu: newGate(), from: r, r: r.Body}
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

// all returns the body if all of it has been read and kept; nil: not so.
func (s *source) all() []byte {
	if !s.mu.TryLock() {
		return nil
	}
	defer s.mu.Unlock()
	if !errors.Is(s.err, io.EOF) || s.sent.Load() > int64(len(s.head)) {
		return nil
	}
	return s.head
}

// again returns the body from its beginning, and puts the trailer that follows it into trailer. The reader before it must have
// been closed.
func (s *source) again(trailer http.Header) io.ReadCloser { return &reading{s: s, trailer: trailer} }

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

// silent returns how long a Read has waited for the client, and since when, after s.made; 0: none waits.
func (s *source) silent() (silent, since time.Duration) {
	if since = time.Duration(s.since.Load()); since > 0 {
		silent = max(time.Since(s.made)-since, 1)
	}
	return silent, since
}

// read reads from the client. s.mu is held.
func (s *source) read(p []byte) (int, error) {
	s.pace()
	s.since.Store(max(int64(time.Since(s.made)), 1))
	n, err := s.r.Read(p)
	s.since.Store(0)
	s.sent.Add(int64(n))
	s.err = err
	return n, err
}

// peek waits for the first bytes of the body, and keeps them for its readers. It returns nil at the end of an empty one.
func (s *source) peek() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.err == nil && len(s.head) == 0 {
		s.fill(max(min(s.keep, firstPiece), 1))
	}
	if errors.Is(s.err, io.EOF) {
		return nil
	}
	return s.err
}

// ahead reads as much of the body as can be kept, as long as nothing but that has been read.
func (s *source) ahead() {
	for more := true; more; {
		more = func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			if room := s.keep - int64(len(s.head)); s.err == nil && room > 0 && s.sent.Load() == int64(len(s.head)) {
				s.fill(min(room, firstPiece))
				return true
			}
			return false
		}()
	}
}

// fill reads at most n more bytes into the head, which is all that has been read. s.mu is held.
func (s *source) fill(n int64) {
	at := len(s.head)
	s.keepAs(slices.Grow(s.head, int(n)))
	k, _ := s.read(s.head[at : at+int(n)])
	s.keepAs(s.head[:at+k])
}

// keepAs changes the head. s.mu is held.
func (s *source) keepAs(head []byte) {
	s.kept.Lock()
	defer s.kept.Unlock()
	s.head = head
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
	s.keepAs(nil)
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

// waitSent waits for the goroutines that may still read the body, after [call.endBody].
func (c *call) waitSent() {
	for _, sent := range c.sending {
		<-sent
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
	s       *source
	off     int
	trailer http.Header // may be nil, if there will be none
	closed  atomic.Bool
}

// Read implements io.Reader.
func (b *reading) Read(p []byte) (int, error) {
	s := b.s
	if n := b.copy(p); n > 0 {
		return n, nil // even while the rest is read ahead
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if b.closed.Load() {
		return 0, http.ErrBodyReadAfterClose
	}
	if n := b.copy(p); n > 0 {
		return n, nil
	}
	if s.err != nil {
		return 0, b.finish(s.err)
	}
	n, err := s.read(p)
	if sent := s.sent.Load(); sent == int64(len(s.head)+n) && sent <= s.keep {
		s.keepAs(append(s.head, p[:n]...))
		b.off += n
	}
	return n, b.finish(err)
}

// copy takes the next bytes of the head, if there are more.
func (b *reading) copy(p []byte) int {
	b.s.kept.Lock()
	defer b.s.kept.Unlock()
	if b.closed.Load() || b.off >= len(b.s.head) {
		return 0
	}
	n := copy(p, b.s.head[b.off:])
	b.off += n
	return n
}

// finish passes on what ends the body, with its trailer, for the transport to read after that. s.mu is held.
func (b *reading) finish(err error) error {
	if errors.Is(err, io.EOF) && b.trailer != nil && !b.closed.Load() {
		maps.Copy(b.trailer, b.s.from.Trailer)
	}
	return err
}

// Close implements io.Closer. It does not wait for a Read that waits for the client: the next reader does, and end.
func (b *reading) Close() error {
	b.closed.Store(true)
	return nil
}
