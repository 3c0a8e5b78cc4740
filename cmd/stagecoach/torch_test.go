package main

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/stack"
)

// TestMinilmInPyTorch deploys the minilm pipeline whose layers are in PyTorch, and wakes it with the first request: embeddings are
// the reference's, and each layer's replica is a fork of a zygote that has mapped its parameters.
func TestMinilmInPyTorch(t *testing.T) {
	t.Parallel()
	python := proctest.Torch(t)
	r := start(t)
	stack, err := stack.Read("../../functions/torch/minilm/stack.yml")
	if err != nil {
		t.Fatal(err)
	}
	for name, f := range stack.Functions {
		if f.Lang == "python3-stage" {
			f.FProcess = python + " ./stage"
		}
		if err := r.deploy(t.Context(), stackDeployment(name, f)); err != nil {
			t.Fatal(err)
		}
	}
	texts, want := minilmReference(t)
	body, err := json.Marshal(texts)
	if err != nil {
		t.Fatal(err)
	}
	a := r.must(http.StatusOK, http.MethodPost, "/function/minilm-torch", string(body), "Content-Type", "application/json")
	var got [][]float32
	if err := json.Unmarshal(a.body, &got); err != nil || len(got) != len(want) {
		t.Fatalf("%d embeddings, want %d: %v", len(got), len(want), err)
	}
	for i := range want {
		if c := cosine(got[i], want[i]); !(c >= 0.9999) {
			t.Errorf("text %d: cosine %.6f, want at least 0.9999: %q", i, c, texts[i])
		}
	}
	t.Logf("from nothing: 20 texts in %v, by %s", a.took, a.header.Get("Server-Timing"))
	a = r.must(http.StatusOK, http.MethodPost, "/function/minilm-torch", texts[0], "Content-Type", "text/plain")
	t.Logf("one text, with all stages there: %v", a.took)
	for name, f := range stack.Functions {
		if f.Lang != "python3-stage" {
			continue
		}
		starts := replicaStarts(r.line(name).Events)
		if len(starts) == 0 || starts[0].path != "fork" {
			t.Errorf("%s: starts %+v, want a fork of a zygote that has mapped its parameters", name, starts)
		}
	}
	a = r.must(http.StatusBadRequest, http.MethodPost, "/function/minilm-torch-layer-3", "text")
	if !strings.Contains(string(a.body), "want tensors") {
		t.Errorf("text for a layer: %s, want what it wants", a.body)
	}
}
