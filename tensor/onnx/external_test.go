package onnx

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/stagecoach-serving/stagecoach/internal/third_party/onnx/onnxpb"
)

func outside(location, offset, length string) *onnxpb.TensorProto {
	t := &onnxpb.TensorProto{Name: proto.String("w"), DataLocation: onnxpb.TensorProto_EXTERNAL.Enum()}
	for _, kv := range [][2]string{{"location", location}, {"offset", offset}, {"length", length}} {
		if kv[1] != "" {
			t.ExternalData = append(t.ExternalData, &onnxpb.StringStringEntryProto{Key: &kv[0], Value: &kv[1]})
		}
	}
	return t
}

func encoded(t testing.TB, g *onnxpb.GraphProto) []byte {
	t.Helper()
	b, err := proto.Marshal(&onnxpb.ModelProto{IrVersion: proto.Int64(8), ProducerName: proto.String("test"), Graph: g})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// everywhere returns a graph with external data at each place that can have a tensor.
func everywhere() *onnxpb.GraphProto {
	sub := &onnxpb.GraphProto{Initializer: []*onnxpb.TensorProto{outside("sub.bin", "", "7")}}
	sparse := &onnxpb.SparseTensorProto{Values: outside("values.bin", "", "1"), Indices: outside("indices.bin", "", "2")}
	return &onnxpb.GraphProto{
		Initializer: []*onnxpb.TensorProto{
			{Name: proto.String("inline"), RawData: make([]byte, 100_000)},
			outside("weights.bin", "4096", "1000"), outside("weights.bin", "0", "4000"),
			outside("dir/all.bin", "", ""),
		},
		SparseInitializer: []*onnxpb.SparseTensorProto{sparse},
		Node: []*onnxpb.NodeProto{{Attribute: []*onnxpb.AttributeProto{
			{T: outside("t.bin", "", "3")},
			{Tensors: []*onnxpb.TensorProto{outside("ts.bin", "", "4")}},
			{G: sub},
			{Graphs: []*onnxpb.GraphProto{sub}},
			{SparseTensor: &onnxpb.SparseTensorProto{Values: outside("s.bin", "", "5")}},
		}}},
	}
}

func TestExternal(t *testing.T) {
	b := encoded(t, everywhere())
	got, err := External(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	want := []ExternalFile{
		{"dir/all.bin", 0}, {"indices.bin", 2}, {"s.bin", 5}, {"sub.bin", 7}, {"t.bin", 3}, {"ts.bin", 4}, {"values.bin", 1}, {"weights.bin", 5096},
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	for n := range len(b) { // a truncated model is either a shorter model or invalid
		if _, err := External(bytes.NewReader(b[:n]), int64(n)); err != nil && !errors.Is(err, ErrNoModel) {
			t.Fatalf("the first %d bytes: %v, want %v", n, err, ErrNoModel)
		}
	}
	if _, err := External(bytes.NewReader(b[:50_000]), 50_000); err == nil || !strings.Contains(err.Error(), "it ends after 50000 bytes") {
		t.Errorf("half a model: %v", err)
	}
}

func TestExternalRefuses(t *testing.T) {
	for want, tensor := range map[string]*onnxpb.TensorProto{
		`"../weights.bin", want a file in`:     outside("../weights.bin", "", "1"),
		`"/etc/passwd", want a file in`:        outside("/etc/passwd", "", "1"),
		`offset "-1", want a number`:           outside("w", "-1", "1"),
		`length "many", want a number`:         outside("w", "", "many"),
		`a key and a value of at most 4096 by`: outside(strings.Repeat("a", 5000), "", "1"),
	} {
		b := encoded(t, &onnxpb.GraphProto{Initializer: []*onnxpb.TensorProto{tensor}})
		if _, err := External(bytes.NewReader(b), int64(len(b))); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
	deep := &onnxpb.GraphProto{}
	for range 40 {
		deep = &onnxpb.GraphProto{Node: []*onnxpb.NodeProto{{Attribute: []*onnxpb.AttributeProto{{G: deep}}}}}
	}
	for name, b := range map[string][]byte{"nothing": nil, "text": []byte("this is no model at all"), "nested": encoded(t, deep)} {
		if _, err := External(bytes.NewReader(b), int64(len(b))); !errors.Is(err, ErrNoModel) {
			t.Errorf("%s: %v, want %v", name, err, ErrNoModel)
		}
	}
}

// TestExternalOfASynthetic compares the result with the files of a synthetic model.
func TestExternalOfASynthetic(t *testing.T) {
	dir := t.TempDir()
	model, bytes, err := Synthetic(dir, Encoder{Layers: 2, Width: 64, Heads: 2}, 1)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(model)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	got, err := External(f, info.Size())
	if want := []ExternalFile{{filepath.Base(weightsFile), bytes}}; err != nil || !slices.Equal(got, want) {
		t.Errorf("got %v, %v, want %v", got, err, want)
	}
}

// FuzzExternal checks that External ends for any bytes, and that the files that it finds are in the
// model's folder.
func FuzzExternal(f *testing.F) {
	f.Add(encoded(f, everywhere()))
	f.Add([]byte("\x3a\x06\x2a\x04\x6a\x02\x0a\x00"))
	f.Add([]byte("\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"))
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := External(bytes.NewReader(b), int64(len(b)))
		if err != nil {
			return
		}
		for _, e := range got {
			if !filepath.IsLocal(e.Location) || e.Bytes < 0 {
				t.Errorf("%+v", e)
			}
		}
		var m onnxpb.ModelProto
		if proto.Unmarshal(b, &m) == nil && len(got) > 0 && m.GetGraph() == nil {
			t.Errorf("files %v of a model without a graph", got)
		}
	})
}
