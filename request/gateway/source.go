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

// maxReplay is how many bytes of a body are kept so that another replica can get them.
const maxReplay = 64 << 10

// maxDrain is how many bytes of an unwanted body are read so that the connection can be kept.
// net/http uses the same number.
const maxDrain = 256 << 10

// source is a request's body. It can be read again from its beginning while that is kept.
type source struct {
	rc    *http.ResponseController // sets deadlines; nil: there are none
	stall time.Duration            // time that the client has for the next piece; 0: no limit
	keep  int64                    // largest number of bytes to keep
	made  time.Time
	// When the current Read began to wait for the client, in nanoseconds after made; 0: none waits.
	since atomic.Int64

	deadline sync.Mutex // held to change the read deadline; may be locked while mu is held
	ended    bool       // pace must not set the deadline any more
	broken   bool       // set by cut

	mu   gate          // held while r is read
	from *http.Request // net/http sets its Trailer when r ends
	r    io.Reader
	kept sync.Mutex
	// To read head, hold mu or kept. To change it, hold both. So readers of head need not wait for
	// the client.
	head []byte
	sent atomic.Int64 // bytes read from r
	err  error        // what ended r
}

// firstPiece is how many bytes of a body are read before its task is queued.
const firstPiece = 4 << 10

// gate is a mutex that may be held while a client is silent. In a test's synctest bubble, waiting
// for it counts as blocked.
type gate chan struct{}

func newGate() gate { return make(gate, 1) }

// Lock implements sync.Locker.
func (g gate) Lock() { g <- struct{}{} }

// Unlock implements sync.Locker.
func (g gate) Unlock() { <-g }

// TryLock works like that of sync.Mutex.
func (g gate) TryLock() bool {
	select {
	case g <- struct{}{}:
		return true
	default:
		return false
	}
}

// source returns the body of a call's request. It ends with the call.
func (g *Gateway) source(w http.ResponseWriter, r *http.Request, c *call) *source {
	s := &source{rc: http.NewResponseController(w), stall: g.cfg.Stall, keep: maxReplay, made: time.Now(), mu: newGate(), from: r, r: r.Body}
	if r.ContentLength >= 0 {
		s.keep = min(r.ContentLength, maxReplay)
	}
	if g.takeMemory(c, s.keep) != nil {
		s.keep = 0 // such a body cannot be replayed, so the request is not retried
	}
	if r.ContentLength != 0 {
		c.body = s
	}
	return s
}

// state returns how many bytes were read, whether the body's start is lost for another attempt, and
// the body's error.
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

// all returns the body if it was read completely and kept, else nil.
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

// again returns the body from its beginning and stores its trailer in trailer. The previous reader
// must have been closed.
func (s *source) again(trailer http.Header) io.ReadCloser { return &reading{s: s, trailer: trailer} }

// pace gives the client s.stall for the next piece.
func (s *source) pace() {
	if s.stall <= 0 || s.rc == nil {
		return
	}
	s.deadline.Lock()
	defer s.deadline.Unlock()
	if !s.ended {
		// net/http clears it when the body has been read.
		_ = s.rc.SetReadDeadline(time.Now().Add(s.stall))
	}
}

// silent returns how long the current Read has waited for the client, and when it began to wait, as
// a duration after s.made. Both are 0 if no Read waits.
func (s *source) silent() (silent, since time.Duration) {
	if since = time.Duration(s.since.Load()); since > 0 {
		silent = max(time.Since(s.made)-since, 1)
	}
	return silent, since
}

// read reads from the client. The caller holds s.mu.
func (s *source) read(p []byte) (int, error) {
	s.pace()
	s.since.Store(max(int64(time.Since(s.made)), 1))
	n, err := s.r.Read(p)
	s.since.Store(0)
	s.sent.Add(int64(n))
	s.err = err
	return n, err
}

// peek waits for the first bytes of the body and keeps them for its readers. It returns nil for an
// empty body.
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

// ahead reads as much of the body as can be kept, unless a reader has gone beyond that.
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

// fill reads at most n more bytes into the head, which holds all bytes read so far. The caller
// holds s.mu.
func (s *source) fill(n int64) {
	at := len(s.head)
	s.keepAs(slices.Grow(s.head, int(n)))
	k, _ := s.read(s.head[at : at+int(n)])
	s.keepAs(s.head[:at+k])
}

