package gateway

import (
	"bytes"
	"strconv"
)

// framing follows where the requests on one HTTP/1 connection begin and end. It refuses what two servers could read in two
// ways (RFC 9112, 11.2), where net/http only repairs it: a length beside a coding, two of either, a coding that is not chunked,
// folded lines, lines that end without CR. What else is wrong with a request it leaves to net/http, which closes the connection.
type framing struct {
	state state
	line  []byte // the beginning of a line whose end has not come, at most maxLine
	left  int64  // of the body or chunk, in bytes

	length, chunked bool // what the head has said so far
	old             bool // it is of HTTP/1.0, which has no codings
}

// state is what comes next on a connection.
type state uint8

const (
	startLine state = iota
	headLine
	bodyData
	chunkLine
	chunkData
	chunkEnd
	trailerLine
)

// maxLine bounds in bytes what is kept of a line that comes in pieces.
const maxLine = 256

// pass returns how many bytes of b may be read on, and whether those after them are bad.
func (f *framing) pass(b []byte) (n int, bad bool) {
	for n < len(b) {
		if f.state == bodyData || f.state == chunkData {
			k := min(f.left, int64(len(b)-n))
			n += int(k)
			if f.left -= k; f.left == 0 {
				f.state = f.state.after()
			}
			continue
		}
		i := bytes.IndexByte(b[n:], '\n')
		if i < 0 {
			f.keep(b[n:])
			return len(b), false
		}
		line := b[n : n+i+1]
		if len(f.line) > 0 {
			f.keep(line)
			line = f.line
		}
		if !f.take(line) {
			return n, true
		}
		f.line = f.line[:0]
		n += i + 1
	}
	return n, false
}

// after is what comes after the data of a body or chunk.
func (s state) after() state {
	if s == chunkData {
		return chunkEnd
	}
	return startLine
}

// tail is how many bytes of a line's end are kept, whatever its length: enough for the version.
const tail = 16

// keep adds a piece of a line. Of one that is too long, what is before the tail goes.
func (f *framing) keep(b []byte) {
	k := min(len(b), maxLine-len(f.line))
	f.line = append(f.line, b[:k]...)
	if b = b[max(k, len(b)-tail):]; len(b) > 0 {
		end := f.line[maxLine-tail:]
		copy(end, end[len(b):])
		copy(end[tail-len(b):], b)
	}
}

// take reads a line; false: it is bad.
func (f *framing) take(line []byte) bool {
	if len(line) < 2 || line[len(line)-2] != '\r' {
		return false
	}
	whole := len(line) < maxLine
	line = line[:len(line)-2]
	switch f.state {
	case startLine:
		if len(line) > 0 { // net/http bears an empty line after a POST
			f.state, f.length, f.chunked, f.left = headLine, false, false, 0
			f.old = !bytes.HasSuffix(line, []byte(" HTTP/1.1"))
		}
	case headLine, trailerLine:
		switch {
		case len(line) == 0:
			return f.end()
		case line[0] == ' ' || line[0] == '\t':
			return false
		case f.state == headLine:
			return f.field(line, whole)
		}
	case chunkLine:
		size, _, _ := bytes.Cut(line, []byte(";"))
		n, err := strconv.ParseUint(string(bytes.TrimRight(size, " \t")), 16, 63)
		if err != nil || !whole {
			return false
		}
		f.left, f.state = int64(n), chunkData
		if n == 0 {
			f.state = trailerLine
		}
	case chunkEnd:
		if len(line) > 0 {
			return false
		}
		f.state = chunkLine
	}
	return true
}

// field reads a header.
func (f *framing) field(line []byte, whole bool) bool {
	name, value, _ := bytes.Cut(line, []byte(":"))
	switch len(name) {
	case len("Content-Length"):
		if !bytes.EqualFold(name, []byte("Content-Length")) {
			return true
		}
		if f.length {
			return false
		}
		f.length = true
		n, err := strconv.ParseUint(string(bytes.Trim(value, " \t")), 10, 63) // takes no sign
		if err != nil || !whole {
			return false
		}
		f.left = int64(n)
	case len("Transfer-Encoding"):
		if !bytes.EqualFold(name, []byte("Transfer-Encoding")) {
			return true
		}
		if f.chunked || f.old || !whole || !bytes.EqualFold(bytes.Trim(value, " \t"), []byte("chunked")) {
			return false
		}
		f.chunked = true
	}
	return true
}

// end reads the empty line after a head or a trailer.
func (f *framing) end() bool {
	switch {
	case f.state == trailerLine:
		f.state = startLine
	case f.chunked && f.length:
		return false
	case f.chunked:
		f.state = chunkLine
	case f.left > 0:
		f.state = bodyData
	default:
		f.state = startLine
	}
	return true
}
