package main

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// filesIn lists the files below a folder, relative to it.
func filesIn(t *testing.T, dir string) (all []string) {
	t.Helper()
	err := fs.WalkDir(os.DirFS(dir), ".", func(name string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			all = append(all, name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// pullTemplates copies into dir/template what `faas-cli template pull` of this repository copies:
// the folders below template, as git has them.
func pullTemplates(t *testing.T, dir string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "git", "ls-files")
	cmd.Dir = "../../templates"
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range strings.Fields(string(out)) {
		from := filepath.Join(cmd.Dir, file)
		info, err := os.Stat(from)
		if err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		to := filepath.Join(dir, "template", file)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(to, text, info.Mode()); err != nil {
			t.Fatal(err)
		}
	}
}

// TestNew creates a function from each template with `stagecoach new`, and checks which files this
// writes. It does so with the templates that the program contains, and with those that faas-cli
// pulls. The functions must build, run and answer without a change.
func TestNew(t *testing.T) {
	t.Parallel()
	images := t.TempDir()
	r := start(t, "--images", images)
	want := map[string][]string{
		"go-stage":      {"handler.go", "handler_test.go"},
		"onnx-stage":    {"handler.go", "model/model.onnx"},
		"python3-stage": {"handler.py", "requirements.txt", "test_handler.py"},
	}
	tensors := `{"inputs":[{"name":"x","datatype":"FP32","shape":[3],"data":[1,2,3]}]}`
	for from, c := range map[string]*operator{"carried": {t, t.TempDir(), r.Base}, "pulled": {t, t.TempDir(), r.Base}} {
		if from == "pulled" {
			pullTemplates(t, c.dir)
		}
		for _, lang := range []string{"go-stage", "onnx-stage", "python3-stage"} {
			name := from + "-" + lang
			c.run(`^`+name+`: made from `+lang+"\nstack.yml: has it now\n", "", "new", name, "--lang", lang, "--prefix", "example")
			if got := filesIn(t, filepath.Join(c.dir, name)); !slices.Equal(got, want[lang]) {
				t.Errorf("%s has %q, want %q", name, got, want[lang])
			}
		}
		c.run("(?s)"+from+"-go-stage.*"+from+"-onnx-stage.*"+from+"-python3-stage", "", "build", "--images", images)
		c.run("created", "", "deploy")
		c.run("^You said: hello\n$", "hello", "invoke", from+"-go-stage")
		c.run(`\[3,5,7\]`, tensors, "invoke", from+"-onnx-stage", "--header", "Content-Type=application/json")
		c.run("hello", "hello", "invoke", from+"-python3-stage")
	}
}

// TestNewRefuses: a second try names what exists already, and changes nothing.
func TestNewRefuses(t *testing.T) {
	t.Parallel()
	c := &operator{t, t.TempDir(), "http://127.0.0.1:1"}
	c.run("shout: made from go-stage", "", "new", "shout", "--lang", "go-stage")
	c.run("double: made from onnx-stage", "", "new", "double", "--lang", "onnx-stage", "-f", "other.yml")
	before := filesIn(t, c.dir)
	c.write("flow.yml", "version: 1.0\nprovider: {name: openfaas}\nfunctions: {a: {lang: go-stage, handler: ./a, image: a}}\n")
	c.write("shout/handler.go", "// mine\n")
	// It succeeds, as mkdir -p does.
	c.run(`^shout: is there already, and in stack.yml; nothing was changed\n`, "", "new", "shout", "--lang", "go-stage")
	c.refuse(`new: stack.yml has a function "shout" already, with lang go-stage, handler ./shout and image shout:latest: choose another name, or take it out of the file`,
		"", "new", "shout", "--lang", "python3-stage")
	c.refuse(`new: stack.yml has a function "shout" already, .* image shout:latest`, "", "new", "shout", "--lang", "go-stage", "--prefix", "example")
	if err := os.Rename(filepath.Join(c.dir, "double"), filepath.Join(c.dir, "gone")); err != nil {
		t.Fatal(err)
	}
	c.refuse(`new: other.yml has the function "double" already, but its folder does not exist: remove it from the file`, "", "new", "double", "--lang", "onnx-stage", "-f", "other.yml")
	if err := os.Rename(filepath.Join(c.dir, "gone"), filepath.Join(c.dir, "double")); err != nil {
		t.Fatal(err)
	}
	c.refuse(`new: shout is there already: choose another name, or remove it \(rm -r shout\)`, "", "new", "shout", "--lang", "go-stage", "-f", "third.yml")
	c.refuse(`(?s)new: flow.yml does not end with its functions.*\n  b:\n    lang: go-stage\n    handler: ./b\n`, "", "new", "b", "--lang", "go-stage", "-f", "flow.yml")
	c.refuse(`new: lang: "python3-http" is built with Docker .*want go-stage, onnx-stage, python3-stage`, "", "new", "b", "--lang", "python3-http")
	c.refuse(`new: got no --lang, want go-stage, onnx-stage or python3-stage`, "", "new", "b")
	c.refuse(`new: got name "a/b", want lower-case`, "", "new", "a/b", "--lang", "go-stage")
	c.refuse(`new: got \[\], want one name`, "", "new")
	after := filesIn(t, c.dir)
	if after = slices.DeleteFunc(after, func(f string) bool { return f == "flow.yml" }); !slices.Equal(after, before) {
		t.Errorf("files %q, want those of before: %q", after, before)
	}
	if b, err := os.ReadFile(filepath.Join(c.dir, "shout", "handler.go")); err != nil || string(b) != "// mine\n" {
		t.Errorf("the handler is %q, %v, want it as it was", b, err)
	}
	// The file has no functions, and no newline at its end.
	c.write("stack.yml", "version: 1.0\nprovider: {name: openfaas}")
	c.run("b: made from python3-stage", "", "new", "b", "--lang", "python3-stage")
	c.run("c: made from go-stage", "", "new", "c", "--lang", "go-stage")
	if b, err := os.ReadFile(filepath.Join(c.dir, "stack.yml")); err != nil || !strings.Contains(string(b), "\nfunctions:\n  b:\n") || !strings.Contains(string(b), "\n  c:\n") {
		t.Errorf("stack.yml: %v\n%s", err, b)
	}
}
