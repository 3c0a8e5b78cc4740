package main

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	openloop "github.com/stagecoach-serving/stagecoach/bench/load"
	"github.com/stagecoach-serving/stagecoach/image/stack"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// TestMinilm deploys the nine stages of the minilm stack in a random order, and wakes them all
// with the first request. The embeddings must be those of the reference.
func TestMinilm(t *testing.T) {
	t.Parallel()
	r := start(t)
	stack, err := stack.Read("../../functions/minilm/stack.yml")
	if err != nil {
		t.Fatal(err)
	}
	for name, f := range stack.Functions { // map order is random
		if err := r.Deploy(t.Context(), client.FromStack(name, f)); err != nil {
			t.Fatal(err)
		}
	}
	for name := range stack.Functions { // zygotes and what packs their parameters may be there
		if s, err := r.Status(t.Context(), name); err != nil || s.Replicas != 0 {
			t.Errorf("%s before the first request: %+v, %v, want no replica", name, s, err)
		}
	}
	texts, want := minilmReference(t)
	a, got := r.embeddings("/function/minilm", texts)
	for i := range want {
		if c := cosine(got[i], want[i]); !(c >= 0.9999) {
			t.Errorf("text %d: cosine %.6f, want at least 0.9999: %q", i, c, texts[i])
		}
	}
	t.Logf("from nothing: 20 texts in %v, by %s", a.Took, a.Header.Get("Server-Timing"))
	checkMinilmTiming(t, a)

	var one [][]float32
	var took []time.Duration
	for range 50 {
		a = r.must(http.StatusOK, http.MethodPost, "/function/minilm", texts[0], "Content-Type", "text/plain")
		took = append(took, a.Took)
	}
	slices.Sort(took)
	if err := json.Unmarshal(a.Body, &one); err != nil || len(one) != 1 || !(cosine(one[0], want[0]) >= 0.9999) {
		t.Errorf("a plain text: %.60s…, %v, want a list of one embedding", a.Body, err)
	}
	t.Logf("one text of 8 tokens through nine stages: median %v of %d", took[len(took)/2], len(took))

	if a := r.must(http.StatusOK, http.MethodPost, "/function/minilm", `[]`, "Content-Type", "application/json"); string(a.Body) != "[]" {
		t.Errorf("no texts: %s, want []", a.Body)
	}
	a = r.must(http.StatusBadRequest, http.MethodPost, "/function/minilm", `["a", 7]`, "Content-Type", "application/json")
	if !strings.Contains(string(a.Body), `stage "minilm-tokenize"`) || !strings.Contains(string(a.Body), "item 1") {
		t.Errorf("a number for a text: %s, want the stage that refused it, and which item", a.Body)
	}
}

// embeddings returns the answer of a minilm pipeline for texts, and the embeddings in it.
func (r *rig) embeddings(path string, texts []string) (a client.Answer, got [][]float32) {
	r.t.Helper()
	body, err := json.Marshal(texts)
	if err != nil {
		r.t.Fatal(err)
	}
	a = r.must(http.StatusOK, http.MethodPost, path, string(body), "Content-Type", "application/json", "X-Timeout", "10m")
	if err := json.Unmarshal(a.Body, &got); err != nil || len(got) != len(texts) {
		r.t.Fatalf("%d embeddings, want %d: %v", len(got), len(texts), err)
	}
	return a, got
}

