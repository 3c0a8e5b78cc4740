package stages

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/functions/minilm/wordpiece"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/stage/zygote"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// reference has the results of the reference library for twenty texts.
type reference struct {
	Text      string
	IDs       []int64
	Embedding []float32
}

func references(t *testing.T) []reference {
	t.Helper()
	b, err := os.ReadFile("../testdata/reference.json")
	if err != nil {
		t.Fatal(err)
	}
	var all struct{ Texts []reference }
	if err := json.Unmarshal(b, &all); err != nil || len(all.Texts) != 20 {
		t.Fatalf("%d texts, %v", len(all.Texts), err)
	}
	return all.Texts
}

func model(t *testing.T, name string) *zygote.Session {
	t.Helper()
	s, err := zygote.Open(zygote.Options{Library: proctest.Built(t, "ort", "libonnxruntime.so.1"), Model: proctest.Built(t, "models", "minilm", name+".onnx"), Threads: 2, Start: 2})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func tokenizer(t *testing.T) *wordpiece.Tokenizer {
	t.Helper()
	b, err := os.ReadFile(proctest.Built(t, "models", "minilm", "vocab.txt"))
	if err != nil {
		t.Fatal(err)
	}
	tok, err := wordpiece.New(string(b))
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

func call(items ...tensor.Item) *stage.Call {
	return &stage.Call{Input: tensor.Input{{Items: items}}}
}

func text(s string) tensor.Item { return tensor.Item{ContentType: "text/plain", Bytes: []byte(s)} }

// cut returns a function that sends texts through the eight stages.
func cut(t *testing.T) func(texts ...tensor.Item) [][]float32 {
	first, last := embed(model(t, "embed"), tokenizer(t)), pool(model(t, "pool"))
	var layers []*zygote.Session
	for l := range 6 {
		layers = append(layers, model(t, fmt.Sprintf("layer-%d", l+1)))
	}
	return func(texts ...tensor.Item) [][]float32 {
		t.Helper()
		items, err := first(call(texts...))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range layers {
			for i := range items {
				if items[i].Tensors, err = m.Run(items[i].Tensors); err != nil {
					t.Fatal(err)
				}
			}
		}
		out, err := last(call(items...))
		if err != nil || len(out) != 1 || out[0].ContentType != "application/json" {
			t.Fatalf("%v, %v", out, err)
		}
		var all [][]float32
		if err := json.Unmarshal(out[0].Bytes, &all); err != nil || len(all) != len(texts) {
			t.Fatalf("%d embeddings of %d texts, %v", len(all), len(texts), err)
		}
		return all
	}
}

// TestEmbeddingsEqualTheReference compares the whole model, the stages and the reference, text by
// text and with all texts in one request.
func TestEmbeddingsEqualTheReference(t *testing.T) {
	all, tok, whole, stages := references(t), tokenizer(t), model(t, "whole"), cut(t)
	var ids [][]int64
	var items []tensor.Item
	least, farthest := 1.0, 0.0
	check := func(what string, i int, a, b []float32) {
		t.Helper()
		if c := cosine(a, all[i].Embedding); !(c >= 0.9999) {
			t.Errorf("text %d, %s: cosine %.6f with the reference, want at least 0.9999: %q", i, what, c, all[i].Text)
		} else {
			least = min(least, c)
		}
		if d := distance(a, b); !(d <= 1e-5) {
			t.Errorf("text %d, %s: the cut is %g off the whole, want at most 1e-5: %q", i, what, d, all[i].Text)
		} else {
			farthest = max(farthest, d)
		}
	}
	run := func(batch [][]int64) [][]float32 {
		out, err := whole.Run(padded(batch))
		if err != nil {
			t.Fatal(err)
		}
		return rows(out[0])
	}
	for i, r := range all {
		ids, items = append(ids, tok.IDs(r.Text, MaxTokens)), append(items, text(r.Text))
		check("alone", i, run(ids[i:])[0], stages(items[i])[0])
	}
	together := stages(items...)
	for i, e := range run(ids) { // one batch, padded to 256 tokens
		check("together", i, e, together[i])
	}
	t.Logf("cosine with the reference at least %.9f; the cut at most %g off the whole", least, farthest)
}

func cosine(a, b []float32) float64 {
	if len(a) != 384 || len(b) != 384 {
		return math.NaN()
	}
	var ab, aa, bb float64
	for i := range a {
		x, y := float64(a[i]), float64(b[i])
		ab, aa, bb = ab+x*y, aa+x*x, bb+y*y
	}
	return ab / math.Sqrt(aa*bb)
}

func distance(a, b []float32) (far float64) {
	for i := range a {
		far = max(far, math.Abs(float64(a[i]-b[i])))
	}
	return far
}

func TestBatchesAreBoundedWithLittlePadding(t *testing.T) {
	for name, tc := range map[string]struct{ texts, want []int }{
		"nothing":            {nil, nil},
		"one":                {[]int{256}, []int{1}},
		"as many as go in":   {slices.Repeat([]int{256}, 5), []int{2, 2, 1}},
		"short ones":         {slices.Repeat([]int{2}, 300), []int{256, 44}},
		"a quarter of 8":     {[]int{4, 4, 8, 8, 6, 6}, []int{2, 4}},
		"no more":            {[]int{4, 4, 8, 7}, []int{2, 2}},
		"a long one late":    {append(slices.Repeat([]int{10}, 20), 256, 10), []int{20, 1, 1}},
		"short before long":  {[]int{6, 8, 8, 8}, []int{4}},
		"at the bound":       {slices.Repeat([]int{128}, 4), []int{4}},
		"longest comes last": {[]int{100, 100, 100, 128, 128}, []int{4, 1}},
	} {
		var texts [][]int64
		for _, n := range tc.texts {
			texts = append(texts, make([]int64, n))
		}
		var got []int
		for _, b := range batches(texts) {
			got = append(got, len(b))
			all, real := len(padded(b)[0].Data)/8, 0
			for _, text := range b {
				real += len(text)
			}
			if all > BatchTokens || 4*(all-real) > all {
				t.Errorf("%s: a batch of %d tokens, %d without padding", name, all, real)
			}
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("%s: batches of %v texts, want %v", name, got, tc.want)
		}
	}
}

// broken is a model that bad input must not reach.
type broken struct{ t *testing.T }

func (b broken) Run([]tensor.Tensor, ...string) ([]tensor.Tensor, error) {
	b.t.Error("the model ran")
	return nil, errors.New("broken")
}

func TestInvalidItemsAreBadInput(t *testing.T) {
	first, last := embed(broken{t}, tokenizer(t)), pool(broken{t})
	tensors := tensor.Item{Tensors: []tensor.Tensor{{Name: "x"}}}
	for name, tc := range map[string]struct {
		hook  hook
		items []tensor.Item
		want  string
	}{
		"tensors":       {first, []tensor.Item{text("a"), tensors}, "item 1: 1 tensors, want text"},
		"a number":      {first, []tensor.Item{{ContentType: "application/json", Bytes: []byte("7")}}, `item 0: "7" of type "application/json", want text`},
		"latin 1":       {first, []tensor.Item{text("caf\xe9")}, "item 0: 4 bytes of type \"text/plain\" that are not UTF-8"},
		"too many":      {first, slices.Repeat([]tensor.Item{text("a")}, 1001), "1001 texts, want at most 1000"},
		"text to pool":  {last, []tensor.Item{text("a")}, "item 0: bytes of type"},
		"wrong tensors": {pool(model(t, "pool")), []tensor.Item{tensors}, `item 0: model`},
	} {
		out, err := tc.hook(call(tc.items...))
		if err == nil || out != nil || !strings.Contains(err.Error(), tc.want) || reflect.TypeOf(err) != reflect.TypeOf(stage.BadInput(err)) {
			t.Errorf("%s: output %v, error %v, want bad input with %q in it", name, out, err, tc.want)
		}
	}
}

// TestTextsComeInSeveralForms checks that texts may come in several forms, and that embeddings have
// one form.
func TestTextsComeInSeveralForms(t *testing.T) {
	first, last := embed(model(t, "embed"), tokenizer(t)), pool(model(t, "pool"))
	answer := func(texts ...tensor.Item) string {
		items, err := first(call(texts...))
		if err != nil {
			t.Fatal(err)
		}
		for i := range items { // without the layers, only the name differs
			items[i].Tensors[0].Name = "hidden.6"
		}
		out, err := last(call(items...))
		if err != nil || len(out) != 1 || out[0].ContentType != "application/json" {
			t.Fatalf("%v, %v", out, err)
		}
		return string(out[0].Bytes)
	}
	a := answer(text("a"))
	var embeddings [][]float32
	if err := json.Unmarshal([]byte(a), &embeddings); err != nil || len(embeddings) != 1 || len(embeddings[0]) != 384 {
		t.Errorf("one text: %.60s…, %v, want a list of one embedding", a, err)
	}
	for name, it := range map[string]tensor.Item{
		"a JSON string":        {ContentType: "application/json", Bytes: []byte(`"a"`)},
		"an unnamed body":      {ContentType: "application/octet-stream", Bytes: []byte("a")},
		"what curl says it is": {ContentType: "application/x-www-form-urlencoded", Bytes: []byte("a")},
	} {
		if got := answer(it); got != a {
			t.Errorf("%s: %.60s…, want %.60s…", name, got, a)
		}
	}
	if got := answer(); got != "[]" {
		t.Errorf("no texts: %s, want []", got)
	}
}

func TestPlaceWantsAModel(t *testing.T) {
	for _, h := range []stage.Hooks{Embed(), Pool()} {
		if err := h.Place(t.Context(), &stage.Replica{}); err == nil || !strings.Contains(err.Error(), "STAGECOACH_MODEL") {
			t.Errorf("error %v, want STAGECOACH_MODEL in it", err)
		}
	}
}
