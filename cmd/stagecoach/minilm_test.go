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
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// TestMinilm deploys the eight stages of the minilm stack in a random order, and wakes them all
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
	body, err := json.Marshal(texts)
	if err != nil {
		t.Fatal(err)
	}
	a := r.must(http.StatusOK, http.MethodPost, "/function/minilm", string(body), "Content-Type", "application/json")
	var got [][]float32
	if err := json.Unmarshal(a.Body, &got); err != nil || len(got) != len(want) {
		t.Fatalf("%d embeddings, want %d: %v", len(got), len(want), err)
	}
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
	t.Logf("one text of 8 tokens through eight stages: median %v of %d", took[len(took)/2], len(took))

	if a := r.must(http.StatusOK, http.MethodPost, "/function/minilm", `[]`, "Content-Type", "application/json"); string(a.Body) != "[]" {
		t.Errorf("no texts: %s, want []", a.Body)
	}
	a = r.must(http.StatusBadRequest, http.MethodPost, "/function/minilm", `["a", 7]`, "Content-Type", "application/json")
	if !strings.Contains(string(a.Body), `stage "minilm-embed"`) || !strings.Contains(string(a.Body), "item 1") {
		t.Errorf("a number for a text: %s, want the stage that refused it, and which item", a.Body)
	}
}

// checkMinilmTiming checks that there are eight stages in order, and that the layers are called
// once per batch.
func checkMinilmTiming(t *testing.T, a client.Answer) {
	t.Helper()
	stages := []string{"minilm-embed"}
	for l := range 6 {
		stages = append(stages, fmt.Sprintf("minilm-layer-%d", l+1))
	}
	stages = append(stages, "minilm-pool")
	timing := openloop.ServerTiming(a.Header.Get("Server-Timing"))
	if len(timing) != len(stages) {
		t.Fatalf("Server-Timing %q, want %v", a.Header.Get("Server-Timing"), stages)
	}
	for i, s := range timing {
		once := i == 0 || i == len(stages)-1
		if s.Stage != stages[i] || s.Service <= 0 || once != (s.Calls == 1) {
			t.Errorf("stage %d: %+v, want %s with a time, called once if it is the first or last, else once a batch", i, s, stages[i])
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