// TestMinilmVariants deploys the stack of variants. Each answer of the pipeline is that of one of
// the functions that can serve the stage, called by its own name. The one for short texts refuses
// long ones.
func TestMinilmVariants(t *testing.T) {
	t.Parallel()
	r := start(t)
	stack, err := stack.Read("../../functions/minilm/variants/stack.yml")
	if err != nil {
		t.Fatal(err)
	}
	for name, f := range stack.Functions { // map order is random
		if err := r.Deploy(t.Context(), client.FromStack(name, f)); err != nil {
			t.Fatal(err)
		}
	}
	texts, want := minilmReference(t)
	longest := slices.MaxFunc(texts, func(a, b string) int { return len(a) - len(b) })
	// alone returns the embedding that a function computes if it is called by its own name.
	alone := func(name, text string) []float32 {
		t.Helper()
		a := r.must(http.StatusOK, http.MethodPost, "/function/"+name, text, "Content-Type", "text/plain", "Accept", "application/json", "X-Timeout", "10m")
		var got struct {
			Outputs []struct {
				Name string
				Data []float32
			}
		}
		if err := json.Unmarshal(a.Body, &got); err != nil || len(got.Outputs) != 1 || got.Outputs[0].Name != "embedding" {
			t.Fatalf("%s: %.200s, %v, want one tensor embedding", name, a.Body, err)
		}
		return got.Outputs[0].Data
	}
	_, got := r.embeddings("/function/minilm-variants", texts)
	for i := range want {
		if cosine(got[i], want[i]) >= 0.9999 {
			continue
		}
		if c := cosine(got[i], alone("minilm-encode-first-16", texts[i])); !(c >= 0.9999) {
			t.Errorf("text %d: cosine %.6f with the answer of the less accurate variant, and another one with the reference: %q", i, c, texts[i])
		}
	}
	for _, name := range []string{"minilm-encode", "minilm-encode-64"} {
		if c := cosine(alone(name, texts[0]), want[0]); !(c >= 0.9999) {
			t.Errorf("%s: cosine %.6f, want at least 0.9999", name, c)
		}
	}
	a := r.must(http.StatusBadRequest, http.MethodPost, "/function/minilm-encode-64", longest, "Content-Type", "text/plain")
	if !strings.Contains(string(a.Body), "got 256 tokens, want at most 64") {
		t.Errorf("a long text for the variant for short ones: %s, want both lengths", a.Body)
	}
	var p provider.PipelineStatus
	if err := r.Get(t.Context(), "/system/pipelines/minilm-variants", &p); err != nil {
		t.Fatal(err)
	}
	if v := p.Stages[1].Variants; len(p.Stages) != 3 || len(v) != 2 || v[0].Name != "minilm-encode-64" || v[0].MaxLength != 64 || v[1].Accuracy != 0.88 {
		t.Errorf("its stages: %+v, want the two variants below the second", p.Stages)
	}
}

// checkMinilmTiming checks that there are nine stages in order, and that the layers are called
// once per batch.
func checkMinilmTiming(t *testing.T, a client.Answer) {
	t.Helper()
	stages := []string{"minilm-tokenize", "minilm-embed"}
	for l := range 6 {
		stages = append(stages, fmt.Sprintf("minilm-layer-%d", l+1))
	}
	stages = append(stages, "minilm-pool")
	timing := openloop.ServerTiming(a.Header.Get("Server-Timing"))
	if len(timing) != len(stages) {
		t.Fatalf("Server-Timing %q, want %v", a.Header.Get("Server-Timing"), stages)
	}
	for i, s := range timing {
		once := i < 2 || i == len(stages)-1
		if s.Stage != stages[i] || s.Service <= 0 || once != (s.Calls == 1) {
			t.Errorf("stage %d: %+v, want %s with a time, called once per batch if it is a layer, else once", i, s, stages[i])
		}
	}
}

// minilmReference returns texts and what the reference library makes of them.
func minilmReference(t *testing.T) (texts []string, embeddings [][]float32) {
	t.Helper()
	b, err := os.ReadFile("../../functions/minilm/testdata/reference.json")
	if err != nil {
		t.Fatal(err)
	}
	var all struct {
		Texts []struct {
			Text      string
			Embedding []float32
		}
	}
	if err := json.Unmarshal(b, &all); err != nil || len(all.Texts) != 20 {
		t.Fatalf("%d texts, %v", len(all.Texts), err)
	}
	for _, r := range all.Texts {
		texts, embeddings = append(texts, r.Text), append(embeddings, r.Embedding)
	}
	return texts, embeddings
}

// cosine is NaN when one of the two is no embedding.
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
