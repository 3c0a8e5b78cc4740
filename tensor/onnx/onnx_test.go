package onnx_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/stagecoach-serving/stagecoach/internal/third_party/onnx/onnxpb"
	"github.com/stagecoach-serving/stagecoach/stage/zygote"
	"github.com/stagecoach-serving/stagecoach/tensor"
	"github.com/stagecoach-serving/stagecoach/tensor/onnx"
)

// artefact returns the path of a file that `make fetch` has downloaded.
func artefact(t *testing.T, name string) string {
	t.Helper()
	path, err := filepath.Abs(filepath.Join("..", "..", "build", name))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("%v: run make fetch", err)
		}
		t.Skipf("%v: run make fetch", err)
	}
	return path
}

// run loads a model and runs it once.
func run(t *testing.T, model string, in tensor.Tensor) tensor.Tensor {
	t.Helper()
	s, err := zygote.Open(zygote.Options{Library: artefact(t, "ort/libonnxruntime.so.1"), Model: model, Threads: 1, Start: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	in.Name = s.Inputs()[0].Name
	out, err := s.Run([]tensor.Tensor{in})
	if err != nil {
		t.Fatal(err)
	}
	return out[0]
}

func floats(shape ...int64) tensor.Tensor {
	n := int64(1)
	for _, d := range shape {
		n *= d
	}
	var data []byte
	for i := range n {
		data = binary.LittleEndian.AppendUint32(data, math.Float32bits(float32(i*2654435761%1000)/500-1))
	}
	return tensor.Tensor{Datatype: "FP32", Shape: shape, Data: data}
}

func synthetic(t *testing.T, layers, width, heads int, seed uint64) string {
	t.Helper()
	path, _, err := onnx.Synthetic(t.TempDir(), onnx.Encoder{Layers: layers, Width: width, Heads: heads}, seed)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// TestCut runs the stages one after the other and compares the result with the whole model. The
// encoder's outputs are equal bit by bit. Within the OCR models, ONNX Runtime fuses convolutions
// with later nodes, but not across a cut, so the last bits differ.
func TestCut(t *testing.T) {
	for name, tc := range map[string]struct {
		model  func(t *testing.T) string
		input  tensor.Tensor
		stages int
		off    float64
	}{
		"encoder in four":    {func(t *testing.T) string { return synthetic(t, 4, 64, 4, 1) }, floats(2, 7, 64), 4, 0},
		"recogniser in two":  {func(t *testing.T) string { return artefact(t, "models/ocr/rec.onnx") }, floats(1, 3, 48, 160), 2, 1e-5},
		"recogniser in five": {func(t *testing.T) string { return artefact(t, "models/ocr/rec.onnx") }, floats(1, 3, 48, 160), 5, 1e-5},
		"detector in three":  {func(t *testing.T) string { return artefact(t, "models/ocr/det.onnx") }, floats(1, 3, 96, 128), 3, 1e-5},
		"whole":              {func(t *testing.T) string { return synthetic(t, 1, 64, 4, 1) }, floats(1, 3, 64), 1, 0},
	} {
		t.Run(name, func(t *testing.T) {
			path := tc.model(t)
			m, err := onnx.Read(path)
			if err != nil {
				t.Fatal(err)
			}
			at, err := onnx.Balanced(m, tc.stages)
			if err != nil {
				t.Fatal(err)
			}
			stages, err := onnx.Cut(m, nil, at...)
			if err != nil {
				t.Fatal(err)
			}
			if len(stages) != tc.stages {
				t.Fatalf("%d stages, want %d", len(stages), tc.stages)
			}
			dir := t.TempDir()
			if weights, err := os.ReadFile(filepath.Join(filepath.Dir(path), "weights.bin")); err == nil {
				if err := os.WriteFile(filepath.Join(dir, "weights.bin"), weights, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			got := tc.input
			for i, stage := range stages {
				file := filepath.Join(dir, fmt.Sprintf("%d.onnx", i))
				if err := onnx.Write(file, stage); err != nil {
					t.Fatal(err)
				}
				got = run(t, file, got)
			}
			want := run(t, path, tc.input)
			if got.Name != want.Name || fmt.Sprint(got.Shape) != fmt.Sprint(want.Shape) || farthest(got, want) > tc.off {
				t.Errorf("cut at %q: %s %v, farthest value off by %g; want %s %v", at, got.Name, got.Shape, farthest(got, want), want.Name, want.Shape)
			}
		})
	}
}

func farthest(a, b tensor.Tensor) (far float64) {
	for i := 0; i+4 <= len(a.Data) && i+4 <= len(b.Data); i += 4 {
		x, y := math.Float32frombits(binary.LittleEndian.Uint32(a.Data[i:])), math.Float32frombits(binary.LittleEndian.Uint32(b.Data[i:]))
		far = max(far, math.Abs(float64(x-y)))
	}
	return far
}

// node parses a node of the form "op in in > out out".
func node(text string, attributes ...*onnxpb.AttributeProto) *onnxpb.NodeProto {
	left, right, _ := strings.Cut(text, " > ")
	f := strings.Fields(left)
	return &onnxpb.NodeProto{OpType: &f[0], Input: f[1:], Output: strings.Fields(right), Attribute: attributes}
}

func model(inputs, outputs string, nodes ...*onnxpb.NodeProto) *onnxpb.ModelProto {
	g := &onnxpb.GraphProto{Node: nodes, Initializer: []*onnxpb.TensorProto{{Name: proto.String("w")}}}
	for _, name := range strings.Fields(inputs) {
		g.Input = append(g.Input, &onnxpb.ValueInfoProto{Name: &name})
	}
	for _, name := range strings.Fields(outputs) {
		g.Output = append(g.Output, &onnxpb.ValueInfoProto{Name: &name})
	}
	return &onnxpb.ModelProto{Graph: g}
}

func TestCutPoints(t *testing.T) {
	branch := &onnxpb.AttributeProto{Name: proto.String("then_branch"), G: &onnxpb.GraphProto{
		Node:   []*onnxpb.NodeProto{node("Add a w > inner"), node("Relu inner > inner2")},
		Output: []*onnxpb.ValueInfoProto{{Name: proto.String("inner2")}},
	}}
	for name, tc := range map[string]struct {
		model *onnxpb.ModelProto
		want  string
	}{
		"chain":                       {model("x", "y", node("Relu x > a"), node("MatMul a w > b"), node("Relu b > y")), "a b"},
		"residual":                    {model("x", "y", node("Relu x > a"), node("Relu a > b"), node("Add a b > c"), node("Relu c > y")), "a c"},
		"input used late":             {model("x", "y", node("Relu x > a"), node("Add a x > b"), node("Relu b > y")), "b"},
		"two inputs":                  {model("x m", "y", node("Relu x > a"), node("Mul a m > b"), node("Relu b > y")), "b"},
		"unused input":                {model("x m", "y", node("Relu x > a"), node("Relu a > y")), "a"},
		"early output":                {model("x", "a y", node("Relu x > a"), node("Relu a > b"), node("Relu b > y")), ""},
		"constants are no activation": {model("x", "y", node("Relu w > k"), node("Relu x > a"), node("Add a k > b"), node("Add b k > y")), "a b"},
		"input with an initializer":   {model("x w", "y", node("Add x w > a"), node("Add a w > y")), "a"},
		"read within a branch":        {model("x", "y", node("Relu x > a"), node("Relu a > b"), node("If b > c", branch), node("Relu c > y")), "a c"},
		"unused output of a node":     {model("x", "y", node("Split x > a dead"), node("Relu a > y")), "a"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := onnx.CutPoints(tc.model)
			if err != nil {
				t.Fatal(err)
			}
			if s := strings.Join(got, " "); s != tc.want {
				t.Errorf("points %q, want %q", s, tc.want)
			}
		})
	}
}

func TestCutRefuses(t *testing.T) {
	m := model("x", "y", node("Relu x > a"), node("Relu a > b"), node("Relu b > y"))
	for name, at := range map[string][]string{"unknown": {"nosuch"}, "out of order": {"b", "a"}, "twice": {"a", "a"}, "the output": {"y"}, "the input": {"x"}} {
		if _, err := onnx.Cut(m, nil, at...); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("%q", at[len(at)-1])) {
			t.Errorf("%s: error %v, want one that names %q", name, err, at[len(at)-1])
		}
	}
	if _, err := onnx.Balanced(m, 4); err == nil {
		t.Error("four stages with two cut points: no error")
	}
	if _, err := onnx.Cut(model("x", "y", node("Add x ghost > y")), nil); err == nil || !strings.Contains(err.Error(), "ghost") {
		t.Errorf("a tensor without a source: error %v, want one that names it", err)
	}
}

// TestCarriedInputsDoNotPreventCuts checks that an input that every stage reads does not prevent a
// cut, and that stages pass it on as long as a later stage reads it.
func TestCarriedInputsDoNotPreventCuts(t *testing.T) {
	m := model("x m n", "y", node("Relu m > k"), node("Relu x > a"), node("Mul a k > b"), node("Relu b > c"), node("Mul c k > d"), node("Relu d > e"), node("Relu e > y"))
	if at, err := onnx.CutPoints(m); err != nil || fmt.Sprint(at) != "[d e]" {
		t.Errorf("points %v, %v, want d, e without carrying", at, err)
	}
	if at, err := onnx.CutPoints(m, "m"); err != nil || fmt.Sprint(at) != "[a b c d e]" {
		t.Errorf("points %v, %v, want a to e", at, err)
	}
	stages, err := onnx.Cut(m, []string{"m", "n"}, "a", "b", "d", "e")
	if err != nil {
		t.Fatal(err)
	}
	names := func(of []*onnxpb.ValueInfoProto) (s string) {
		for _, v := range of {
			s += v.GetName()
		}
		return s
	}
	var got []string
	for _, s := range stages {
		text := names(s.GetGraph().GetInput()) + ":"
		for _, n := range s.GetGraph().GetNode() {
			text += n.GetOutput()[0]
		}
		got = append(got, text+":"+names(s.GetGraph().GetOutput()))
	}
	if want := "[xmn:a:am am:kb:bm bm:kcd:d d:e:e e:y:y]"; fmt.Sprint(got) != want {
		t.Errorf("stages %v, want %s", got, want)
	}
	if _, err := onnx.Cut(m, []string{"ghost"}); err == nil || !strings.Contains(err.Error(), `"ghost"`) {
		t.Errorf("an unknown input is carried: error %v, want its name", err)
	}
}

// TestBertCanBeCutAtEveryLayer cuts a small encoder at every layer. functions/minilm compares a
// real encoder with its reference.
func TestBertCanBeCutAtEveryLayer(t *testing.T) {
	c := onnx.Bert{Layers: 2, Width: 32, Heads: 4, Inner: 64, Vocabulary: 50, Positions: 16, Types: 2, Epsilon: 1e-12}
	drawn := func(name string, dims ...int64) ([]float32, error) {
		n := int64(1)
		for _, d := range dims {
			n *= d
		}
		v := make([]float32, n)
		for i := range v {
			v[i] = float32((int64(i)+int64(len(name)))*2654435761%1000)/5000 - 0.1
		}
		return v, nil
	}
	m, err := c.Sentences(drawn)
	if err != nil {
		t.Fatal(err)
	}
	stages, err := onnx.Cut(m, []string{onnx.BertMask}, c.Hidden(0), c.Hidden(1), c.Hidden(2))
	if err != nil {
		t.Fatal(err)
	}
	batch := []tensor.Tensor{numbers(onnx.BertIDs, 7, 8, 9, 10, 11, 0), numbers(onnx.BertMask, 1, 1, 1, 1, 1, 0)}
	want := chain(t, batch, m)[0]
	got := chain(t, batch, stages...)
	if len(got) != 1 || got[0].Name != onnx.BertEmbedding || fmt.Sprint(got[0].Shape) != "[2 32]" || !(farthest(got[0], want) <= 1e-6) {
		t.Errorf("%d outputs, the first %s %v, %g off the whole", len(got), got[0].Name, got[0].Shape, farthest(got[0], want))
	}
	// Padding does not count: the second text alone gives the same result.
	alone := chain(t, []tensor.Tensor{
		{Name: onnx.BertIDs, Datatype: "INT64", Shape: []int64{1, 2}, Data: batch[0].Data[24:40]},
		{Name: onnx.BertMask, Datatype: "INT64", Shape: []int64{1, 2}, Data: batch[1].Data[24:40]},
	}, m)[0]
	if padded := (tensor.Tensor{Data: want.Data[4*32:]}); !(farthest(alone, padded) <= 1e-6) {
		t.Errorf("padding changes an embedding by %g", farthest(alone, padded))
	}
	if _, err := c.Sentences(func(string, ...int64) ([]float32, error) { return []float32{1}, nil }); err == nil || !strings.Contains(err.Error(), "1 values, want 1600") {
		t.Errorf("parameters of a wrong size: error %v, want both sizes", err)
	}
	c.Heads = 5
	if _, err := c.Sentences(drawn); err == nil {
		t.Error("width 32 with 5 heads: no error")
	}
}

// numbers returns a tensor INT64 [2,3].
func numbers(name string, of ...uint64) tensor.Tensor {
	t := tensor.Tensor{Name: name, Datatype: "INT64", Shape: []int64{2, 3}}
	for _, v := range of {
		t.Data = binary.LittleEndian.AppendUint64(t.Data, v)
	}
	return t
}

// chain runs models one after the other.
func chain(t *testing.T, in []tensor.Tensor, models ...*onnxpb.ModelProto) []tensor.Tensor {
	t.Helper()
	for _, m := range models {
		path := filepath.Join(t.TempDir(), "m.onnx")
		if err := onnx.Write(path, m); err != nil {
			t.Fatal(err)
		}
		s, err := zygote.Open(zygote.Options{Library: artefact(t, "ort/libonnxruntime.so.1"), Model: path, Threads: 1, Start: 1})
		if err != nil {
			t.Fatal(err)
		}
		if in, err = s.Run(in); err != nil {
			t.Fatal(err)
		}
		s.Close()
	}
	return in
}

func TestSynthetic(t *testing.T) {
	var path string
	read := func(seed uint64) []byte {
		var size int64
		var err error
		path, size, err = onnx.Synthetic(t.TempDir(), onnx.Encoder{Layers: 2, Width: 64, Heads: 4}, seed)
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(filepath.Join(filepath.Dir(path), "weights.bin"))
		if err != nil || int64(len(b)) != size {
			t.Fatalf("%d bytes of weights, said %d, error %v", len(b), size, err)
		}
		return b
	}
	one, two := read(1), read(2)
	if bytes.Equal(one, two) {
		t.Error("two seeds gave the same weights")
	}
	if !bytes.Equal(one, read(1)) {
		t.Error("one seed gave different weights")
	}
	m, err := onnx.Read(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range m.GetGraph().GetInitializer() {
		for _, e := range w.GetExternalData() {
			var offset int
			if e.GetKey() == "offset" {
				if _, err := fmt.Sscan(e.GetValue(), &offset); err != nil || offset%4096 != 0 {
					t.Errorf("%s at offset %s, want a multiple of 4096", w.GetName(), e.GetValue())
				}
			}
		}
	}
	if _, _, err := onnx.Synthetic(t.TempDir(), onnx.Encoder{Layers: 1, Width: 10, Heads: 4}, 1); err == nil {
		t.Error("width 10 with 4 heads: no error")
	}
}

func TestEncoderOf(t *testing.T) {
	for bytes, want := range map[int64]onnx.Encoder{
		100e6: {Layers: 8, Width: 512, Heads: 8}, 1e9: {Layers: 20, Width: 1024, Heads: 16}, 1: {Layers: 1, Width: 512, Heads: 8},
	} {
		if got := onnx.EncoderOf(bytes); got != want {
			t.Errorf("EncoderOf(%d) = %+v, want %+v", bytes, got, want)
		}
	}
}

func TestReadRefuses(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m.onnx")
	for name, content := range map[string]string{"not protobuf": "\xff\xff\xff", "empty": ""} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := onnx.Read(path); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: error %v, want one that names the file", name, err)
		}
	}
}
