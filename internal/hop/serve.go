package hop

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"time"
)

// Server answers one request at a time on connections of a client that is trusted to write correct
// HTTP/1.1.
type Server struct {
	Handler http.Handler
	MaxHead int64 // largest request head in bytes

	// Read bounds the time for reading the body of a request. If the body has a length, the whole
	// body must come within this time, until the answer begins. Otherwise Read bounds each pause in
	// which no byte comes. 0: no bound.
	Read time.Duration
	// Write bounds how long the client may take for a piece of the answer; 0: no bound.
	Write time.Duration
}

// Served is the outcome of an exchange on the server's side.
type Served struct {
	// Silent is true if the connection ended, or ctx did, before the first byte of a request.
	Silent bool
	// Kept is true if request and answer have ended properly, so that the connection can be used
	// again.
	Kept bool
	// Whole is true if the whole answer was sent. If the connection is not kept then, close it with
	// [Linger]. If it is neither kept nor whole, Serve has closed it.
	Whole bool
}

// Serve runs one exchange on c. It returns when the handler has ended, which must happen soon after
// ctx ends. Only ctx bounds the wait for the request's head, because a trusted client may be slow
// on a busy machine. The handler may break the answer off with http.ErrAbortHandler.
func (s *Server) Serve(ctx context.Context, c net.Conn) (out Served) {
	in := takeReader(c)
	in.left = s.MaxHead
	x := &exchange{s: s, c: c, in: in}
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer func() {
		if !stop() || in.r.Buffered() > 0 {
			out.Kept = false
		}
		if !out.Kept && !out.Whole && !x.hijacked {
			_ = c.Close()
		}
		if !x.hijacked { // otherwise the hijacker may have it
			in.give()
		}
	}()
	r, err := http.ReadRequest(in.r)
	if err != nil {
		return Served{Silent: !in.came}
	}
	in.left = -1
	x.begin(r)
	return x.run(r.WithContext(ctx))
}

// exchange is one exchange on the server's side, and its http.ResponseWriter.
type exchange struct {
	s        *Server
	c        net.Conn
	keeps    Flusher // c, if it is a Flusher; nil: it is not
	in       *reader
	body     *incoming // nil: no body
	head     bool      // the request's method is HEAD
	header   http.Header
	out      *buffer // not written yet
	hijacked bool
	failed   error // error of a write

	begun   bool
	chunked bool
	bodied  bool  // the answer may have a body
	left    int64 // bytes left of the body, unless it is in chunks

	mu    sync.Mutex
	given bool // the handler has set the read deadline
	talks bool // the answer has begun, or the body has no length
}

// begin sets up the exchange for a request.
func (x *exchange) begin(r *http.Request) {
	x.header, x.head = http.Header{}, r.Method == http.MethodHead
	var until time.Time
	if r.ContentLength != 0 {
		x.body = &incoming{x: x, body: r.Body, left: r.ContentLength}
		r.Body = x.body
		x.talks = r.ContentLength < 0
		if x.s.Read > 0 {
			until = time.Now().Add(x.s.Read)
		}
	}
	_ = x.c.SetReadDeadline(until)
}

func (x *exchange) run(r *http.Request) (out Served) {
	x.out = heads.Get().(*buffer)
	defer func() {
		p := recover()
		x.out.give()
		if p != nil && p != http.ErrAbortHandler { //nolint:errorlint // a panic's value is it itself
			panic(p)
		}
	}()
	x.s.Handler.ServeHTTP(x, r)
	if x.hijacked {
		return Served{}
	}
	if r.Context().Err() != nil || x.finish() != nil {
		return Served{} // the handler may have written nothing because nobody waits
	}
	ended := (x.body == nil || x.body.ended) && !r.Close
	if x.s.Read > 0 || x.s.Write > 0 || x.given {
		ended = x.c.SetDeadline(time.Time{}) == nil && ended
	}
	return Served{Whole: true, Kept: ended}
}

// flows gives the rest of the request's body new time, if only its silence is bounded.
func (x *exchange) flows(answers bool) {
	if x.s.Read == 0 || x.body == nil {
		return
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.talks = x.talks || answers
	if x.talks && !x.given {
		_ = x.c.SetReadDeadline(time.Now().Add(x.s.Read))
	}
}

// incoming is a request's body.
type incoming struct {
	x     *exchange
	body  io.ReadCloser
	left  int64 // negative: unknown
	ended bool
	taken bool   // All has returned it
	whole []byte // the whole body, if the request arrived at once
}

// Read implements io.Reader.
func (b *incoming) Read(p []byte) (int, error) {
	if b.taken {
		return 0, io.EOF
	}
	b.x.flows(false)
	n, err := b.body.Read(p)
	if b.left > 0 {
		b.left -= int64(n)
	}
	b.ended = b.ended || b.left == 0 || errors.Is(err, io.EOF)
	return n, err
}

// Close implements io.Closer. Nobody reads the rest of the body, so the connection is not kept.
func (b *incoming) Close() error { return nil }

// All returns the whole body if it arrived with its head and nothing of it has been read; else nil.
// The result is valid until the exchange ends.
func (b *incoming) All() []byte {
	n := int(b.left)
	if n > 0 && n == len(b.whole) {
		b.left, b.ended, b.taken = 0, true, true
		return b.whole
	}
	if b.left <= 0 || b.ended || b.left > int64(b.x.in.r.Buffered()) {
		return nil
	}
	all, err := b.x.in.r.Peek(n)
	if err != nil {
		return nil
	}
	_, _ = b.x.in.r.Discard(n) // the bytes are buffered
	// net/http's body reader does not know that the body was read.
	b.left, b.ended, b.taken = 0, true, true
	return all
}

// Hijack implements http.Hijacker.
func (x *exchange) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	if x.begun || x.hijacked {
		return nil, nil, http.ErrHijacked
	}
	if x.keeps != nil {
		return nil, nil, http.ErrNotSupported
	}
	x.hijacked = true
	_ = x.c.SetDeadline(time.Time{})
	return x.c, bufio.NewReadWriter(x.in.r, bufio.NewWriter(x.c)), nil
}

// SetReadDeadline sets the read deadline for http.ResponseController.
func (x *exchange) SetReadDeadline(at time.Time) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.given = true
	return x.c.SetReadDeadline(at)
}

// EnableFullDuplex does nothing, because exchanges are always full duplex.
func (x *exchange) EnableFullDuplex() error { return nil }
