package proctest

import (
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/stagecoach-serving/stagecoach/internal/third_party/onnx/onnxpb"
)

// Classifier writes a logistic regression of three numbers to path, in the form that skl2onnx
// makes. Labels are strings if text is true, and integers otherwise. If zipMap is true, the model
// ends with the operator ZipMap, whose output is a sequence of maps and not a tensor.
func Classifier(t testing.TB, path string, text, zipMap bool) {
	t.Helper()
	tensor := func(of onnxpb.TensorProto_DataType) *onnxpb.TypeProto {
		return &onnxpb.TypeProto{Value: &onnxpb.TypeProto_TensorType{TensorType: &onnxpb.TypeProto_Tensor{ElemType: proto.Int32(int32(of))}}}
	}
	value := func(name string, of *onnxpb.TypeProto) *onnxpb.ValueInfoProto {
		return &onnxpb.ValueInfoProto{Name: &name, Type: of}
	}
	label := onnxpb.TensorProto_INT64
	labels := &onnxpb.AttributeProto{Name: proto.String("classlabels_ints"), Type: onnxpb.AttributeProto_INTS.Enum(), Ints: []int64{0, 1}}
	if text {
		label = onnxpb.TensorProto_STRING
		labels = &onnxpb.AttributeProto{Name: proto.String("classlabels_strings"), Type: onnxpb.AttributeProto_STRINGS.Enum(), Strings: [][]byte{[]byte("no"), []byte("yes")}}
	}
	floats := func(name string, v ...float32) *onnxpb.AttributeProto {
		return &onnxpb.AttributeProto{Name: &name, Type: onnxpb.AttributeProto_FLOATS.Enum(), Floats: v}
	}
	const domain = "ai.onnx.ml"
	g := &onnxpb.GraphProto{
		Name:  proto.String("classifier"),
		Input: []*onnxpb.ValueInfoProto{value("X", tensor(onnxpb.TensorProto_FLOAT))},
		Node: []*onnxpb.NodeProto{{
			OpType: proto.String("LinearClassifier"), Domain: proto.String(domain), Input: []string{"X"}, Output: []string{"label", "probabilities"},
			Attribute: []*onnxpb.AttributeProto{
				labels, floats("coefficients", -1, -1, -2, 1, 1, 2), floats("intercepts", 2, -2),
				{Name: proto.String("post_transform"), Type: onnxpb.AttributeProto_STRING.Enum(), S: []byte("LOGISTIC")},
			},
		}},
		Output: []*onnxpb.ValueInfoProto{value("label", tensor(label)), value("probabilities", tensor(onnxpb.TensorProto_FLOAT))},
	}
	if zipMap {
		name := "classlabels_int64s"
		if text {
			name = "classlabels_strings"
		}
		g.Node = append(g.Node, &onnxpb.NodeProto{
			OpType: proto.String("ZipMap"), Domain: proto.String(domain), Input: []string{"probabilities"}, Output: []string{"output_probability"},
			Attribute: []*onnxpb.AttributeProto{{Name: &name, Type: labels.Type, Ints: labels.GetInts(), Strings: labels.GetStrings()}},
		})
		of := &onnxpb.TypeProto{Value: &onnxpb.TypeProto_MapType{MapType: &onnxpb.TypeProto_Map{KeyType: proto.Int32(int32(label)), ValueType: tensor(onnxpb.TensorProto_FLOAT)}}}
		g.Output[1] = value("output_probability", &onnxpb.TypeProto{Value: &onnxpb.TypeProto_SequenceType{SequenceType: &onnxpb.TypeProto_Sequence{ElemType: of}}})
	}
	b, err := proto.Marshal(&onnxpb.ModelProto{
		IrVersion: proto.Int64(8), ProducerName: proto.String("skl2onnx"), Graph: g,
		OpsetImport: []*onnxpb.OperatorSetIdProto{{Domain: proto.String(domain), Version: proto.Int64(1)}, {Domain: proto.String(""), Version: proto.Int64(9)}},
	})
	if err == nil {
		err = os.MkdirAll(filepath.Dir(path), 0o755)
	}
	if err == nil {
		err = os.WriteFile(path, b, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
}
