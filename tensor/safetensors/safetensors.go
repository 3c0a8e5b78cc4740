package safetensors

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"io"
	"slices"

	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Limits of a file. The format itself has only the first.
const (
	maxHeader  = 100_000_000 // bytes, per file and per model
	maxTensors = 1 << 18     // per file and per model; also of entries in a file's metadata
	maxRank    = 64          // dimensions; no library has more
	maxFile    = 1 << 56     // bytes
)

// Info is a tensor's description in the header.
type Info struct {
	Name   string
	Dtype  Dtype
	Shape  []int64
	Offset int64 // offset of its first byte in the file
	Bytes  int64
}

// File is a file whose header has been read. Its methods are safe for concurrent use if its reader
// is.
type File struct {
	r        io.ReaderAt
	tensors  []Info // by their places in the file
	byName   map[string]int
	metadata map[string]string
}

// Read reads the header of a file. size is the file's size in bytes. The tensors must fill the data
// without holes or overlaps.
func Read(r io.ReaderAt, size int64) (*File, error) {
	var length [8]byte
	if size < int64(len(length)) || size > maxFile {
		return nil, fmt.Errorf("safetensors: %d bytes, want at least the 8 of the header's length, and at most %d", size, int64(maxFile))
	}
	if n, err := r.ReadAt(length[:], 0); n < len(length) {
		return nil, fmt.Errorf("safetensors: header's length: %w", err)
	}
	n := binary.LittleEndian.Uint64(length[:])
	// Do not report the number: a file of another format begins with other data.
	if n > maxFile {
		return nil, fmt.Errorf("safetensors: its first 8 bytes are no header's length; want a safetensors file")
	}
	if n > uint64(min(size-8, maxHeader)) {
		return nil, fmt.Errorf("safetensors: a header of %d bytes, want at most %d and no more than the file of %d bytes has", n, maxHeader, size)
	}
	header := make([]byte, n)
	if got, err := r.ReadAt(header, 8); got < len(header) {
		return nil, fmt.Errorf("safetensors: header: %w", err)
	}
	f := &File{r: r}
	var err error
	if f.tensors, f.metadata, err = parse(header); err == nil {
		err = f.check(8+int64(n), size)
	}
	if err != nil {
		return nil, fmt.Errorf("safetensors: header: %w", err)
	}
	return f, nil
}

// check checks that the tensors follow each other from the first byte of the data to the last, and
// that each has as many bytes as its shape needs. It changes their offsets from offsets in the data
// to offsets in the file.
func (f *File) check(base, size int64) error {
	slices.SortFunc(f.tensors, func(a, b Info) int {
		return cmp.Or(cmp.Compare(a.Offset, b.Offset), cmp.Compare(a.Bytes, b.Bytes), cmp.Compare(a.Name, b.Name))
	})
	f.byName = make(map[string]int, len(f.tensors))
	size -= base
	var at int64
	for i, t := range f.tensors {
		if t.Offset != at || t.Bytes < 0 || t.Bytes > size-at {
			return fmt.Errorf("tensor %.80q: data_offsets [%d,%d], want a begin of %d, where the one before it ends, and an end of at most %d",
				t.Name, t.Offset, t.Offset+t.Bytes, at, size)
		}
		bits, ok := t.Dtype.sizeOf(t.Shape, 8*size)
		if !ok {
			return fmt.Errorf("tensor %.80q: %s of shape %v, want one that fits into the %d bytes of data", t.Name, t.Dtype, t.Shape, size)
		}
		if bits%8 != 0 {
			return fmt.Errorf("tensor %.80q: %s of shape %v, which has %d bits, want whole bytes", t.Name, t.Dtype, t.Shape, bits)
		}
		if bits != 8*t.Bytes {
			return fmt.Errorf("tensor %.80q: %d bytes of data, want %d for %s of shape %v", t.Name, t.Bytes, bits/8, t.Dtype, t.Shape)
		}
		f.byName[t.Name] = i
		f.tensors[i].Offset += base
		at += t.Bytes
	}
	if at != size {
		return fmt.Errorf("%d bytes of data belong to no tensor, want all %d to belong to one", size-at, size)
	}
	return nil
}

// sizeOf returns the size of a tensor of this shape in bits. It returns false if that is more than
// limit.
func (d Dtype) sizeOf(shape []int64, limit int64) (bits int64, ok bool) {
	if slices.Contains(shape, 0) {
		return 0, true
	}
	bits = int64(d.Bits())
	for _, n := range shape {
		if bits > limit/n {
			return 0, false
		}
		bits *= n
	}
	return bits, true
}

// Tensors returns the tensors in the order of their places in the file. The caller must not change
// them.
func (f *File) Tensors() []Info { return f.tensors }

// Metadata returns the file's metadata, or nil if it has none. The caller must not change it.
func (f *File) Metadata() map[string]string { return f.metadata }

// Info returns the description of a tensor.
func (f *File) Info(name string) (Info, error) {
	i, ok := f.byName[name]
	if !ok {
		return Info{}, fmt.Errorf("safetensors: no tensor %q among the %d of the file", name, len(f.tensors))
	}
	return f.tensors[i], nil
}

// Tensor reads a tensor. A datatype that cannot be sent to a stage, such as F8_E4M3, is an error.
func (f *File) Tensor(name string) (tensor.Tensor, error) {
	i, err := f.Info(name)
	if err != nil {
		return tensor.Tensor{}, err
	}
	datatype, ok := i.Dtype.Datatype()
	if !ok {
		return tensor.Tensor{}, fmt.Errorf("safetensors: tensor %q: dtype %s, want one of BOOL, U8 … U64, I8 … I64, F16, BF16, F32, F64", name, i.Dtype)
	}
	t := tensor.Tensor{Name: name, Datatype: datatype, Shape: slices.Clone(i.Shape), Data: make([]byte, i.Bytes)}
	if len(t.Data) == 0 {
		return t, nil
	}
	if n, err := f.r.ReadAt(t.Data, i.Offset); n < len(t.Data) {
		return tensor.Tensor{}, fmt.Errorf("safetensors: tensor %q: %w", name, err)
	}
	return t, nil
}
