package tensor

import (
	"fmt"
	"strings"

	"github.com/stagecoach-serving/stagecoach/internal/pack"
)

// The first byte of an encoded item.
const (
	kindBytes   = 0
	kindTensors = 1
	kindRef     = 2
	kindKept    = 3 // a reference to an item that a node keeps
)

// AppendItem appends the binary form of the item to b.
func AppendItem(b []byte, it Item) []byte {
	switch {
	case it.Ref != nil:
		return appendRef(b, it.Ref)
	case it.Tensors != nil:
		b = append(b, kindTensors)
		b = pack.Uint(b, uint64(len(it.Tensors)))
		for _, t := range it.Tensors {
			b = appendTensor(b, t)
		}
		return b
	default:
		b = append(b, kindBytes)
		b = pack.String(b, it.ContentType)
		return pack.Bytes(b, it.Bytes)
	}
}

func appendRef(b []byte, ref *Ref) []byte {
	kept := ref.Node != ""
	if kept {
		b = append(b, kindKept)
	} else {
		b = append(b, kindRef)
	}
	b = pack.String(b, ref.Owner)
	b = pack.String(b, ref.Blob)
	b = pack.Uint(b, uint64(ref.Size))
	if kept {
		b = pack.String(b, ref.Node)
		b = pack.String(b, ref.Address)
		b = pack.Uint(b, ref.Sum)
	}
	return b
}

// readRef decodes a reference after its kind.
func readRef(r *pack.Reader, kind byte) *Ref {
	ref := &Ref{Owner: r.String(), Blob: r.String(), Size: int64(r.Uint() &^ (1 << 63))}
	if kind == kindKept {
		if ref.Keeper = (Keeper{Node: r.String(), Address: r.String(), Sum: r.Uint()}); ref.Node == "" {
			r.Fail("a reference to an item of a node without a name")
		}
	}
	return ref
}

func appendTensor(b []byte, t Tensor) []byte {
	b = pack.String(b, t.Name)
	b = pack.String(b, string(t.Datatype))
	b = pack.Uint(b, uint64(len(t.Shape)))
	for _, d := range t.Shape {
		b = pack.Uint(b, uint64(d))
	}
	return pack.Bytes(b, t.Data)
}

// DecodeItem decodes all of b as one item. The item aliases b.
func DecodeItem(b []byte) (Item, error) {
	r := pack.NewReader(b)
	it := ReadItem(r)
	return it, wrap("item", r.End())
}

// AppendActivation appends the binary form of the activation to b.
func AppendActivation(b []byte, a Activation) []byte {
	b = pack.Uint(b, uint64(len(a)))
	for _, it := range a {
		b = AppendItem(b, it)
	}
	return b
}

// DecodeActivation decodes all of b as an activation, which aliases b.
func DecodeActivation(b []byte) (Activation, error) {
	r := pack.NewReader(b)
	a := ReadActivation(r)
	return a, wrap("activation", r.End())
}

// AppendInput appends the binary form of the input to b.
func AppendInput(b []byte, in Input) []byte {
	b = pack.Uint(b, uint64(len(in)))
	for _, p := range in {
		b = pack.String(b, p.From)
		b = AppendActivation(b, p.Items)
	}
	return b
}

// ReadItem decodes an item within a larger message.
func ReadItem(r *pack.Reader) Item {
	switch kind := r.Byte(); kind {
	case kindBytes:
		return Item{ContentType: contentType(r.Bytes()), Bytes: r.Bytes()}
	case kindTensors:
		ts := make([]Tensor, r.Count(4))
		for i := range ts {
			ts[i] = readTensor(r)
		}
		return Item{Tensors: ts}
	case kindRef, kindKept:
		return Item{Ref: readRef(r, kind)}
	default:
		r.Fail("item of kind %d, want %d to %d", kind, kindBytes, kindKept)
		return Item{}
	}
}

func readTensor(r *pack.Reader) Tensor {
	t := Tensor{Name: r.String(), Datatype: Datatype(r.String())}
	if n := r.Count(1); n > 0 {
		t.Shape = make([]int64, n)
		for i := range t.Shape {
			t.Shape[i] = int64(r.Uint() &^ (1 << 63))
		}
	}
	t.Data = r.Bytes()
	return t
}

