// Package hop passes one HTTP/1.1 exchange on to another connection. It writes a handler's request
// to that connection, and copies the answer to the handler's ResponseWriter. It does the work of a
// reverse proxy and its transport, but the caller chooses and keeps the connections. It starts a
// goroutine only for a body that is not yet in memory, because the answer may begin before the body
// ends.
package hop

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/textproto"
	"slices"
	"strings"
	"sync"
	"time"
)

// Request is a request to pass on.
type Request struct {
	In     *http.Request // its method, header, length and trailer are passed on
	Target string        // of the request line
	Host   string
	Header []Field // replace those of In with the same names

	// All is the whole body if its length is In.ContentLength. Otherwise a goroutine reads the body
	// from In.Body.
	All []byte

	// There is true if the other side already has the request. A newline tells it to answer, and
	// only the answer is passed on.
	There bool

	// Answer may change the head of the answer before it is passed on. It is not called for
	// informational answers.
	Answer func(*http.Response)

	// Whole is called when the answer has been passed on, before its connection is closed or used
	// again. It may be nil. It is not called for an upgrade.
	Whole func()

	// Silence is how long an upgraded connection may have no traffic in either direction before it
	// is closed; 0: for ever.
	Silence time.Duration
}

// Field is a header of a [Request]. Name is canonical; an empty Value removes it.
type Field struct{ Name, Value string }

// Result is the outcome of an exchange.
type Result struct {
	// Err is why there is no answer or only a part of it; nil: the answer is complete.
	Err error
	// Begun is true if the answer's head has been passed on. Then only a closed connection can tell
	// the client about a failure.
	Begun bool
	// Silent is true if not a byte came back. A kept connection may have been closed at the other
	// end before the request reached it.
	Silent bool
	// Kept is true if request and answer have ended properly, so that the connection can be used
	// again. Otherwise Do has closed it.
	Kept bool
	// Sent is closed when the goroutine that reads In.Body has ended; nil: there is no such goroutine.
	// The caller must unblock a pending Read of In.Body, and then wait for Sent.
	Sent <-chan struct{}
}

// newline is sent for [Request.There].
var newline = []byte("\n")

// maxHead is the largest head of an answer in bytes, including the informational answers before it.
const maxHead = 1 << 20

// Do runs an exchange on c until the answer or ctx has ended. It closes c unless the result says
// Kept.
func Do(ctx context.Context, c net.Conn, w http.ResponseWriter, r *Request) (out Result) {
	var head *buffer
	var err error
	if !r.There {
		if head, err = r.head(); err != nil {
			_ = c.Close()
			return Result{Err: err, Silent: true}
		}
	}
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	in := takeReader(c)
	out.Silent = true
	defer func() {
		if !stop() || out.Err != nil || in.r.Buffered() > 0 {
			out.Kept = false
		}
		if !out.Kept {
			_ = c.Close()
		}
		in.give()
	}()
	var send *sending
	if b, ok := r.In.Body.(*incoming); ok && r.All == nil {
		r.All = b.All()
	}
	switch {
	case r.There:
		_, err = c.Write(newline)
	case r.In.ContentLength == int64(len(r.All)):
		_, err = c.Write(append(head.b, r.All...))
		head.give()
	default:
		send = &sending{c: c, r: r, head: head, done: make(chan struct{})}
		out.Sent = send.done
		go send.run() // the caller waits for it; see Result
	}
	first := err
	resp, err := r.await(w, in)
	if err != nil {
		out.Silent = !in.came
		out.Err = causeOf(err, first, send)
		return out
	}
	out.Silent = false
	in.left = -1 // a body has no bound
	if resp.StatusCode == http.StatusSwitchingProtocols {
		// The rest of the body would follow on the same connection.
		if send != nil && !send.ended() {
			out.Err = errors.New("it switches protocols before it has all of the request")
			return out
		}
		out.Begun, out.Err = r.upgrade(ctx, c, in.r, w, resp)
		return out
	}
	out.Begun = true
	if out.Err = r.answer(w, resp, in); out.Err != nil {
		return out
	}
	if r.Whole != nil {
		r.Whole()
	}
	out.Kept = first == nil && !resp.Close
	if send != nil {
		// Otherwise the other side answered before the end of the request.
		out.Kept = out.Kept && send.endsSoon() && send.fault() == nil
	}
	return out
}

// await reads the head of the answer, and passes on the informational answers before it.
func (r *Request) await(w http.ResponseWriter, in *reader) (*http.Response, error) {
	for {
		resp, err := http.ReadResponse(in.r, r.In)
		if err != nil {
			return nil, err
		}
		if resp.StatusCode < 100 {
			return nil, fmt.Errorf("malformed HTTP status code %q", resp.Status)
		}
		if resp.StatusCode > 199 || resp.StatusCode == http.StatusSwitchingProtocols {
			return resp, nil
		}
		if r.In.ProtoAtLeast(1, 1) { // older clients would take it for the answer
			inform(w, resp)
		}
	}
}

// causeOf returns why there is no answer: the error of sending the request, if any, else err.
func causeOf(err, first error, send *sending) error {
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
		err = errors.New("EOF")
	}
	if send != nil {
		first = send.fault()
	}
	if first != nil {
		return fmt.Errorf("%w (%w)", first, err)
	}
	return err
}

