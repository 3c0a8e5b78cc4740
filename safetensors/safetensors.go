package safetensors

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/stagecoach-serving/stagecoach/tensor"
)

// maxHeader is the longest header in bytes that the format allows.
const maxHeader = 100_000_000

// File is a file whose header has been read. Its methods may be called by several goroutines if its reader's may.
type File struct {
	r       io.ReaderAt
	base    int64 // where the data begins
	tensors map[string]place
}

// place is where a tensor lies within the data.
type place struct {
	datatype   tensor.Datatype
	shape      []int64
	begin, end int64
}

// entry is a tensor in the header.
type entry struct {
	Dtype   string   `json:"dtype"`
	Shape   []int64  `json:"shape"`
	Offsets [2]int64 `json:"data_offsets"`
}

// Read reads the header of a file of size bytes. Together its tensors must fill the data, without holes and overlaps.
func Read(r io.ReaderAt, size int64) (*File, error) {
	var length [8]byte
	if size < int64(len(length)) {
		return nil, fmt.Errorf("safetensors: %d bytes, want at least the 8 of the header's length", size)
	}
	if _, err := r.ReadAt(length[:], 0); err != nil {
		return nil, fmt.Errorf("safetensors: header's length: %w", err)
	}
	n := binary.LittleEndian.Uint64(length[:])
	if n > uint64(min(size-8, maxHeader)) {
		return nil, fmt.Errorf("safetensors: a header of %d bytes, want at most %d and no more than the file of %d bytes has", n, maxHeader, size)
	}
	header := make([]byte, n)
	if _, err := r.ReadAt(header, 8); err != nil {
		return nil, fmt.Errorf("safetensors: header: %w", err)
	}
	f := &File{r: r, base: 8 + int64(n)}
	var err error
	if f.tensors, err = parse(header); err == nil {
		err = f.check(size - f.base)
	}
	if err != nil {
		return nil, fmt.Errorf("safetensors: header: %w", err)
	}
	return f, nil
}

// parse reads the header, token by token: encoding/json would let a name that comes twice pass.
func parse(header []byte) (map[string]place, error) {
	d := json.NewDecoder(bytes.NewReader(header))
	d.DisallowUnknownFields()
	if open, err := d.Token(); err != nil || open != json.Delim('{') {
		return nil, fmt.Errorf("%.40q, want a JSON object", header)
	}
	all := map[string]place{}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return nil, err
		}
		name, _ := key.(string) // a key of an object is one
		if name == "__metadata__" {
			if err := d.Decode(&map[string]string{}); err != nil {
				return nil, fmt.Errorf("__metadata__: %w", err)
			}
			continue
		}
		if _, twice := all[name]; twice {
			return nil, fmt.Errorf("tensor %q: it is there twice", name)
		}
		var e entry
		if err := d.Decode(&e); err != nil {
			return nil, fmt.Errorf("tensor %q: %w", name, err)
		}
		datatype, ok := datatypeOf(e.Dtype)
		if !ok {
			return nil, fmt.Errorf("tensor %q: dtype %q, want one of BOOL, U8 … U64, I8 … I64, F16, BF16, F32, F64", name, e.Dtype)
		}
		all[name] = place{datatype, e.Shape, e.Offsets[0], e.Offsets[1]}
	}
	if _, err := d.Token(); err != nil { // the closing brace
		return nil, err
	}
	if rest := bytes.TrimRight(header[d.InputOffset():], " "); len(rest) > 0 {
		return nil, fmt.Errorf("%.40q behind its end, want spaces or nothing", rest)
	}
	return all, nil
}

// datatypeOf translates a datatype into the name that the rest of the program has for it.
func datatypeOf(dtype string) (tensor.Datatype, bool) {
	switch dtype {
	case "BOOL", "BF16":
		return tensor.Datatype(dtype), true
	case "U8", "U16", "U32", "U64":
		return tensor.Datatype("UINT" + dtype[1:]), true
	case "I8", "I16", "I32", "I64":
		return tensor.Datatype("INT" + dtype[1:]), true
	case "F16", "F32", "F64":
		return tensor.Datatype("FP" + dtype[1:]), true
	}
	return "", false
}

// check wants the tensors to lie one behind the other from the data's first byte to its last, each with as many bytes as its
// shape needs.
func (f *File) check(size int64) error {
	byPlace := slices.SortedFunc(maps.Keys(f.tensors), func(a, b string) int {
		x, y := f.tensors[a], f.tensors[b]
		return cmp.Or(cmp.Compare(x.begin, y.begin), cmp.Compare(x.end, y.end), cmp.Compare(a, b))
	})
	var at int64
	for _, name := range byPlace {
		p := f.tensors[name]
		if p.begin != at || p.end < p.begin || p.end > size {
			return fmt.Errorf("tensor %q: data_offsets [%d,%d], want a begin of %d, where the one before it ends, and an end of at most %d", name, p.begin, p.end, at, size)
		}
		want := int64(p.datatype.Size())
		for _, d := range p.shape {
			if d < 0 || d > 0 && want > size/d {
				return fmt.Errorf("tensor %q: shape %v, want dimensions of at least 0 and no more than its data of %d bytes holds", name, p.shape, p.end-p.begin)
			}
			want *= d
		}
		if want != p.end-p.begin {
			return fmt.Errorf("tensor %q: %d bytes of data, want %d for %s %v", name, p.end-p.begin, want, p.datatype, p.shape)
		}
		at = p.end
	}
	if at != size {
		return fmt.Errorf("%d bytes of data belong to no tensor, want all %d to belong to one", size-at, size)
	}
	return nil
}

// Names returns the tensors' names, sorted.
func (f *File) Names() []string { return slices.Sorted(maps.Keys(f.tensors)) }

// Tensor reads a tensor.
func (f *File) Tensor(name string) (tensor.Tensor, error) {
	p, ok := f.tensors[name]
	if !ok {
		return tensor.Tensor{}, fmt.Errorf("safetensors: no tensor %q among the %d of the file", name, len(f.tensors))
	}
	t := tensor.Tensor{Name: name, Datatype: p.datatype, Shape: slices.Clone(p.shape), Data: make([]byte, p.end-p.begin)}
	if len(t.Data) == 0 {
		return t, nil
	}
	if _, err := f.r.ReadAt(t.Data, f.base+p.begin); err != nil {
		return tensor.Tensor{}, fmt.Errorf("safetensors: tensor %q: %w", name, err)
	}
	return t, nil
}
