package safetensors

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
)

// dataAlign is the alignment of the data in a written file, in bytes: a cache line.
const dataAlign = 64

// Source is a tensor for Write.
type Source struct {
	Name  string
	Dtype Dtype
	Shape []int64
	Data  io.Reader // with as many bytes as dtype and shape need, little-endian and row by row
}

// Write writes a file. It orders the tensors by the size of their elements, largest first, and then
// by name. So each tensor is aligned, and the same tensors give the same bytes. Write holds only
// the header in memory. metadata may be nil.
func Write(w io.Writer, metadata map[string]string, tensors []Source) error {
	tensors = slices.SortedFunc(slices.Values(tensors), func(a, b Source) int {
		return cmp.Or(cmp.Compare(b.Dtype.Bits(), a.Dtype.Bits()), cmp.Compare(a.Name, b.Name))
	})
	header, sizes, err := header(metadata, tensors)
	if err != nil {
		return fmt.Errorf("safetensors: %w", err)
	}
	if _, err := w.Write(header); err != nil {
		return err
	}
	for i, t := range tensors {
		if _, err := io.CopyN(w, t.Data, sizes[i]); err != nil {
			return fmt.Errorf("safetensors: tensor %q: %w, want %d bytes", t.Name, err, sizes[i])
		}
		var more [1]byte
		if n, err := io.ReadFull(t.Data, more[:]); n > 0 || !errors.Is(err, io.EOF) {
			return fmt.Errorf("safetensors: tensor %q: more than the %d bytes that %s of shape %v needs (%w)", t.Name, sizes[i], t.Dtype, t.Shape, err)
		}
	}
	return nil
}

// header returns the part of a file before the data, and the sizes of the tensors in bytes.
func header(metadata map[string]string, tensors []Source) (head []byte, sizes []int64, err error) {
	b := bytes.NewBuffer(make([]byte, 8))
	b.WriteByte('{')
	if len(metadata) > 0 {
		fmt.Fprintf(b, `"__metadata__":%s,`, encode(metadata))
	}
	var at int64
	for _, t := range tensors {
		if t.Dtype.Bits() == 0 || t.Name == "__metadata__" {
			return nil, nil, fmt.Errorf("tensor %q: dtype %q, want a dtype of the format, and a name other than __metadata__", t.Name, t.Dtype)
		}
		if slices.ContainsFunc(t.Shape, func(n int64) bool { return n < 0 }) {
			return nil, nil, fmt.Errorf("tensor %q: shape %v, want dimensions of at least 0", t.Name, t.Shape)
		}
		bits, ok := t.Dtype.sizeOf(t.Shape, 8*maxFile)
		if !ok || bits%8 != 0 {
			return nil, nil, fmt.Errorf("tensor %q: %s of shape %v, want whole bytes, at most %d", t.Name, t.Dtype, t.Shape, int64(maxFile))
		}
		end := at + bits/8
		fmt.Fprintf(b, `%s:{"dtype":%q,"shape":%s,"data_offsets":[%d,%d]},`, encode(t.Name), t.Dtype, encode(append([]int64{}, t.Shape...)), at, end)
		sizes = append(sizes, end-at)
		at = end
	}
	head = append(bytes.TrimSuffix(b.Bytes(), []byte(",")), '}')
	for len(head)%dataAlign != 0 {
		head = append(head, ' ')
	}
	binary.LittleEndian.PutUint64(head, uint64(len(head)-8))
	// A written file must be readable. Read finds duplicate names, text that is not UTF-8, and values
	// above the limits.
	if _, err := Read(bytes.NewReader(head), int64(len(head))+at); err != nil {
		return nil, nil, err
	}
	return head, sizes, nil
}

// encode returns a string, list or object as JSON.
func encode(v any) []byte {
	b, _ := json.Marshal(v) // these types can always be encoded
	return b
}