// keepAs replaces the head. The caller holds s.mu.
func (s *source) keepAs(head []byte) {
	s.kept.Lock()
	defer s.kept.Unlock()
	s.head = head
}

// longAgo is a deadline that has passed.
var longAgo = time.Unix(1, 0)

// whole reports whether the body is known to be read completely. It does not wait.
func (s *source) whole() bool {
	if !s.mu.TryLock() {
		return false
	}
	defer s.mu.Unlock()
	return errors.Is(s.err, io.EOF)
}

// cut ends a Read that waits for the client, and all later ones. Otherwise the transport would wait
// for the Read to end.
func (s *source) cut() {
	s.deadline.Lock()
	defer s.deadline.Unlock()
	if !s.ended && !s.whole() {
		s.ended, s.broken = true, true
		_ = s.rc.SetReadDeadline(longAgo)
	}
}

// end stops all reading. The argument until limits how long a Read may still wait for the client.
// By then, end also reads the rest of the body if it has at most maxDrain bytes. With [longAgo],
// end waits for nothing. After end, no goroutine reads the body. end returns true if the body was
// read completely, so that the next request begins at the connection's next byte.
//
// Without end, two things could go wrong after the handler has returned:
//   - A Read that meets the end of the body would read on for net/http. net/http would read at the
//     same time, and panic.
//   - net/http would take the rest of a chunked body for the next request.
func (s *source) end(until time.Time) bool {
	s.deadline.Lock()
	s.ended = true
	if s.broken {
		until = longAgo
	} else if s.whole() { // most requests: no deadline is touched
		s.deadline.Unlock()
		return true
	}
	err := s.rc.SetReadDeadline(until)
	s.deadline.Unlock()
	if err != nil {
		return false // a test's recorder, or a closed connection: nothing to wait for
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
	_ = s.rc.SetReadDeadline(longAgo) // net/http closes the body and would read on to do so
	return false
}

// endBody ends all reading of a call's body. net/http requires this before the handler returns.
// status is the answer's status. The caller has flushed the answer, unless it will abort the
// connection.
func (c *call) endBody(w http.ResponseWriter, r *http.Request, status int) {
	s, until := c.body, longAgo
	if s == nil {
		return
	}
	h := w.Header()
	// A client that waits for the 100, or was told that the connection closes, does not send the
	// rest.
	kept := !r.Close && r.ProtoMajor == 1 && r.Header.Get("Expect") == "" && !strings.EqualFold(h.Get("Connection"), "close")
	switch {
	case c.broken || status == statusClientGone || !kept || r.ContentLength > s.sent.Load()+maxDrain:
	case r.Method == http.MethodHead || h.Get("Content-Length") != "" || status == http.StatusNoContent || status == http.StatusNotModified:
		if until = (time.Time{}); s.stall > 0 { // the client has the whole answer
			until = time.Now().Add(s.stall)
		}
	default:
		until = time.Now().Add(settleTime) // the client waits for the end of the answer
	}
	if !s.end(until) {
		closeAfter(w)
	}
}

// waitSent waits for goroutines that may still read the body after [call.endBody].
func (c *call) waitSent() {
	for _, sent := range c.sending {
		<-sent
	}
}

// closeAfter makes the server close the connection after the answer, even if the header has been
// sent. MaxBytesReader does the same.
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
	trailer http.Header // nil: no trailer will come
	closed  atomic.Bool
}

// Read implements io.Reader.
func (b *reading) Read(p []byte) (int, error) {
	s := b.s
	if n := b.copy(p); n > 0 {
		return n, nil // even while another goroutine reads the rest
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

// copy copies the next bytes of the head, if there are more.
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

// finish returns the error that ends the body, after it has copied the trailer, which the transport
// reads next. The caller holds s.mu.
func (b *reading) finish(err error) error {
	if errors.Is(err, io.EOF) && b.trailer != nil && !b.closed.Load() {
		maps.Copy(b.trailer, b.s.from.Trailer)
	}
	return err
}

// Close implements io.Closer. It does not wait for a Read that waits for the client. The next
// reader waits for that Read, and so does [source.end].
func (b *reading) Close() error {
	b.closed.Store(true)
	return nil
}
