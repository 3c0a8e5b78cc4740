package main

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/image/stack"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// TestMinilmInPyTorch deploys the minilm pipeline with its layers in PyTorch, and wakes it with the
// first request. The embeddings must be those of the reference. Each layer's replica must be a fork
// of a zygote that has mapped its parameters.
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
		if err := r.Deploy(t.Context(), client.FromStack(name, f)); err != nil {
			t.Fatal(err)
		}
	}
	texts, want := minilmReference(t)
	body, err := json.Marshal(texts)
	if err != nil {
		t.Fatal(err)
	}
	a := r.must(http.StatusOK, http.MethodPost, "/function/minilm-torch", string(body), "Content-Type", "application/json", "X-Timeout", "10m")
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
	a = r.must(http.StatusOK, http.MethodPost, "/function/minilm-torch", texts[0], "Content-Type", "text/plain")
	t.Logf("one text, with all stages there: %v", a.Took)
	for name, f := range stack.Functions {
		if f.Lang != "python3-stage" {
			continue
		}
		starts := client.ReplicaStarts(r.line(name).Events)
		if len(starts) == 0 || starts[0].Path != "fork" {
			t.Errorf("%s: starts %+v, want a fork of a zygote that has mapped its parameters", name, starts)
		}
	}
	a = r.must(http.StatusBadRequest, http.MethodPost, "/function/minilm-torch-layer-3", "text")
	if !strings.Contains(string(a.Body), "want tensors") {
		t.Errorf("text for a layer: %s, want what it wants", a.Body)
	}
}

// TestPyTorchCachesItsKernels asks PyTorch where it keeps compiled kernels. To answer, PyTorch
// needs a name for the process's user and a folder that this user can write to.
func TestPyTorchCachesItsKernels(t *testing.T) {
	t.Parallel()
	python := proctest.Torch(t)
	images := t.TempDir()
	r := start(t, "--images", images, "--ort", "")
	c := &operator{t, t.TempDir(), r.Base}
	if err := os.Mkdir(filepath.Join(c.dir, "caches"), 0o755); err != nil {
		t.Fatal(err)
	}
	c.write("caches/handler.py", `import os
import torch
import stagecoach as sc

@sc.each
def infer(state, call):
    try:
        from torch._inductor.runtime.cache_dir_utils import cache_dir
    except ImportError:
        return "no compiler"
    os.makedirs(os.path.join(cache_dir(), "x"))
    return cache_dir()
`)
	c.write("stack.yml", "version: 1.0\nprovider: {name: openfaas, gateway: \"http://127.0.0.1:8080\"}\nfunctions:\n"+
		"  caches: {lang: python3-stage, handler: ./caches, image: \"example/caches:1\", fprocess: "+python+" ./stage}\n")
	c.run("caches", "", "build", "--images", images, "--check-imports=false")
	c.run("caches: created", "", "deploy")
	out := string(r.must(http.StatusOK, http.MethodPost, "/function/caches", "x", "X-Timeout", "5m").Body)
	if out == "no compiler" {
		t.Skipf("%s has no compiler of kernels: PyTorch 2.11 has", python)
	}
	if !strings.HasPrefix(out, "/tmp/stagecoach-compiled-") {
		t.Errorf("it keeps them in %q, want the folder of its zygote in /tmp", out)
	}
}