// inform passes on an informational answer.
func inform(w http.ResponseWriter, resp *http.Response) {
	h := w.Header()
	var before http.Header
	for name, values := range resp.Header {
		if _, there := h[name]; !there {
			if before == nil {
				before = h.Clone()
			}
			h[name] = values
		}
	}
	w.WriteHeader(resp.StatusCode)
	if before == nil {
		return
	}
	for name := range h {
		if _, there := before[name]; !there {
			delete(h, name)
		}
	}
}

// hopByHop reports whether a header belongs to one connection only. The header Connection may name
// further ones.
func hopByHop(name string) bool {
	switch name {
	case "Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection", "Te", "Trailer", "Transfer-Encoding", "Upgrade":
		return true
	}
	return false
}

// named returns the canonical names in a Connection header.
func named(h http.Header) (names []string) {
	for _, line := range h["Connection"] {
		for name := range strings.SplitSeq(line, ",") {
			names = append(names, textproto.CanonicalMIMEHeaderKey(textproto.TrimString(name)))
		}
	}
	return names
}

// answer passes on an answer's head, body and trailer.
func (r *Request) answer(w http.ResponseWriter, resp *http.Response, in *reader) error {
	also := named(resp.Header)
	if r.Answer != nil {
		r.Answer(resp)
	}
	h := w.Header()
	for name, values := range resp.Header {
		if !hopByHop(name) && !slices.Contains(also, name) {
			h[name] = append(h[name], values...)
		}
	}
	announced := len(resp.Trailer)
	for name := range resp.Trailer {
		h["Trailer"] = append(h["Trailer"], name)
	}
	w.WriteHeader(resp.StatusCode)
	streams := resp.ContentLength < 0 || strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream")
	rc := http.NewResponseController(w)
	if resp.Body != http.NoBody {
		if streams && in.waits() {
			if err := flush(rc); err != nil {
				return err
			}
		}
		if err := pass(w, rc, resp.Body, in, streams); err != nil {
			return err
		}
	}
	if len(resp.Trailer) == 0 {
		return nil
	}
	_ = rc.Flush() // sends the answer in chunks, which a trailer needs
	prefix := ""
	if len(resp.Trailer) != announced {
		prefix = http.TrailerPrefix
	}
	for name, values := range resp.Trailer {
		h[prefix+name] = append(h[prefix+name], values...)
	}
	return nil
}

// errGone means that the client does not take the answer.
var errGone = errors.New("the answer could not be forwarded")

// flush sends the written part of an answer. It does nothing if the answer is kept in memory.
func flush(rc *http.ResponseController) error {
	if err := rc.Flush(); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return fmt.Errorf("%w: %w", errGone, err)
	}
	return nil
}

// pass copies an answer's body. If streams is true, it sends each piece at once.
func pass(w io.Writer, rc *http.ResponseController, body io.Reader, in *reader, streams bool) error {
	b := takeBuffer()
	defer b.give()
	for {
		n, err := body.Read(b.b[:cap(b.b)])
		if n > 0 {
			if _, err := w.Write(b.b[:n]); err != nil {
				return fmt.Errorf("%w: %w", errGone, err)
			}
			if streams && err == nil && in.waits() {
				if err := flush(rc); err != nil {
					return err
				}
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// buffer is memory from a pool.
type buffer struct{ b []byte }

// Sizes in bytes of pooled buffers: bodySize to copy bodies, headSize to read and write heads.
const (
	bodySize = 64 << 10
	headSize = 4 << 10
)

var (
	buffers = sync.Pool{New: func() any { return &buffer{make([]byte, 0, bodySize)} }}
	heads   = sync.Pool{New: func() any { return &buffer{make([]byte, 0, headSize)} }}
	readers = sync.Pool{New: func() any {
		r := &reader{}
		r.r = bufio.NewReaderSize(r, headSize)
		return r
	}}
)

func takeBuffer() *buffer { return buffers.Get().(*buffer) }

// give returns the buffer to the pool of its size.
func (b *buffer) give() {
	b.b = b.b[:0]
	switch {
	case cap(b.b) == bodySize:
		buffers.Put(b)
	case cap(b.b) < bodySize: // it may have grown
		heads.Put(b)
	}
}

// reader reads answers from a connection.
type reader struct {
	r    *bufio.Reader
	from io.Reader
	left int64 // bytes that may still be read; negative: no bound
	came bool  // something has been read
}

func takeReader(from io.Reader) *reader {
	r := readers.Get().(*reader)
	r.from, r.left, r.came = from, maxHead, false
	r.r.Reset(r)
	return r
}

func (r *reader) give() {
	r.from = nil
	r.r.Reset(r)
	readers.Put(r)
}

// Read implements io.Reader.
func (r *reader) Read(p []byte) (int, error) {
	if r.left == 0 {
		return 0, fmt.Errorf("the answer's head has more than %d bytes", maxHead)
	}
	if r.left > 0 {
		p = p[:min(int64(len(p)), r.left)]
	}
	n, err := r.from.Read(p)
	r.came = r.came || n > 0
	if r.left > 0 {
		r.left -= int64(n)
	}
	return n, err
}

// lingerTime bounds how long [Linger] reads what the other side still sends.
const lingerTime = 500 * time.Millisecond

// Linger closes a connection whose other side may still send. Closing it at once could lose the
// answer in transit.
func Linger(c net.Conn) {
	if s, ok := c.(interface{ CloseWrite() error }); ok && s.CloseWrite() == nil && c.SetReadDeadline(time.Now().Add(lingerTime)) == nil {
		_, _ = io.Copy(io.Discard, c)
	}
	_ = c.Close()
}
