package hop

import (
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Header implements http.ResponseWriter.
func (x *exchange) Header() http.Header { return x.header }

// WriteHeader implements http.ResponseWriter.
func (x *exchange) WriteHeader(status int) {
	switch {
	case x.begun || x.hijacked:
		return
	case status < 200:
		x.out.b = x.fields(x.statusLine(status), nil)
		x.out.b = append(x.out.b, "\r\n"...)
		_ = x.deliver() // the write of the answer returns the error
		return
	}
	x.begun = true
	x.flows(true)
	x.bodied = !x.head && status != http.StatusNoContent && status != http.StatusNotModified
	length, err := strconv.ParseInt(x.header.Get("Content-Length"), 10, 63)
	b := x.fields(x.statusLine(status), x.announced())
	switch {
	case err == nil && length >= 0 && status != http.StatusNoContent:
		x.left = length
		b = append(strconv.AppendInt(append(b, "Content-Length: "...), length, 10), "\r\n"...)
	case x.bodied:
		x.chunked = true
		b = line(b, "Transfer-Encoding", "chunked")
	}
	x.out.b = append(b, "\r\n"...)
}

func (x *exchange) statusLine(status int) []byte {
	b := strconv.AppendInt(append(x.out.b, "HTTP/1.1 "...), int64(status), 10)
	return append(append(append(b, ' '), http.StatusText(status)...), "\r\n"...)
}

// announced returns the names of the trailer fields that the header announces.
func (x *exchange) announced() (names []string) {
	for _, l := range x.header["Trailer"] {
		for name := range strings.SplitSeq(l, ",") {
			names = append(names, http.CanonicalHeaderKey(strings.TrimSpace(name)))
		}
	}
	return names
}

// fields appends the header to b, without the framing fields and without the trailer fields that
// the list later names.
func (x *exchange) fields(b []byte, later []string) []byte {
	for name, values := range x.header {
		if name == "Content-Length" || name == "Transfer-Encoding" || name == "Connection" || !token(name) || slices.Contains(later, name) {
			continue // not a header name: http.TrailerPrefix has a colon
		}
		for _, value := range values {
			if printable(value, ' ') {
				b = line(b, name, value)
			}
		}
	}
	return b
}

// Write implements http.ResponseWriter.
func (x *exchange) Write(p []byte) (int, error) {
	if x.hijacked {
		return 0, http.ErrHijacked
	}
	if !x.begun {
		x.WriteHeader(http.StatusOK)
	}
	if len(p) == 0 {
		return 0, nil
	}
	if !x.bodied {
		return 0, http.ErrBodyNotAllowed
	}
	if x.chunked {
		x.out.b = append(strconv.AppendInt(x.out.b, int64(len(p)), 16), "\r\n"...)
		x.send(p, "\r\n")
		return len(p), x.failed
	}
	if int64(len(p)) > x.left {
		return 0, http.ErrContentLength
	}
	x.left -= int64(len(p))
	x.send(p, "")
	return len(p), x.failed
}

// crlf ends a chunk.
var crlf = []byte("\r\n")

// send writes p and end. Small pieces stay in the buffer until flush.
func (x *exchange) send(p []byte, end string) {
	if len(x.out.b)+len(p)+len(end) <= headSize {
		x.out.b = append(append(x.out.b, p...), end...)
		return
	}
	if x.failed != nil {
		return
	}
	x.extendDeadlines()
	all := net.Buffers{x.out.b, p, crlf[:len(end)]}
	_, x.failed = all.WriteTo(x.c)
	x.out.b = x.out.b[:0]
}

// extendDeadlines gives the client new time to take a piece of the answer and to send more of its
// request.
func (x *exchange) extendDeadlines() {
	if x.s.Write > 0 {
		_ = x.c.SetWriteDeadline(time.Now().Add(x.s.Write))
	}
	x.flows(true)
}

// flush writes the buffer to the connection.
func (x *exchange) flush() error {
	if x.failed == nil && len(x.out.b) > 0 {
		x.extendDeadlines()
		_, x.failed = x.c.Write(x.out.b)
	}
	x.out.b = x.out.b[:0]
	return x.failed
}

// FlushError flushes for http.ResponseController.
func (x *exchange) FlushError() error {
	if x.hijacked {
		return http.ErrHijacked
	}
	if !x.begun {
		x.WriteHeader(http.StatusOK)
	}
	return x.deliver()
}

// finish writes the end of the answer, or an empty answer.
func (x *exchange) finish() error {
	if !x.begun {
		if x.header["Content-Length"] == nil {
			x.header["Content-Length"] = []string{"0"}
		}
		x.WriteHeader(http.StatusOK)
	}
	if x.chunked {
		x.out.b = append(x.out.b, "0\r\n"...)
		for _, name := range x.announced() {
			x.trailer(name, x.header[name])
		}
		for name, values := range x.header {
			if name, ok := strings.CutPrefix(name, http.TrailerPrefix); ok {
				x.trailer(http.CanonicalHeaderKey(name), values)
			}
		}
		x.out.b = append(x.out.b, "\r\n"...)
	}
	if err := x.flush(); err != nil {
		return err
	}
	if x.bodied && x.left > 0 {
		return http.ErrContentLength // the client must see that the answer is incomplete
	}
	return nil
}

func (x *exchange) trailer(name string, values []string) {
	for _, value := range values {
		if token(name) && printable(value, ' ') {
			x.out.b = line(x.out.b, name, value)
		}
	}
}
