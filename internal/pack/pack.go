// Package pack is the binary encoding below packages tensor and wire: varints and length-prefixed
// bytes. Encoding appends to a slice. A [Reader] checks bounds and keeps its first fault, so a
// decoder can read all fields and check for a fault once.
package pack

import (
	"encoding/binary"
	"fmt"
)

// Bytes appends the length of p, then p.
func Bytes(b, p []byte) []byte { return append(binary.AppendUvarint(b, uint64(len(p))), p...) }

// String appends the length of s, then s.
func String(b []byte, s string) []byte { return append(binary.AppendUvarint(b, uint64(len(s))), s...) }

// Uint appends an unsigned varint.
func Uint(b []byte, v uint64) []byte { return binary.AppendUvarint(b, v) }

// Int appends a signed varint.
func Int(b []byte, v int64) []byte { return binary.AppendVarint(b, v) }

// Reader decodes what the functions above appended. Its results alias its buffer. After a fault it
// returns zero values.
type Reader struct {
	b   []byte
	off int
	err error
}

// NewReader returns a Reader over b.
func NewReader(b []byte) *Reader { return &Reader{b: b} }

// Left returns the number of unread bytes.
func (r *Reader) Left() int { return len(r.b) - r.off }

// Err returns the first fault.
func (r *Reader) Err() error { return r.err }

// End returns the first fault, or an error if bytes are left over.
func (r *Reader) End() error {
	if r.err == nil && r.Left() > 0 {
		r.Fail("%d bytes left over, want the end", r.Left())
	}
	return r.err
}

// Fail records a fault at the current offset, unless there is one already.
func (r *Reader) Fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("at byte %d of %d: %s", r.off, len(r.b), fmt.Sprintf(format, args...))
	}
}

// Byte reads one byte.
func (r *Reader) Byte() byte {
	if p := r.Take(1); p != nil {
		return p[0]
	}
	return 0
}

// Uint reads an unsigned varint.
func (r *Reader) Uint() uint64 {
	if r.err != nil {
		return 0
	}
	v, n := binary.Uvarint(r.b[r.off:])
	if n <= 0 {
		r.Fail("no varint, want one of at most 10 bytes")
		return 0
	}
	r.off += n
	return v
}

// Int reads a signed varint.
func (r *Reader) Int() int64 {
	if r.err != nil {
		return 0
	}
	v, n := binary.Varint(r.b[r.off:])
	if n <= 0 {
		r.Fail("no varint, want one of at most 10 bytes")
		return 0
	}
	r.off += n
	return v
}

// Count reads the number of elements that follow, each of at least size bytes. So a hostile count
// cannot make the caller allocate more than the message has.
func (r *Reader) Count(size int) int {
	n := r.Uint()
	if n > uint64(r.Left()/max(size, 1)) {
		r.Fail("%d elements of at least %d bytes, want no more than the %d bytes left can hold", n, size, r.Left())
		return 0
	}
	return int(n)
}

// Bytes reads length-prefixed bytes. It returns nil if there are none.
func (r *Reader) Bytes() []byte {
	n := r.Count(1)
	if n == 0 {
		return nil
	}
	return r.Take(n)
}

// String reads a length-prefixed string.
func (r *Reader) String() string { return string(r.Bytes()) }

// Take reads n bytes.
func (r *Reader) Take(n int) []byte {
	if r.err != nil {
		return nil
	}
	if n < 0 || n > r.Left() {
		r.Fail("%d bytes wanted, %d left", n, r.Left())
		return nil
	}
	p := r.b[r.off : r.off+n : r.off+n]
	r.off += n
	return p
}
