package gateway

import (
	"bytes"
	"strconv"
)

// framing tracks where requests begin and end on one HTTP/1 connection. It refuses requests that
// net/http would repair and that another server could read differently (RFC 9112, section 11.2):
//
//   - a length together with a transfer coding, or more than one of either
//   - a coding other than chunked
//   - folded lines, and lines that end without CR
//
// All other faults are left to net/http, which closes the connection.
type framing struct {
	state state
	line  []byte // start of an unfinished line, at most maxLine bytes
	left  int64  // bytes left of the body or chunk

	length, chunked bool // what the current head has declared
	old             bool // HTTP/1.0, which has no transfer codings
}

// state is what the connection carries next.
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

// maxLine is the largest number of bytes kept of a line that arrives in pieces.
const maxLine = 256

// pass returns how many bytes of b the server may read, and whether the bytes after them are bad.
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

// after returns the state that follows the data of a body or chunk.
func (s state) after() state {
	if s == chunkData {
		return chunkEnd
	}
	return startLine
}

// tail is how many bytes of the end of a long line are kept: enough for the HTTP version.
const tail = 16

// keep adds a piece of a line. If the line is too long, only the beginning and the last tail bytes
// are kept.
func (f *framing) keep(b []byte) {
	k := min(len(b), maxLine-len(f.line))
	f.line = append(f.line, b[:k]...)
	if b = b[max(k, len(b)-tail):]; len(b) > 0 {
		end := f.line[maxLine-tail:]
		copy(end, end[len(b):])
		copy(end[tail-len(b):], b)
	}
}

// take reads a complete line and returns false if it is bad.
func (f *framing) take(line []byte) bool {
	if len(line) < 2 || line[len(line)-2] != '\r' {
		return false
	}
	whole := len(line) < maxLine
	line = line[:len(line)-2]
	switch f.state {
	case startLine:
		if len(line) > 0 { // net/http allows an empty line after a POST
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

// field reads a header field.
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
		// ParseUint accepts no sign.
		n, err := strconv.ParseUint(string(bytes.Trim(value, " \t")), 10, 63)
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

// end reads the empty line that ends a head or a trailer.
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
