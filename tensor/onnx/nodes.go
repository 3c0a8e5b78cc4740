package onnx

import (
	"encoding/binary"
	"math"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/stagecoach-serving/stagecoach/internal/third_party/onnx/onnxpb"
)

// The versions of the models that this package makes. LayerNormalization needs opset 17, and Gelu
// opset 20.
const (
	opset     = 20
	irVersion = 9
)

func model(g *onnxpb.GraphProto) *onnxpb.ModelProto {
	return &onnxpb.ModelProto{
		IrVersion:   proto.Int64(irVersion),
		OpsetImport: []*onnxpb.OperatorSetIdProto{{Domain: proto.String(""), Version: proto.Int64(opset)}},
		Graph:       g,
	}
}

// nodes appends nodes and small constants to a graph.
type nodes struct{ graph *onnxpb.GraphProto }

func (b nodes) node(op string, in, out []string, attrs ...*onnxpb.AttributeProto) {
	b.graph.Node = append(b.graph.Node, &onnxpb.NodeProto{
		OpType: proto.String(op), Name: proto.String(strings.Join(out, ",")), Input: in, Output: out, Attribute: attrs,
	})
}

// op appends a node with one output.
func (b nodes) op(op, out string, in ...string) { b.node(op, in, []string{out}) }

func (b nodes) ints(name string, v ...int64) {
	var raw []byte
	for _, x := range v {
		raw = binary.LittleEndian.AppendUint64(raw, uint64(x))
	}
	b.graph.Initializer = append(b.graph.Initializer, &onnxpb.TensorProto{
		Name: proto.String(name), Dims: []int64{int64(len(v))}, DataType: proto.Int32(int32(onnxpb.TensorProto_INT64)), RawData: raw,
	})
}

func (b nodes) float(name string, v float32) {
	b.floats(name, binary.LittleEndian.AppendUint32(nil, math.Float32bits(v)), 1)
}

// floats appends a constant with these bytes.
func (b nodes) floats(name string, raw []byte, dims ...int64) {
	b.graph.Initializer = append(b.graph.Initializer, &onnxpb.TensorProto{
		Name: proto.String(name), Dims: dims, DataType: proto.Int32(int32(onnxpb.TensorProto_FLOAT)), RawData: raw,
	})
}

func intAttr(name string, v int64) *onnxpb.AttributeProto {
	return &onnxpb.AttributeProto{Name: proto.String(name), Type: onnxpb.AttributeProto_INT.Enum(), I: proto.Int64(v)}
}

// permAttr returns the attribute with the order of a Transpose's dimensions.
func permAttr(v ...int64) *onnxpb.AttributeProto {
	return &onnxpb.AttributeProto{Name: proto.String("perm"), Type: onnxpb.AttributeProto_INTS.Enum(), Ints: v}
}

func floatAttr(name string, v float32) *onnxpb.AttributeProto {
	return &onnxpb.AttributeProto{Name: proto.String(name), Type: onnxpb.AttributeProto_FLOAT.Enum(), F: proto.Float32(v)}
}

// activation describes a tensor [B,S,d].
func activation(name string, d int64) *onnxpb.ValueInfoProto {
	return value(name, onnxpb.TensorProto_FLOAT, shape("B", "S", d))
}

// shape returns a shape. A dimension is a length (int64) or a name (string).
func shape(dims ...any) *onnxpb.TensorShapeProto {
	s := &onnxpb.TensorShapeProto{}
	for _, d := range dims {
		dim := &onnxpb.TensorShapeProto_Dimension{}
		switch d := d.(type) {
		case string:
			dim.Value = &onnxpb.TensorShapeProto_Dimension_DimParam{DimParam: d}
		case int64:
			dim.Value = &onnxpb.TensorShapeProto_Dimension_DimValue{DimValue: d}
		}
		s.Dim = append(s.Dim, dim)
	}
	return s
}

// value describes a tensor. If shape is nil, it can have any shape.
func value(name string, datatype onnxpb.TensorProto_DataType, shape *onnxpb.TensorShapeProto) *onnxpb.ValueInfoProto {
	return &onnxpb.ValueInfoProto{Name: proto.String(name), Type: &onnxpb.TypeProto{Value: &onnxpb.TypeProto_TensorType{
		TensorType: &onnxpb.TypeProto_Tensor{ElemType: proto.Int32(int32(datatype)), Shape: shape},
	}}}
}
