package main

import (
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// TestPackagesAreKept builds a Python stage with packages of an index, and builds it again in
// another project after the index is gone. Both images are the same. A package of one index does
// not replace a package of another.
func TestPackagesAreKept(t *testing.T) {
	t.Parallel()
	py := proctest.Pip(t)
	index, home := t.TempDir(), t.TempDir()
	proctest.Wheel(t, index, "greet", "1.0", map[string]string{"greet/__init__.py": "import words\n\ndef main(): ...\n"})
	proctest.Wheel(t, index, "words", "2.1", map[string]string{"words/__init__.py": ""})
	var asked atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		name := strings.TrimSuffix(strings.TrimPrefix(r.URL.Path, "/simple/"), "/")
		all, err := filepath.Glob(filepath.Join(index, filepath.Base(name)+"-*.whl"))
		switch {
		case strings.HasSuffix(name, ".whl"):
			http.ServeFile(w, r, filepath.Join(index, filepath.Base(name)))
		case err != nil || len(all) != 1:
			http.NotFound(w, r)
		default:
			file := filepath.Base(all[0])
			w.Header().Set("Content-Type", "text/html")
			_, _ = w.Write([]byte(`<!DOCTYPE html><html><body><a href="` + file + `">` + file + "</a></body></html>"))
		}
	}))
	defer server.Close()

	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	build := func(url string) (string, error) {
		t.Helper()
		dir := t.TempDir()
		for file, text := range map[string]string{
			"greets/handler.py":       "import greet\n\ndef infer(state, calls):\n    return calls\n",
			"greets/requirements.txt": "--index-url " + url + "/simple/\ngreet==1.0\nwords==2.1  # which it imports\n",
			"stack.yml": "version: 1.0\nprovider: {name: openfaas}\nfunctions:\n  greets: {lang: python3-stage, handler: ./greets, image: greets, fprocess: \"" +
				py + " ./stage\"}\n",
		} {
			if err := os.MkdirAll(filepath.Join(dir, "greets"), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		cmd := exec.CommandContext(t.Context(), self, "build", "--json")
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), actAsMain+"=1", "HOME="+home, "XDG_CACHE_HOME="+filepath.Join(home, ".cache"), "PIP_CONFIG_FILE=/dev/null", "PIP_NO_CACHE_DIR=1", "PIP_RETRIES=0")
		var said strings.Builder
		cmd.Stderr = &said
		out, err := cmd.Output()
		_, digest, _ := strings.Cut(string(out), `"digest":"`)
		digest, _, _ = strings.Cut(digest, `"`)
		if err == nil {
			return digest, nil
		}
		return said.String(), err
	}
	first, err := build(server.URL)
	if err != nil || first == "" || asked.Load() == 0 {
		t.Fatalf("with an index, asked %d times: %v\n%s", asked.Load(), err, first)
	}
	server.Close()
	again, err := build(server.URL)
	if err != nil {
		t.Fatalf("with what is kept: %v\n%s", err, again)
	}
	if again != first {
		t.Errorf("the image is %s, want that of the first build, %s", again, first)
	}
	if said, err := build("http://127.0.0.1:1"); err == nil || !strings.Contains(said, "greet==1.0") {
		t.Errorf("another index, which is not there: %v, %q, want an error that names greet==1.0", err, said)
	}
}
