package onnx_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/internal/third_party/onnx/onnxpb"
	"github.com/stagecoach-serving/stagecoach/tensor/onnx"
)

// signature returns the inputs and outputs of a model's file as text.
func signature(t *testing.T, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	in, out, err := onnx.Signature(f, info.Size())
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for i, v := range append(in, out...) {
		text := fmt.Sprintf("%s %s", v.Name, v.Type)
		for word, is := range map[string]bool{" tensor": v.Tensor(), " zipped": v.Zipped()} {
			if is {
				text += word
			}
		}
		if v.Served() {
			text += " served"
		}
		if i == len(in) {
			text = "-> " + text
		}
		all = append(all, text)
	}
	return strings.Join(all, ", ")
}

func TestSignature(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m.onnx")
	const x = "X tensor(float) tensor served, -> label "
	for _, tc := range []struct {
		text, zipMap bool
		want         string
	}{
		{false, false, x + "tensor(int64) tensor served, probabilities tensor(float) tensor served"},
		{true, false, x + "tensor(string) tensor, probabilities tensor(float) tensor served"},
		{false, true, x + "tensor(int64) tensor served, output_probability seq(map(int64,tensor(float))) zipped"},
		{true, true, x + "tensor(string) tensor, output_probability seq(map(string,tensor(float))) zipped"},
	} {
		proctest.Classifier(t, path, tc.text, tc.zipMap)
		if got := signature(t, path); got != tc.want {
			t.Errorf("got  %s\nwant %s", got, tc.want)
		}
	}
	path, bytes, err := onnx.Synthetic(t.TempDir(), onnx.EncoderOf(64<<20), 1)
	if err != nil {
		t.Fatal(err)
	}
	if got := signature(t, path); !strings.Contains(got, "served, -> ") || strings.Count(got, "tensor served") != strings.Count(got, ", ")+1 {
		t.Errorf("%d bytes with external parameters: %s", bytes, got)
	}
}

// TestSignatureOfTheModelAlone checks that inputs and outputs of subgraphs are skipped, and that
// every kind of type has a name.
func TestSignatureOfTheModelAlone(t *testing.T) {
	value := func(name string, of *onnxpb.TypeProto) *onnxpb.ValueInfoProto {
		return &onnxpb.ValueInfoProto{Name: &name, Type: of}
	}
	float := &onnxpb.TypeProto{Value: &onnxpb.TypeProto_TensorType{TensorType: &onnxpb.TypeProto_Tensor{ElemType: proto.Int32(1)}}}
	sub := &onnxpb.GraphProto{Input: []*onnxpb.ValueInfoProto{value("hidden", float)}, Output: []*onnxpb.ValueInfoProto{value("hidden", float)}}
	b, err := proto.Marshal(&onnxpb.ModelProto{Graph: &onnxpb.GraphProto{
		Node:  []*onnxpb.NodeProto{{Attribute: []*onnxpb.AttributeProto{{G: sub}}}},
		Input: []*onnxpb.ValueInfoProto{value("a", float), value("b", nil)},
		Output: []*onnxpb.ValueInfoProto{
			value("c", &onnxpb.TypeProto{Value: &onnxpb.TypeProto_OptionalType{OptionalType: &onnxpb.TypeProto_Optional{ElemType: float}}}),
			value("d", &onnxpb.TypeProto{Value: &onnxpb.TypeProto_SequenceType{SequenceType: &onnxpb.TypeProto_Sequence{ElemType: float}}}),
			value("e", &onnxpb.TypeProto{Value: &onnxpb.TypeProto_SparseTensorType{SparseTensorType: &onnxpb.TypeProto_SparseTensor{ElemType: proto.Int32(11)}}}),
		},
	}})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "m.onnx")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	if got, want := signature(t, path), "a tensor(float) tensor served, b unknown, -> c optional(tensor(float)), d seq(tensor(float)), e sparse_tensor(double)"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if _, _, err := onnx.Signature(strings.NewReader("version https://git-lfs"), 23); !errors.Is(err, onnx.ErrNoModel) {
		t.Errorf("no model: %v", err)
	}
}
