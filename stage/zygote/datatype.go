package zygote

import (
	"fmt"
	"slices"
	"strings"
	"unsafe"

	"github.com/stagecoach-serving/stagecoach/tensor"
)

// datatypes returns the datatypes of the Open Inference Protocol. The index of each is its ONNX
// number (TensorProto.DataType, which equals ONNXTensorElementDataType). size is the size of an
// element in bytes, or 0 if elements have no fixed size.
func datatypes() [17]struct {
	name tensor.Datatype
	size int
} {
	return [...]struct {
		name tensor.Datatype
		size int
	}{
		1: {"FP32", 4}, 2: {"UINT8", 1}, 3: {"INT8", 1}, 4: {"UINT16", 2}, 5: {"INT16", 2}, 6: {"INT32", 4}, 7: {"INT64", 8},
		8: {"BYTES", 0}, 9: {"BOOL", 1}, 10: {"FP16", 2}, 11: {"FP64", 8}, 12: {"UINT32", 4}, 13: {"UINT64", 8}, 16: {"BF16", 2},
	}
}

// datatypeOf returns the name of an ONNX datatype. A datatype that the protocol lacks is shown as a
// number.
func datatypeOf(onnx int32) tensor.Datatype {
	if all := datatypes(); int(onnx) < len(all) && all[onnx].name != "" {
		return all[onnx].name
	}
	return tensor.Datatype(fmt.Sprintf("ONNX-%d", onnx))
}

// sizeOf returns the size of an element in bytes. It returns 0 for BYTES and unknown datatypes.
func sizeOf(name tensor.Datatype) int {
	for _, d := range datatypes() {
		if d.name == name {
			return d.size
		}
	}
	return 0
}

// accepts returns an error if t cannot be this input.
func (i Info) accepts(t *tensor.Tensor) error {
	size := sizeOf(i.Datatype)
	if t.Datatype != i.Datatype || !i.fits(t.Shape) {
		return fmt.Errorf("input %q: got %s, want %s", i.Name, describe(t.Datatype, t.Shape), i)
	}
	if size == 0 {
		return fmt.Errorf("input %q: tensors of datatype %s cannot be fed to a model, want numbers or BOOL", i.Name, i.Datatype)
	}
	if want := bytesOf(size, t.Shape); want != len(t.Data) {
		return fmt.Errorf("input %q: %d bytes of data, want %d for %s", i.Name, len(t.Data), want, describe(t.Datatype, t.Shape))
	}
	return nil
}

// fits reports whether a tensor of the given shape can be this input.
func (i Info) fits(shape []int64) bool {
	if i.Shape != nil && len(shape) != len(i.Shape) || len(shape) > maxRank {
		return false
	}
	for d, n := range shape {
		if n < 0 || i.Shape != nil && i.Shape[d] >= 0 && i.Shape[d] != n {
			return false
		}
	}
	return true
}

// bytesOf returns the size of a tensor in bytes, or -1 if it exceeds any slice.
func bytesOf(size int, shape []int64) int {
	const most = 1 << 46
	if slices.Contains(shape, 0) {
		return 0
	}
	n := int64(size)
	for _, d := range shape {
		if d > most/n {
			return -1
		}
		n *= d
	}
	return int(n)
}

// aligned returns data if its address is aligned for elements of the given size, or else a copy.
func aligned(data []byte, size int) []byte {
	if uintptr(unsafe.Pointer(unsafe.SliceData(data)))%uintptr(size) == 0 {
		return data
	}
	return slices.Clone(data)
}

// describe formats a datatype and a shape, such as FP32 [1,3,-1,-1].
func describe(d tensor.Datatype, shape []int64) string {
	if shape == nil {
		return string(d) + " of any shape"
	}
	return string(d) + " " + strings.ReplaceAll(fmt.Sprint(shape), " ", ",")
}

func describeAll(of []tensor.Tensor) string {
	all := make([]string, len(of))
	for i := range of {
		all[i] = of[i].Name + " " + describe(of[i].Datatype, of[i].Shape)
	}
	return strings.Join(all, ", ")
}
