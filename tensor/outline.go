package tensor

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
)

// Outline describes an item without its content.
type Outline struct {
	ContentType string   // of an item of bytes
	Bytes       int64    // of the content: of the byte string, or of the data of all tensors
	Tensors     []Tensor // Data may be missing; nil: an item of bytes
}

// Outline describes an item that is no reference. It shares the item's tensors, with their data.
func (it *Item) Outline() Outline {
	o := Outline{ContentType: it.ContentType, Bytes: int64(len(it.Bytes)), Tensors: it.Tensors}
	for i := range it.Tensors {
		o.Bytes += int64(len(it.Tensors[i].Data))
	}
	return o
}

// opener is a Store whose items can be read in part; [Dir] is one.
type opener interface {
	Open(ref Ref) (*os.File, error)
}

// Outlines describes items. It reads no content of items in s if s is a [Dir], apart from a few
// bytes around each tensor.
func Outlines(s Store, a Activation) ([]Outline, error) {
	out := make([]Outline, len(a))
	for i := range a {
		if a[i].Ref == nil {
			out[i] = a[i].Outline()
			continue
		}
		var err error
		if out[i], err = storedOutline(s, *a[i].Ref); err != nil {
			return nil, fmt.Errorf("item %d: %w", i, err)
		}
	}
	return out, nil
}

func storedOutline(s Store, ref Ref) (Outline, error) {
	if files, ok := s.(opener); ok {
		f, err := files.Open(ref)
		if err != nil {
			return Outline{}, err
		}
		o, err := readOutline(f, ref.Size)
		return o, errors.Join(err, f.Close())
	}
	b, err := s.Get(ref)
	if err != nil {
		return Outline{}, err
	}
	it, err := DecodeItem(b)
	if err != nil {
		return Outline{}, err
	}
	return it.Outline(), nil
}

// readOutline reads the outline of an encoded item of size bytes, see [AppendItem].
func readOutline(r io.ReaderAt, size int64) (o Outline, err error) {
	c := &cursor{r: r, size: size}
	switch kind := c.take(1); {
	case c.err != nil:
	case kind[0] == kindBytes:
		o.ContentType = c.text()
		o.Bytes = c.skip()
	case kind[0] == kindTensors:
		n := c.uint()
		o.Tensors = make([]Tensor, 0, min(n, 16))
		for ; n > 0 && c.err == nil; n-- {
			t := Tensor{Name: c.text(), Datatype: Datatype(c.text())}
			for d := c.uint(); d > 0 && c.err == nil; d-- {
				t.Shape = append(t.Shape, int64(c.uint()&^(1<<63)))
			}
			o.Bytes += c.skip()
			o.Tensors = append(o.Tensors, t)
		}
	default:
		return o, fmt.Errorf("item of kind %d, want %d or %d", kind[0], kindBytes, kindTensors)
	}
	if c.err != nil {
		return Outline{}, fmt.Errorf("encoded item of %d bytes, at %d: %w", size, c.at, c.err)
	}
	return o, nil
}

// cursor reads parts of an encoded item. After its first error, it returns zeros.
type cursor struct {
	r    io.ReaderAt
	size int64
	at   int64
	err  error
}

// take returns the next n bytes.
func (c *cursor) take(n int64) []byte {
	if c.err == nil && (n < 0 || n > c.size-c.at) {
		c.err = io.ErrUnexpectedEOF
	}
	if c.err != nil {
		return nil
	}
	b := make([]byte, n)
	if _, err := c.r.ReadAt(b, c.at); err != nil {
		c.err = err
		return nil
	}
	c.at += n
	return b
}

// uint returns the next number.
func (c *cursor) uint() uint64 {
	if c.err != nil {
		return 0
	}
	var b [binary.MaxVarintLen64]byte
	n, err := c.r.ReadAt(b[:min(int64(len(b)), c.size-c.at)], c.at)
	if err != nil && !errors.Is(err, io.EOF) {
		c.err = err
		return 0
	}
	v, used := binary.Uvarint(b[:n])
	if used <= 0 {
		c.err = io.ErrUnexpectedEOF
		return 0
	}
	c.at += int64(used)
	return v
}

// text returns the next string. Names and types are short.
func (c *cursor) text() string {
	const longest = 64 << 10
	n := c.uint()
	if n > longest {
		c.err = fmt.Errorf("name of %d bytes, want at most %d", n, longest)
		return ""
	}
	return string(c.take(int64(n)))
}

// skip passes over the next byte string and returns its length.
func (c *cursor) skip() int64 {
	n := c.uint()
	if c.err == nil && n > uint64(c.size-c.at) {
		c.err = io.ErrUnexpectedEOF
	}
	if c.err != nil {
		return 0
	}
	c.at += int64(n)
	return int64(n)
}
