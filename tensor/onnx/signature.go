package onnx

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/stagecoach-serving/stagecoach/internal/third_party/onnx/onnxpb"
)

// Value is an input or output of a model.
type Value struct {
	Name string
	// As ONNX Runtime writes it, without shapes: tensor(float), seq(map(int64,tensor(float))).
	Type string

	kind kindOfValue
}

type kindOfValue int

const (
	otherValue kindOfValue = iota // an optional, sparse or opaque value, or one of unknown type
	numbers                       // a tensor of a datatype that stages serve
	// A tensor of strings, complex numbers, or elements of less than a byte.
	otherTensor
	sequence // a sequence or map
)

// Tensor reports whether the value is a tensor. A stage in Go cannot load a model with any other
// input or output.
func (v Value) Tensor() bool { return v.kind == numbers || v.kind == otherTensor }

// Served reports whether the value is a tensor of a datatype that a stage in Go takes and returns.
func (v Value) Served() bool { return v.kind == numbers }

// Zipped reports whether the value looks like the output of the operator ZipMap, which skl2onnx
// appends to classifiers.
func (v Value) Zipped() bool { return v.kind == sequence && strings.Contains(v.Type, "map(") }

// Signature returns the inputs and outputs of the model in r. size is the size of the model's file
// in bytes. The inputs include those with a default. Like [External], Signature skips parameters.
func Signature(r io.ReaderAt, size int64) (inputs, outputs []Value, err error) {
	s := &scanner{r: r, files: map[string]int64{}}
	s.value = func(field uint64, b []byte) error {
		var v onnxpb.ValueInfoProto
		if err := proto.Unmarshal(b, &v); err != nil {
			return fmt.Errorf("%w: an input or output: %w", ErrNoModel, err)
		}
		name, kind := typeName(v.GetType(), 0)
		if value := (Value{v.GetName(), name, kind}); field == graphInput {
			inputs = append(inputs, value)
		} else {
			outputs = append(outputs, value)
		}
		return nil
	}
	if err := s.message(kindModel, 0, size, 0); err != nil {
		return nil, nil, err
	}
	if !s.graph {
		return nil, nil, fmt.Errorf("%w: there is no graph in %d bytes", ErrNoModel, size)
	}
	return inputs, outputs, nil
}

// typeName returns a type as ONNX Runtime writes it.
func typeName(t *onnxpb.TypeProto, depth int) (string, kindOfValue) {
	if depth > maxNesting {
		return "…", otherValue
	}
	inner := func(t *onnxpb.TypeProto) string {
		name, _ := typeName(t, depth+1)
		return name
	}
	switch v := t.GetValue().(type) {
	case *onnxpb.TypeProto_TensorType:
		element := onnxpb.TensorProto_DataType(v.TensorType.GetElemType())
		kind := otherTensor
		if served(element) {
			kind = numbers
		}
		return "tensor(" + elementName(element) + ")", kind
	case *onnxpb.TypeProto_SequenceType:
		return "seq(" + inner(v.SequenceType.GetElemType()) + ")", sequence
	case *onnxpb.TypeProto_MapType:
		key := elementName(onnxpb.TensorProto_DataType(v.MapType.GetKeyType()))
		return "map(" + key + "," + inner(v.MapType.GetValueType()) + ")", sequence
	case *onnxpb.TypeProto_OptionalType:
		return "optional(" + inner(v.OptionalType.GetElemType()) + ")", otherValue
	case *onnxpb.TypeProto_SparseTensorType:
		return "sparse_tensor(" + elementName(onnxpb.TensorProto_DataType(v.SparseTensorType.GetElemType())) + ")", otherValue
	}
	return "unknown", otherValue
}

func elementName(e onnxpb.TensorProto_DataType) string { return strings.ToLower(e.String()) }

// served reports whether stages in Go take and return tensors of this element type: the datatypes
// of the Open Inference Protocol whose elements have a fixed size.
func served(e onnxpb.TensorProto_DataType) bool {
	switch e {
	case onnxpb.TensorProto_FLOAT, onnxpb.TensorProto_DOUBLE, onnxpb.TensorProto_FLOAT16, onnxpb.TensorProto_BFLOAT16, onnxpb.TensorProto_BOOL,
		onnxpb.TensorProto_INT8, onnxpb.TensorProto_INT16, onnxpb.TensorProto_INT32, onnxpb.TensorProto_INT64,
		onnxpb.TensorProto_UINT8, onnxpb.TensorProto_UINT16, onnxpb.TensorProto_UINT32, onnxpb.TensorProto_UINT64:
		return true
	}
	return false
}

// CheckExternal returns the total size of the files with external parameters in a model's folder.
// Its error names each file that is missing or too short.
func CheckExternal(folder string, files []ExternalFile) (bytes int64, err error) {
	var faults []error
	for _, e := range files {
		there, err := os.Stat(filepath.Join(folder, e.Location))
		switch {
		case errors.Is(err, fs.ErrNotExist):
			faults = append(faults, fmt.Errorf("its external data %s are missing, want %d bytes in the model's folder", e.Location, e.Bytes))
		case err != nil:
			faults = append(faults, fmt.Errorf("its external data: %w", err))
		case there.Size() < e.Bytes:
			faults = append(faults, fmt.Errorf("its external data %s have %d bytes, want at least %d", e.Location, there.Size(), e.Bytes))
		default:
			bytes += there.Size()
		}
	}
	return bytes, errors.Join(faults...)
}
