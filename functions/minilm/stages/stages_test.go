package stages

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/functions/minilm/wordpiece"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/stage/join"
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

// runs is a model, as far as hooks need it.
type runs interface {
	Run(inputs []tensor.Tensor, outputs ...string) ([]tensor.Tensor, error)
}

// answers answers one call.
type answers = func(c *stage.Call) (tensor.Activation, error)

// alone returns a function that answers one call and runs the model once per set.
func alone(m runs, h hook) answers {
	return func(c *stage.Call) (tensor.Activation, error) {
		work, err := h(c)
		if err != nil {
			return nil, err
		}
		of := make([]join.Result, len(work.Sets))
		for i, in := range work.Sets {
			of[i].Outputs, of[i].Err = m.Run(in)
		}
		return work.Answer(of)
	}
}

// anyLength answers as a stage that takes texts of up to MaxTokens tokens.
func anyLength(m runs, tok *wordpiece.Tokenizer) answers {
	return alone(m, embedder{tok, MaxTokens, MaxTokens}.embed)
}

// cut returns a function that sends texts through the nine stages.
func cut(t *testing.T) func(texts ...tensor.Item) [][]float32 {
	tok := tokenizer(t)
	tokens, first, last := tokenize(tok), anyLength(model(t, "embed"), tok), alone(model(t, "pool"), pool)
	var layers []*zygote.Session
	for l := range 6 {
		layers = append(layers, model(t, fmt.Sprintf("layer-%d", l+1)))
	}
	return func(texts ...tensor.Item) [][]float32 {
		t.Helper()
		items, err := tokens(call(texts...))
		if err != nil {
			t.Fatal(err)
		}
		if items, err = first(call(items...)); err != nil {
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
	tok := tokenizer(t)
	tokens, first, short, last := tokenize(tok), anyLength(broken{t}, tok), alone(broken{t}, embedder{tok, 4, 4}.embed), alone(broken{t}, pool)
	tensors := tensor.Item{Tensors: []tensor.Tensor{{Name: "x"}}}
	ids := func(change func(t []tensor.Tensor)) []tensor.Item {
		it := tokenised([]int64{101, 7592, 102})
		change(it.Tensors)
		return []tensor.Item{it}
	}
	for name, tc := range map[string]struct {
		hook  answers
		items []tensor.Item
		want  string
	}{
		"tensors":           {tokens, []tensor.Item{text("a"), tensors}, "item 1: 1 tensors, want text"},
		"not a text":        {tokens, []tensor.Item{{ContentType: "application/json", Bytes: []byte("7")}}, `item 0: "7" of type "application/json", want text`},
		"many texts":        {tokens, slices.Repeat([]tensor.Item{text("a")}, 1001), "1001 texts, want at most 1000"},
		"other tensors":     {first, []tensor.Item{tensors}, `item 0: tensor "x", want input_ids, attention_mask and token_type_ids, each once`},
		"twice":             {first, ids(func(t []tensor.Tensor) { t[2] = t[0] }), `tensor "input_ids", want input_ids, attention_mask and token_type_ids, each once`},
		"no ids":            {first, []tensor.Item{{Tensors: tokenised([]int64{101, 102}).Tensors[1:]}}, "2 tensors without input_ids"},
		"other type":        {first, ids(func(t []tensor.Tensor) { t[0].Datatype = "INT32" }), `tensor "input_ids": INT32 [1 3] with 24 bytes, want INT64 [1, tokens]`},
		"batch":             {first, ids(func(t []tensor.Tensor) { t[0].Shape = []int64{3, 1} }), `INT64 [3 1] with 24 bytes, want INT64 [1, tokens]`},
		"huge shape":        {first, ids(func(t []tensor.Tensor) { t[0].Shape, t[0].Data = []int64{1, 1 << 61}, nil }), "with 0 bytes, want INT64 [1, tokens]"},
		"other mask":        {first, ids(func(t []tensor.Tensor) { t[1].Shape, t[1].Data = []int64{1, 2}, t[1].Data[:16] }), "attention_mask of 2 tokens, want 3, as in input_ids"},
		"mask with a hole":  {first, ids(func(t []tensor.Tensor) { t[1].Data[8] = 0 }), "attention_mask, want 1 for each token, then 0 for padding"},
		"all padding":       {first, ids(func(t []tensor.Tensor) { clear(t[1].Data) }), "attention_mask, want 1 for each token, then 0 for padding"},
		"second sentence":   {first, ids(func(t []tensor.Tensor) { t[2].Data[16] = 1 }), "token_type_ids, want 0"},
		"unknown id":        {first, ids(func(t []tensor.Tensor) { t[0].Data[10] = 1 }), "input_ids has 73128, want an id from 0 to 30521"},
		"negative id":       {first, ids(func(t []tensor.Tensor) { t[0].Data[7] = 0xff }), "want an id from 0 to 30521"},
		"too long":          {short, []tensor.Item{tokenised(make([]int64, 5))}, "item 0: got 5 tokens, want at most 4"},
		"long text":         {short, []tensor.Item{text("a b c")}, "item 0: got 5 tokens, want at most 4"},
		"embedding's shape": {last, []tensor.Item{{Tensors: []tensor.Tensor{{Name: "embedding", Datatype: "FP32", Shape: []int64{2, 384}, Data: make([]byte, 1536)}}}}, `tensor "embedding": FP32 [2 384] with 1536 bytes, want FP32 [batch, 384]`},
		"a number":          {first, []tensor.Item{{ContentType: "application/json", Bytes: []byte("7")}}, `item 0: "7" of type "application/json", want text`},
		"latin 1":           {first, []tensor.Item{text("caf\xe9")}, "item 0: 4 bytes of type \"text/plain\" that are not UTF-8"},
		"too many":          {first, slices.Repeat([]tensor.Item{text("a")}, 1001), "1001 texts, want at most 1000"},
		"text to pool":      {last, []tensor.Item{text("a")}, "item 0: bytes of type"},
		"wrong tensors":     {alone(model(t, "pool"), pool), []tensor.Item{tensors}, `item 0: model`},
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
	first, last := anyLength(model(t, "embed"), tokenizer(t)), alone(model(t, "pool"), pool)
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

// TestPaddingOfTokenisedTextsDoesNotCount sends a text with padding, and without mask and types.
func TestPaddingOfTokenisedTextsDoesNotCount(t *testing.T) {
	e := anyLength(model(t, "whole"), tokenizer(t))
	plain := tokenised([]int64{101, 7592, 2088, 102})
	encode := func(it tensor.Item) []tensor.Tensor {
		t.Helper()
		out, err := e(call(it))
		if err != nil {
			t.Fatal(err)
		}
		return out[0].Tensors
	}
	want := encode(plain)
	more := padded([][]int64{{101, 7592, 2088, 102}, make([]int64, 9)})
	for i := range more {
		more[i].Shape, more[i].Data = []int64{1, 9}, more[i].Data[:8*9]
	}
	if got := encode(tensor.Item{Tensors: more}); !reflect.DeepEqual(got, want) {
		t.Error("with padding: another embedding")
	}
	if got := encode(tensor.Item{Tensors: plain.Tensors[:1]}); !reflect.DeepEqual(got, want) {
		t.Error("with ids alone: another embedding")
	}
}

// TestVariantsEqualTheReference computes the embeddings of a stage that refuses long texts, and the
// accuracy of a stage that reads only the beginning of each text: the mean of the cosines. The
// stack of variants declares this accuracy.
func TestVariantsEqualTheReference(t *testing.T) {
	tok, whole := tokenizer(t), model(t, "whole")
	short, first, last := alone(whole, embedder{tok, 64, MaxTokens}.embed), alone(whole, embedder{tok, MaxTokens, 16}.embed), alone(broken{t}, pool)
	encode := func(h answers, r reference) ([]float32, error) {
		items, err := h(call(tokenised(r.IDs)))
		if err != nil {
			return nil, err
		}
		out, err := last(call(items...))
		if err != nil {
			t.Fatal(err)
		}
		var all [][]float32
		if err := json.Unmarshal(out[0].Bytes, &all); err != nil || len(all) != 1 {
			t.Fatalf("%s, %v", out[0].Bytes, err)
		}
		return all[0], nil
	}
	refused, sum := 0, 0.0
	for _, r := range references(t) {
		e, err := encode(short, r)
		if long := len(r.IDs) > 64; long != (err != nil) {
			t.Errorf("%d tokens: error %v, want one above 64 tokens", len(r.IDs), err)
		} else if long {
			refused++
		} else if c := cosine(e, r.Embedding); !(c >= 0.9999) {
			t.Errorf("%d tokens: cosine %.6f with the reference, want at least 0.9999: %q", len(r.IDs), c, r.Text)
		}
		if e, err = encode(first, r); err != nil {
			t.Fatal(err)
		}
		sum += cosine(e, r.Embedding)
	}
	if refused == 0 {
		t.Error("no text is longer than 64 tokens: this test proves little")
	}
	declared := 0.88 // in ../variants/stack.yml
	if mean := sum / 20; math.Abs(mean-declared) > 0.005 {
		t.Errorf("accuracy %.4f by the first 16 tokens, want the declared %v", mean, declared)
	}
}

func TestLimitsComeFromTheEnvironment(t *testing.T) {
	if n, err := limit(EnvMaxLength); n != MaxTokens || err != nil {
		t.Errorf("without it: %d, %v, want %d", n, err, MaxTokens)
	}
	for v, want := range map[string]int{"2": 2, "64": 64, "256": 256, "1": 0, "257": 0, "-3": 0, "x": 0, "64 tokens": 0} {
		t.Setenv(EnvMaxLength, v)
		n, err := limit(EnvMaxLength)
		if n != want || (err != nil) != (want == 0) || err != nil && !strings.Contains(err.Error(), fmt.Sprintf("environment MINILM_MAX_LENGTH: got %q, want 2 to 256", v)) {
			t.Errorf("%q: %d, %v, want %d", v, n, err, want)
		}
	}
}

func TestTokenizeWantsAVocabulary(t *testing.T) {
	t.Setenv(EnvVocabulary, filepath.Join(t.TempDir(), "none.txt"))
	if err := Tokenize().Place(t.Context(), &stage.Replica{}); err == nil || !strings.Contains(err.Error(), "none.txt") || !strings.Contains(err.Error(), EnvVocabulary) {
		t.Errorf("error %v, want the missing file and %s in it", err, EnvVocabulary)
	}
}

func TestPlaceWantsAModel(t *testing.T) {
	for _, h := range []stage.Hooks{Embed(), Pool()} {
		if err := h.Place(t.Context(), &stage.Replica{}); err == nil || !strings.Contains(err.Error(), "STAGECOACH_MODEL") {
			t.Errorf("error %v, want STAGECOACH_MODEL in it", err)
		}
	}
}
