package tensor

import (
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"strconv"
	"sync"

	"github.com/stagecoach-serving/stagecoach/internal/pack"
)

// Parsed reports whether [ItemsFromHTTP] parses bodies of this content type. Other bodies are one
// item, whatever they contain.
func Parsed(contentType string) bool { return isJSON(contentType) }

// Stream stores an item of bytes while they arrive, until r ends. It wraps errors of r.
func (d *Dir) Stream(name, contentType string, r io.Reader) (Ref, error) {
	if contentType == "" {
		contentType = binaryType
	}
	ref := Ref{Owner: name, Blob: strconv.FormatUint(d.next.Add(1), 36)}
	head := pack.String([]byte{kindBytes}, contentType)
	ref.Size = int64(len(head)) + binary.MaxVarintLen64
	o, err := d.reserve(ref)
	if err != nil {
		return Ref{}, err
	}
	if err := d.finish(&ref, o, d.stream(&ref, o, head, r)); err != nil {
		return Ref{}, err
	}
	return ref, nil
}

// streamBuffers has large buffers, because each piece costs a read, a write and a deadline.
var streamBuffers = sync.Pool{New: func() any { b := make([]byte, 256<<10); return &b }}

// stream writes the file. It leaves room for the length at the start, because the length is known
// last.
func (d *Dir) stream(ref *Ref, o *owner, head []byte, r io.Reader) error {
	f, err := d.create(*ref)
	if err != nil {
		return err
	}
	defer f.Close() // nobody has read the file yet, and writes have reported lost data
	start := ref.Size
	if _, err := f.Seek(start, io.SeekStart); err != nil {
		return err
	}
	buffer := streamBuffers.Get().(*[]byte)
	defer streamBuffers.Put(buffer)
	if _, err := io.CopyBuffer(&growing{d, ref, o, f}, r, *buffer); err != nil {
		return err
	}
	n := uint64(ref.Size - start)
	for range binary.MaxVarintLen64 - 1 { // a length with a fixed number of bytes
		head = append(head, byte(n)|0x80)
		n >>= 7
	}
	_, err = f.WriteAt(append(head, byte(n)), 0)
	return err
}

// growing is a blob that reserves room as it grows.
type growing struct {
	d   *Dir
	ref *Ref
	o   *owner
	f   *os.File
}

// Write implements io.Writer.
func (g *growing) Write(b []byte) (int, error) {
	d := g.d
	d.mu.Lock()
	switch n := int64(len(b)); {
	case g.o.dropped:
		d.mu.Unlock()
		return 0, ErrDropped
	case n > d.limit-d.used:
		err := fmt.Errorf("item of at least %d bytes, %d of %d in use: %w", g.ref.Size+n, d.used, d.limit, ErrFull)
		d.mu.Unlock()
		return 0, err
	default:
		g.ref.Size += n
		g.o.bytes += n
		d.used += n
	}
	d.mu.Unlock()
	return g.f.Write(b)
}
