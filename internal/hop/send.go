package hop

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// head writes the request line and headers.
func (r *Request) head() (*buffer, error) {
	if !token(r.In.Method) || !printable(r.Target, 0x21) || !printable(r.Host, 0x21) {
		return nil, fmt.Errorf("request %.100q of host %.100q: want a method, a path and a host without spaces and control characters", r.In.Method+" "+r.Target, r.Host)
	}
	h := heads.Get().(*buffer)
	b := append(h.b, r.In.Method...)
	b = append(append(append(b, ' '), r.Target...), " HTTP/1.1\r\nHost: "...)
	b = append(append(b, r.Host...), "\r\n"...)
	header := r.In.Header
	also := named(header)
	for name, values := range header {
		if name == "Content-Length" || hopByHop(name) || len(also) > 0 && slices.Contains(also, name) || r.replaces(name) {
			continue
		}
		for _, value := range values {
			if !token(name) || !printable(value, ' ') {
				h.give()
				return nil, fmt.Errorf("header %.100q: %.100q, want a name, and a value without control characters", name, value)
			}
			b = line(b, name, value)
		}
	}
	for _, f := range r.Header {
		if f.Value != "" {
			if !printable(f.Value, ' ') {
				h.give()
				return nil, fmt.Errorf("header %.100q: %.100q, want a value without control characters", f.Name, f.Value)
			}
			b = line(b, f.Name, f.Value)
		}
	}
	if slices.Contains(tokens(header["Te"]), "trailers") {
		b = line(b, "Te", "trailers")
	}
	if to := upgradeTo(header); to != "" {
		b = line(line(b, "Connection", "Upgrade"), "Upgrade", to)
	}
	h.b = append(r.framing(b), "\r\n"...)
	return h, nil
}

// framing appends the headers that frame the body, as in the incoming request.
func (r *Request) framing(b []byte) []byte {
	in := r.In
	switch {
	case in.ContentLength < 0:
		b = line(b, "Transfer-Encoding", "chunked")
		if len(in.Trailer) > 0 {
			names := make([]string, 0, len(in.Trailer))
			for name := range in.Trailer {
				names = append(names, name)
			}
			slices.Sort(names)
			b = line(b, "Trailer", strings.Join(names, ", "))
		}
	case in.ContentLength > 0 || in.Header["Content-Length"] != nil || in.Method == http.MethodPost || in.Method == http.MethodPut || in.Method == http.MethodPatch:
		b = append(b, "Content-Length: "...)
		b = append(strconv.AppendInt(b, in.ContentLength, 10), "\r\n"...)
	}
	return b
}

func line(b []byte, name, value string) []byte {
	return append(append(append(append(b, name...), ": "...), value...), "\r\n"...)
}

func (r *Request) replaces(name string) bool {
	for i := range r.Header {
		if r.Header[i].Name == name {
			return true
		}
	}
	return false
}

// tokens splits header lists into their elements, in lower case.
func tokens(lines []string) (all []string) {
	for _, l := range lines {
		for t := range strings.SplitSeq(l, ",") {
			all = append(all, strings.ToLower(strings.TrimSpace(t)))
		}
	}
	return all
}

// upgradeTo returns the protocol that a message requests or switches to; empty: none.
func upgradeTo(h http.Header) string {
	if h["Connection"] == nil || !slices.Contains(tokens(h["Connection"]), "upgrade") {
		return ""
	}
	return h.Get("Upgrade")
}

// token reports whether s is a valid method or header name.
func token(s string) bool {
	for i := range len(s) {
		switch c := s[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0:
		default:
			return false
		}
	}
	return s != ""
}

// printable reports whether s has only bytes from the given one on, and no DEL. Tabs are allowed if
// spaces are.
func printable(s string, from byte) bool {
	for i := range len(s) {
		if c := s[i]; c < from && (c != '\t' || from > ' ') || c == 0x7f {
			return false
		}
	}
	return true
}

// sending is a request whose body may be sent while its answer arrives.
type sending struct {
	c    net.Conn
	r    *Request
	head *buffer
	done chan struct{}

	mu  sync.Mutex
	err error
}

func (s *sending) run() {
	defer close(s.done)
	_, err := s.c.Write(s.head.b) // sent before the body, which may take long to arrive
	s.head.give()
	b := takeBuffer()
	defer b.give()
	if whole := b.b[:cap(b.b)]; err == nil && s.r.In.ContentLength < 0 {
		err = s.chunks(whole)
	} else if err == nil {
		err = s.plain(whole)
	}
	s.end(err)
}

// end stores the outcome before anyone can observe it on the connection.
func (s *sending) end(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
	if e := (*bodyError)(nil); errors.As(err, &e) {
		_ = s.c.Close() // the other side must not wait for the rest
	}
}

// fault returns why the request could not be sent; nil: unknown or no fault.
func (s *sending) fault() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// ended reports whether nothing more will be sent.
func (s *sending) ended() bool {
	select {
	case <-s.done:
		return true
	default:
		return false
	}
}

// sentWithin is how long the end of the request may be noticed after the end of the answer. The
// other side can answer between the last write and its return.
const sentWithin = 5 * time.Millisecond

// endsSoon reports whether nothing more will be sent. It waits a moment for the goroutine that
// sends.
func (s *sending) endsSoon() bool {
	if s.ended() {
		return true
	}
	soon := time.NewTimer(sentWithin)
	defer soon.Stop()
	select {
	case <-s.done:
		return true
	case <-soon.C:
		return false
	}
}

// bodyError is the error of a body that ended too early.
type bodyError struct{ err error }

func (e *bodyError) Error() string { return "the request's body: " + e.err.Error() }
func (e *bodyError) Unwrap() error { return e.err }

// room is the largest size of the size line before a chunk.
const room = len("ffffffff\r\n")

// plain sends a body of known length.
func (s *sending) plain(b []byte) error {
	for left := s.r.In.ContentLength; left > 0; {
		n, err := s.r.In.Body.Read(b[:min(int64(len(b)), left)])
		left -= int64(n)
		if n > 0 {
			if _, err := s.c.Write(b[:n]); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) && left > 0 {
			err = io.ErrUnexpectedEOF
		}
		if err != nil && left > 0 {
			return &bodyError{err}
		}
	}
	return nil
}

// chunks sends a body in chunks as it arrives.
func (s *sending) chunks(b []byte) error {
	for {
		n, err := s.r.In.Body.Read(b[room : len(b)-2])
		if n > 0 {
			var size [room]byte
			head := append(strconv.AppendInt(size[:0], int64(n), 16), "\r\n"...)
			at := room - copy(b[room-len(head):], head)
			copy(b[room+n:], "\r\n")
			if _, err := s.c.Write(b[at : room+n+2]); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return &bodyError{err}
		}
	}
	end := append(b[:0], "0\r\n"...)
	for name, values := range s.r.In.Trailer {
		for _, value := range values {
			if token(name) && printable(value, ' ') {
				end = line(end, name, value)
			}
		}
	}
	_, err := s.c.Write(append(end, "\r\n"...))
	return err
}