// contentType returns the content type as a string, without an allocation for usual ones.
func contentType(b []byte) string {
	switch string(b) {
	case "application/octet-stream":
		return "application/octet-stream"
	case "application/json":
		return "application/json"
	case "text/plain":
		return "text/plain"
	}
	return string(b)
}

// ReadActivation decodes an activation within a larger message.
func ReadActivation(r *pack.Reader) Activation {
	n := r.Count(2)
	if n == 0 {
		return nil
	}
	a := make(Activation, n)
	for i := range a {
		a[i] = ReadItem(r)
	}
	return a
}

// ReadInput decodes an input within a larger message.
func ReadInput(r *pack.Reader) Input {
	n := r.Count(2)
	if n == 0 {
		return nil
	}
	in := make(Input, n)
	for i := range in {
		in[i] = Part{From: r.String(), Items: ReadActivation(r)}
	}
	return in
}

func wrap(what string, err error) error {
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// Size returns the bytes per element. It returns 0 for BYTES, whose elements differ in size, and
// for unknown datatypes.
func (d Datatype) Size() int {
	switch d {
	case "BOOL", "UINT8", "INT8":
		return 1
	case "UINT16", "INT16", "FP16", "BF16":
		return 2
	case "UINT32", "INT32", "FP32":
		return 4
	case "UINT64", "INT64", "FP64":
		return 8
	}
	return 0
}

// Validate checks that the data fits shape and datatype.
func (t Tensor) Validate() error {
	if t.Datatype != "BYTES" && t.Datatype.Size() == 0 {
		return fmt.Errorf("tensor %q: datatype %q, want one of %s", t.Name, t.Datatype, datatypes)
	}
	n, ok := elementsIn(t.Shape)
	if !ok {
		return fmt.Errorf("tensor %q: shape %v, want %s", t.Name, t.Shape, shapeWant)
	}
	if t.Datatype == "BYTES" {
		return t.validateBytes(n)
	}
	if want := n * int64(t.Datatype.Size()); int64(len(t.Data)) != want {
		return fmt.Errorf("tensor %q: %d bytes of data, want %d for %s%s", t.Name, len(t.Data), want, t.Datatype, strings.ReplaceAll(fmt.Sprint(t.Shape), " ", ","))
	}
	return nil
}

// Words for messages.
const (
	datatypes = "BOOL, UINT8 … UINT64, INT8 … INT64, FP16, BF16, FP32, FP64, BYTES"
	shapeWant = "dimensions of at least 0 and at most 2^40 elements"
)

// elementsIn returns the number of elements of a shape, or false if the shape is invalid or too
// large.
func elementsIn(shape []int64) (n int64, ok bool) {
	n = 1
	for _, d := range shape {
		if d < 0 || d > 0 && n > 1<<40/d {
			return 0, false
		}
		n *= d
	}
	return n, true
}

func (t Tensor) validateBytes(n int64) error {
	elements, err := t.elements()
	if err != nil {
		return err
	}
	if int64(len(elements)) != n {
		return fmt.Errorf("tensor %q: %d elements of BYTES, want %d for shape %v", t.Name, len(elements), n, t.Shape)
	}
	return nil
}

// elements splits the data of a BYTES tensor.
func (t Tensor) elements() ([][]byte, error) {
	var out [][]byte
	for b := t.Data; len(b) > 0; {
		if len(b) < 4 {
			return nil, fmt.Errorf("tensor %q: %d bytes at its end, want a length of 4 bytes", t.Name, len(b))
		}
		n := int(b[0]) | int(b[1])<<8 | int(b[2])<<16 | int(b[3])<<24
		if n > len(b)-4 {
			return nil, fmt.Errorf("tensor %q: an element of %d bytes with %d left", t.Name, n, len(b)-4)
		}
		out = append(out, b[4:4+n])
		b = b[4+n:]
	}
	return out, nil
}
