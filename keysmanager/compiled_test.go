package keysmanager

import (
	"context"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// pyCompiles compiles a function with torch.compile in load, and runs it once as infer does. The
// replica "other" also runs it on another shape.
const pyCompiles = `
import os
import torch

LOADED = os.getpid()

@torch.compile(dynamic=False)
def computed(x):
    return (x.sin() + 1).relu().sum(-1)

def load(model):
    with torch.no_grad():
        computed(torch.ones(64, 1024))
    return computed

def place(state, replica):
    return state, replica

def infer(state, calls):
    from torch._dynamo.utils import counters
    computed, me = state
    value = computed(torch.ones(64, 1024))[:3].tolist()
    if me.name == "other":
        computed(torch.ones(65, 1025))
    out = {"pid": os.getpid(), "loaded": LOADED, "threads": torch.get_num_threads(), "compiled": {
        "graphs": counters["stats"]["unique_graphs"], "hits": counters["inductor"]["fxgraph_cache_hit"],
        "misses": counters["inductor"]["fxgraph_cache_miss"], "value": value, "folder": os.environ["TORCHINDUCTOR_CACHE_DIR"]}}
    return [out for c in calls]
`

// compiles returns an interpreter whose PyTorch has torch.compile, or skips the test. Debian's
// PyTorch lacks it.
func compiles(t *testing.T) string {
	t.Helper()
	python := proctest.Torch(t)
	out, err := exec.CommandContext(t.Context(), python, "-c", "import torch; print(torch.__version__, hasattr(torch, 'compile'))").Output()
	if err != nil {
		t.Fatal(err)
	}
	if version := strings.TrimSpace(string(out)); strings.HasSuffix(version, "False") {
		t.Skipf("PyTorch %s has no torch.compile: make test-torch runs this test with one that has", version)
	}
	if _, err := exec.LookPath("g++"); err != nil {
		t.Skipf("torch.compile wants a compiler of C++ on the CPU: %v", err)
	}
	return python
}

// files returns the files below a folder, by their relative paths.
func files(t *testing.T, folder string) (out []string) {
	t.Helper()
	err := filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			out = append(out, strings.TrimPrefix(path, folder))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestPythonCompilesOnce checks code that a stage's load hook compiles with torch.compile. Neither
// its replicas nor a later zygote of the image compile that code again. Code that a replica
// compiles does not get into the folder that later zygotes read.
func TestPythonCompilesOnce(t *testing.T) {
	python, cache := compiles(t), t.TempDir()
	n := pyNode(t, t.TempDir(), map[string]string{"compiles": pyCompiles}, func(c *Config) { c.Cache = cache })
	s := pySpec(python, "compiles", "TMPDIR="+t.TempDir(), "HOME="+t.TempDir(), "USER=stage")
	load := func() { // the C++ compiler takes seconds, or minutes on a busy machine
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 6*time.Minute)
		defer cancel()
		if _, err := n.Load(ctx, s); err != nil {
			t.Fatal(err)
		}
	}
	load()
	var first probed
	for _, name := range []string{"a", "b"} {
		r := n.start(name, s)
		p := n.probe(r)
		if r.Path == PathCold || p.PID == p.Loaded || p.Threads != 2 {
			t.Errorf("%s: path %s, %d threads, want a fork with 2", name, r.Path, p.Threads)
		}
		if c := p.Compiled; c.Graphs != 1 || c.Misses != 1 || c.Hits != 0 {
			t.Errorf("%s: %+v, want the one graph that its zygote has compiled", name, c)
		}
		if first.PID != 0 && !slices.Equal(p.Compiled.Value, first.Compiled.Value) {
			t.Errorf("%s answers %v, and a %v", name, p.Compiled.Value, first.Compiled.Value)
		}
		first = p
	}
	kept := files(t, cache)
	if !slices.ContainsFunc(kept, func(f string) bool { return strings.HasSuffix(f, ".so") }) {
		t.Errorf("for later zygotes there is %q, want compiled code", kept)
	}
	before := len(files(t, first.Compiled.Folder))
	if c := n.probe(n.start("other", s)).Compiled; c.Graphs != 2 || c.Misses != 2 {
		t.Errorf("with another shape: %+v, want one graph more", c)
	}
	if now := files(t, cache); !slices.Equal(now, kept) {
		t.Errorf("a replica has made %q of %q", now, kept)
	}
	if now := len(files(t, first.Compiled.Folder)); now <= before {
		t.Errorf("%d files after another shape, want more than %d", now, before)
	}

	if _, err := n.Invalidate(t.Context(), s.Function); err != nil {
		t.Fatal(err)
	}
	// With an account, the zygote's end removes this folder.
	if err := os.RemoveAll(first.Compiled.Folder); err != nil {
		t.Fatal(err)
	}
	load()
	p := n.probe(n.start("later", s))
	if p.Loaded == first.Loaded || !slices.Equal(p.Compiled.Value, first.Compiled.Value) {
		t.Errorf("of zygote %d, which answers %v, want another one and %v", p.Loaded, p.Compiled.Value, first.Compiled.Value)
	}
	if c := p.Compiled; c.Graphs != 1 || c.Misses != 0 || c.Hits != 1 {
		t.Errorf("of a later zygote: %+v, want a graph that was kept", c)
	}
}
