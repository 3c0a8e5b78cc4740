// Package torch_test runs the stages in PyTorch as replicas, over the stage protocol, and compares
// their results.
package torch_test

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"slices"
	"testing"

	"github.com/stagecoach-serving/stagecoach/functions/minilm/wordpiece"
	"github.com/stagecoach-serving/stagecoach/functions/torch/synthetic"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/stage/zygote"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// model opens one of the minilm models.
func model(t *testing.T, name string) *zygote.Session {
	t.Helper()
	s, err := zygote.Open(zygote.Options{Library: proctest.Built(t, "ort", "libonnxruntime.so.1"), Model: proctest.Built(t, "models", "minilm", name+".onnx"), Threads: 1, Start: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// embedded returns the output of the first minilm stage for texts that are padded to the longest.
func embedded(t *testing.T) []tensor.Tensor {
	t.Helper()
	vocabulary, err := os.ReadFile(proctest.Built(t, "models", "minilm", "vocab.txt"))
	if err != nil {
		t.Fatal(err)
	}
	tokenizer, err := wordpiece.New(string(vocabulary))
	if err != nil {
		t.Fatal(err)
	}
	texts := []string{"This is an example sentence.", "", "Each stage of a model is a function: deployed, fed by a queue of its own, and brought up in milliseconds."}
	var ids [][]int64
	longest := 0
	for _, text := range texts {
		ids = append(ids, tokenizer.IDs(text, 256))
		longest = max(longest, len(ids[len(ids)-1]))
	}
	shape := []int64{int64(len(texts)), int64(longest)}
	in := []tensor.Tensor{{Name: "input_ids", Datatype: "INT64", Shape: shape}, {Name: "attention_mask", Datatype: "INT64", Shape: shape}}
	for _, text := range ids {
		for i := range longest {
			id, mask := uint64(0), uint64(0)
			if i < len(text) {
				id, mask = uint64(text[i]), 1
			}
			in[0].Data = binary.LittleEndian.AppendUint64(in[0].Data, id)
			in[1].Data = binary.LittleEndian.AppendUint64(in[1].Data, mask)
		}
	}
	out, err := model(t, "embed").Run(in)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestMinilmEqualsONNXRuntime compares each layer with ONNX Runtime's, and the output of all six
// layers.
func TestMinilmEqualsONNXRuntime(t *testing.T) {
	const layers, near = 6, 1e-4
	theirs := embedded(t)
	ours := theirs
	for l := range layers {
		r := launch(t, "minilm", proctest.Built(t, "models", "minilm", fmt.Sprintf("layer-%d.safetensors", l+1)))
		same := r.call(tensor.Activation{{Tensors: theirs}})[0][0].Tensors
		ours = r.call(tensor.Activation{{Tensors: ours}})[0][0].Tensors
		var err error
		if theirs, err = model(t, fmt.Sprintf("layer-%d", l+1)).Run(theirs); err != nil {
			t.Fatal(err)
		}
		d := distance(t, same, theirs)
		if !(d <= near) {
			t.Errorf("layer %d: %g off ONNX Runtime's, want at most %g", l+1, d, near)
		}
		t.Logf("layer %d: at most %.1e off", l+1, d)
	}
	pool := model(t, "pool")
	got, err := pool.Run(ours)
	if err != nil {
		t.Fatal(err)
	}
	want, err := pool.Run(theirs)
	if err != nil {
		t.Fatal(err)
	}
	d := distance(t, got, want)
	if !(d <= near) {
		t.Errorf("embeddings: %g off ONNX Runtime's, want at most %g", d, near)
	}
	t.Logf("embeddings: at most %.1e off", d)
}

// TestMinilmBatchesEqualSingleCalls sends a layer a batch of calls whose texts have two lengths.
func TestMinilmBatchesEqualSingleCalls(t *testing.T) {
	long := embedded(t)
	short := slices.Clone(long)
	for i, in := range long {
		texts, tokens := in.Shape[0], in.Shape[1]
		row := len(in.Data) / int(texts)
		short[i].Shape = append([]int64{1, tokens - 2}, in.Shape[2:]...)
		short[i].Data = in.Data[2*row : 3*row-2*row/int(tokens)] // of the longest text
	}
	a, b := tensor.Activation{{Tensors: long}}, tensor.Activation{{Tensors: short}}
	r := launch(t, "minilm", proctest.Built(t, "models", "minilm", "layer-1.safetensors"))
	alone := []tensor.Activation{r.call(a)[0], r.call(b)[0], r.call(a)[0]}
	for i, got := range r.call(a, b, a) {
		if d := distance(t, got[0].Tensors, alone[i][0].Tensors); !(d <= 1e-5) {
			t.Errorf("call %d: %g off a single call, want at most 1e-5", i, d)
		}
	}
}

// distance returns the maximum distance between two sets of the same tensors. FP32 tensors are
// compared by value; all others must be equal.
func distance(t *testing.T, got, want []tensor.Tensor) (far float64) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%d tensors, want %d", len(got), len(want))
	}
	for _, w := range want {
		i := slices.IndexFunc(got, func(g tensor.Tensor) bool { return g.Name == w.Name })
		if i < 0 || got[i].Datatype != w.Datatype || !slices.Equal(got[i].Shape, w.Shape) {
			t.Fatalf("%q is not there, or not %s %v", w.Name, w.Datatype, w.Shape)
		}
		if w.Datatype != "FP32" {
			if !slices.Equal(got[i].Data, w.Data) {
				t.Fatalf("%q is another", w.Name)
			}
			continue
		}
		for at := 0; at < len(w.Data); at += 4 {
			d := float64(float(got[i].Data[at:])) - float64(float(w.Data[at:]))
			if math.IsNaN(d) {
				return d
			}
			far = max(far, math.Abs(d))
		}
	}
	return far
}

func float(b []byte) float32 { return math.Float32frombits(binary.LittleEndian.Uint32(b)) }

func text(s string) tensor.Activation {
	return tensor.Activation{{ContentType: "text/plain", Bytes: []byte(s)}}
}

// TestTransformer sends texts through a model that is cut in two, and through the whole model.
func TestTransformer(t *testing.T) {
	dir := t.TempDir()
	shape, err := synthetic.Of(2, 1<<20, "F32")
	if err != nil {
		t.Fatal(err)
	}
	var files []string
	if err := shape.Write(t.Context(), dir, 1, func(path string, _ int64) { files = append(files, path) }); err != nil {
		t.Fatal(err)
	}
	first, second, whole := launch(t, "transformer", files[0]), launch(t, "transformer", files[1]), launch(t, "transformer", dir)
	texts := []tensor.Activation{text("to be, or not to be"), text("a"), text("to be, or not to b?")}
	cut := second.call(first.call(texts...)...)
	for i, want := range whole.call(texts...) {
		var answer struct {
			Next []struct {
				Byte        int
				Probability float64
			}
		}
		if err := json.Unmarshal(want[0].Bytes, &answer); err != nil || len(answer.Next) != 5 || want[0].ContentType != "application/json" {
			t.Errorf("text %d: %s, %v, want five bytes that may come next", i, want[0].Bytes, err)
		}
		if string(cut[i][0].Bytes) != string(want[0].Bytes) {
			t.Errorf("text %d: the cut answers %s, the whole %s", i, cut[i][0].Bytes, want[0].Bytes)
		}
	}
}

// TestParametersAreNotCopied checks that a replica of a large model has no more private memory than
// a replica of a small one.
func TestParametersAreNotCopied(t *testing.T) {
	own := func(size int64) int64 {
		shape, err := synthetic.Of(1, size, "F32")
		if err != nil {
			t.Fatal(err)
		}
		var file string
		if err := shape.Write(t.Context(), t.TempDir(), 1, func(path string, _ int64) { file = path }); err != nil {
			t.Fatal(err)
		}
		r := launch(t, "transformer", file)
		r.call(text("a"))
		return r.anonymous()
	}
	const large = 200e6
	few, many := own(1<<20), own(large)
	t.Logf("%d MB of its own with 1 MB of parameters, %d MB with %d", few>>20, many>>20, int(large)>>20)
	if many-few > large/4 {
		t.Errorf("%d bytes more with %d bytes of parameters, want almost none", many-few, int(large))
	}
}
