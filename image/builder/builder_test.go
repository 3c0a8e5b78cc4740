package builder

import (
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach"
	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/image/stack"
)

// tree writes files. The map's keys are their names.
func tree(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// list returns the files below a folder, sorted.
func list(t *testing.T, dir string) []string {
	t.Helper()
	var out []string
	if err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			rel, _ := filepath.Rel(dir, path)
			out = append(out, rel)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return out
}

func open(t *testing.T, dir string, functions map[string]stack.Function) *Builder {
	t.Helper()
	return openIn(t, t.TempDir(), dir, functions)
}

// openIn returns a builder in a folder, with its own store.
func openIn(t *testing.T, at, dir string, functions map[string]stack.Function) *Builder {
	t.Helper()
	store, err := image.OpenStore(at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	b, err := New(t.Context(), &stack.File{Dir: dir, Functions: functions}, store)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

// handler copies the template's handler into a folder.
func handler(t *testing.T, dir, lang string) {
	t.Helper()
	f, err := fs.Sub(stagecoach.Templates(), lang+"/function")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(dir, f); err != nil {
		t.Fatal(err)
	}
}

// TestBuild builds each kind of handler twice, outside this repository and from different folders.
// Both builds give the same image.
func TestBuild(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles with cgo")
	}
	const main = `package main

import (
	_ "embed"

	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

//go:embed words.txt
var words []byte

func main() {
	stage.Main(stage.Hooks{Infer: stage.Each(func(*stage.Call) (tensor.Activation, error) {
		return tensor.Activation{{ContentType: "text/plain", Bytes: words}}, nil
	})})
}
`
	functions := map[string]stack.Function{
		"code":   {Lang: "go-stage", Handler: "code"},
		"model":  {Lang: "onnx-stage", Handler: "model"},
		"bare":   {Lang: "onnx-stage", Handler: "bare"},
		"main":   {Lang: "go-stage", Handler: "main"},
		"module": {Lang: "go-stage", Handler: "repo/functions/module"},
		// Names that the Builder's own folder uses, too.
		"bin":      {Lang: "go-stage", Handler: "code"},
		"function": {Lang: "go-stage", Handler: "code"},
		"images":   {Lang: "go-stage", Handler: "code"},
	}
	want := map[string][]string{
		"code":   {"data/words.txt", "stage"},
		"model":  {"model/model.onnx", "stage"},
		"bare":   {"model/model.onnx", "stage"},
		"main":   {"stage", "words.txt"},
		"module": {"stage"},

		"bin":      {"data/words.txt", "stage"},
		"function": {"data/words.txt", "stage"},
		"images":   {"data/words.txt", "stage"},
	}
	digests := map[string]string{}
	for round := range 2 {
		dir := t.TempDir()
		handler(t, filepath.Join(dir, "code"), "go-stage")
		handler(t, filepath.Join(dir, "model"), "onnx-stage")
		handler(t, filepath.Join(dir, "bare"), "onnx-stage")
		if err := os.Remove(filepath.Join(dir, "bare/handler.go")); err != nil {
			t.Fatal(err)
		}
		handler(t, filepath.Join(dir, "repo/functions/module"), "go-stage")
		tree(t, dir, map[string]string{
			"code/data/words.txt": "w", "code/.hidden": "h", "code/README.md": "r", "code/testdata/x.txt": "x",
			"main/main.go": main, "main/words.txt": "words",
			"repo/go.mod":                     "module example.com/repo\n\ngo 1.24\n",
			"repo/internal/own/own.go":        "package own\n\nconst Name = \"own\"\n",
			"repo/functions/module/import.go": "package function\n\nimport _ \"example.com/repo/internal/own\"\n",
		})
		before := list(t, dir)
		b := open(t, dir, functions)
		for _, name := range slices.Sorted(maps.Keys(want)) {
			files := want[name]
			if round > 0 && name != "code" && name != "module" { // one handler of each kind
				continue
			}
			r, err := b.Build(t.Context(), name)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if got := list(t, r.Dir); !slices.Equal(got, files) {
				t.Errorf("%s: files %v, want %v", name, got, files)
			}
			digest, err := r.Image.Digest()
			if err != nil {
				t.Fatal(err)
			}
			if round > 0 && digests[name] != digest {
				t.Errorf("%s: digest %s, before %s", name, digest, digests[name])
			}
			digests[name] = digest
		}
		if after := list(t, dir); !slices.Equal(before, after) {
			t.Errorf("the build has left files among the handlers: %v, before %v", after, before)
		}
	}
	different := slices.Compact(slices.Sorted(maps.Values(digests)))
	// If the handler has no hooks, the template's hooks are used.
	if len(different) != 4 || digests["model"] != digests["bare"] || digests["code"] != digests["images"] {
		t.Errorf("digests %v", digests)
	}
}

func TestConfig(t *testing.T) {
	for language, want := range map[string][]string{
		"go-stage": nil, "onnx-stage": {"STAGECOACH_MODEL=model/model.onnx"}, "python3-stage": {"STAGECOACH_RUNTIME=python"},
	} {
		if c := config(language, t.TempDir()); !slices.Equal(c.Env, want) || !slices.Equal(c.Entrypoint, []string{"/stage"}) || c.Labels["dev.stagecoach.protocol"] != "1" {
			t.Errorf("%s: %+v, want the environment %v", language, c, want)
		}
	}
}

func TestBuildRefuses(t *testing.T) {
	dir := t.TempDir()
	handler(t, filepath.Join(dir, "code"), "go-stage")
	tree(t, dir, map[string]string{
		"broken/handler.go": "package function\n\nfunc Hooks() int { return x }\n", "syntax/handler.go": "pakage",
		"two/a.go": "package a\n", "two/b.go": "package b\n", "file": "", "foreign/handler.go": "package function\n\nimport _ \"example.com/foreign\"\n",
		"template/mine/template.yml": "language: node\n", "empty/data.txt": "",
	})
	if err := os.MkdirAll(filepath.Join(dir, "linked/model"), 0o755); err != nil {
		t.Fatal(err)
	}
	for link, to := range map[string]string{"linked/model/model.onnx": "/nowhere/model.onnx", "code/circle": "."} {
		if err := os.Symlink(to, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	for name, tc := range map[string]struct {
		fn   stack.Function
		want []string
	}{
		"no handler":       {stack.Function{Lang: "go-stage"}, []string{"handler: got none"}},
		"handler missing":  {stack.Function{Lang: "go-stage", Handler: "./none"}, []string{"handler: stat ", "/none: no such file"}},
		"handler a file":   {stack.Function{Lang: "go-stage", Handler: "file"}, []string{"is a file, want a folder"}},
		"dockerfile":       {stack.Function{Lang: "dockerfile", Handler: "code"}, []string{`lang: "dockerfile" is built with Docker (faas-cli build); without it, want go-stage, onnx-stage, python3-stage, or a template`}},
		"no lang":          {stack.Function{Handler: "code"}, []string{`lang: "" is built with Docker`}},
		"lang with a path": {stack.Function{Lang: "../go-stage", Handler: "code"}, []string{`lang: "../go-stage" is built`}},
		"another template": {stack.Function{Lang: "mine", Handler: "code"}, []string{`lang: "mine" is built with Docker`}},
		"does not compile": {stack.Function{Lang: "go-stage", Handler: "broken"}, []string{"go build: ", "/broken/handler.go:3:", "undefined: x"}},
		"no Go":            {stack.Function{Lang: "go-stage", Handler: "syntax"}, []string{"handler.go:1:1: expected 'package'"}},
		"two packages":     {stack.Function{Lang: "go-stage", Handler: "two"}, []string{"has the packages a and b, want one"}},
		"foreign module":   {stack.Function{Lang: "go-stage", Handler: "foreign"}, []string{"example.com/foreign", "go mod init handler/function"}},
		"link to nothing":  {stack.Function{Lang: "onnx-stage", Handler: "linked"}, []string{"linked/model/model.onnx is a link to /nowhere/model.onnx, which is not there"}},
		"links in circles": {stack.Function{Lang: "go-stage", Handler: "code"}, []string{"folders deep, want fewer"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := open(t, dir, map[string]stack.Function{"f": tc.fn}).Build(t.Context(), "f")
			for _, want := range tc.want {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("got %v, want %q", err, want)
				}
			}
		})
	}
	t.Run("nothing to compile with", func(t *testing.T) {
		t.Setenv("PATH", t.TempDir())
		_, err := open(t, dir, map[string]stack.Function{"f": {Lang: "go-stage", Handler: "empty"}}).Build(t.Context(), "f")
		if err == nil || !strings.Contains(err.Error(), "the Go toolchain is missing") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("no C compiler", func(t *testing.T) {
		t.Setenv("CC", "no-such-compiler -O2")
		_, err := open(t, dir, map[string]stack.Function{"f": {Lang: "go-stage", Handler: "empty"}}).Build(t.Context(), "f")
		if err == nil || !strings.Contains(err.Error(), "the C compiler no-such-compiler is missing") {
			t.Errorf("got %v", err)
		}
	})
}

func TestPutFolder(t *testing.T) {
	dir := t.TempDir()
	from, images := filepath.Join(dir, "from"), filepath.Join(dir, "images")
	tree(t, from, map[string]string{"stage": "one", "model/a": "a", "gone": "x", "build/.b": "b"})
	put := func() (stage, model os.FileInfo) {
		t.Helper()
		if err := PutFolder(images, "team/f:1", from); err != nil {
			t.Fatal(err)
		}
		if got := list(t, filepath.Join(images, "team")); !slices.Equal(got, prefixed("f/1/", list(t, from))) {
			t.Fatalf("files %v, want %v", got, list(t, from))
		}
		stage, err := os.Stat(filepath.Join(images, "team/f/1/stage"))
		if err != nil {
			t.Fatal(err)
		}
		model, err = os.Stat(filepath.Join(images, "team/f/1/model/a"))
		if err != nil {
			t.Fatal(err)
		}
		return stage, model
	}
	stage, model := put()
	open, err := os.Open(filepath.Join(images, "team/f/1/stage")) // the stage is running
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	tree(t, from, map[string]string{"stage": "two"})
	if err := os.Remove(filepath.Join(from, "gone")); err != nil {
		t.Fatal(err)
	}
	stage2, model2 := put()
	if os.SameFile(stage, stage2) || !os.SameFile(model, model2) {
		t.Error("want a new stage, and the old model")
	}
	if err := os.Chmod(filepath.Join(from, "stage"), 0o755); err != nil {
		t.Fatal(err)
	}
	if stage3, _ := put(); stage3.Mode().Perm() != 0o755 {
		t.Errorf("mode %v, want that of the new file", stage3.Mode())
	}
	var b [8]byte
	if n, _ := open.Read(b[:]); string(b[:n]) != "one" {
		t.Errorf("a running file was changed: %q", b[:n])
	}
	for _, bad := range []string{"../f:1", "/f:1", "f:.."} {
		if err := PutFolder(filepath.Join(images, "x"), bad, from); err == nil || !strings.Contains(err.Error(), "want repository[:tag]") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func prefixed(p string, all []string) []string {
	out := slices.Clone(all)
	for i := range out {
		out[i] = p + out[i]
	}
	return out
}
