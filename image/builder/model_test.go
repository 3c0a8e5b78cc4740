package builder

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/image/stack"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor/onnx"
)

// TestCheckModel checks that the build finds models that cannot be served, and that the error says
// how to fix them.
func TestCheckModel(t *testing.T) {
	dir := t.TempDir()
	handler(t, filepath.Join(dir, "model"), onnxStage)
	if err := os.Remove(filepath.Join(dir, "model/handler.go")); err != nil {
		t.Fatal(err)
	}
	model := func(to string) string {
		file := filepath.Join(dir, to, "model/model.onnx")
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		return file
	}
	proctest.Classifier(t, model("zipmap"), false, true)
	proctest.Classifier(t, model("labels"), true, false)
	proctest.Classifier(t, model("classifier"), false, false)
	path, _, err := onnx.Synthetic(t.TempDir(), onnx.Encoder{Layers: 1, Width: 64, Heads: 1}, 1)
	if err != nil {
		t.Fatal(err)
	}
	// The model loses its parameters, which stay in the old folder.
	if err := os.Rename(path, model("lost")); err != nil {
		t.Fatal(err)
	}
	tree(t, dir, map[string]string{
		"cut/model/m.safetensors": "1234567", "pointer/model/model.onnx": "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n",
		"empty/x.txt": "", "other/weights/b.onnx": "", "other/a.safetensors": "", "code/own.go": "package function\n",
	})
	for name, tc := range map[string]struct {
		handler, language string
		model             string // set by the environment
		ownCode           bool
		want              []string // parts of the error; none: the model is valid
	}{
		"as it is":           {"model", onnxStage, "", false, nil},
		"named":              {"model", goStage, "model/model.onnx", false, nil},
		"no model":           {"empty", goStage, "", false, nil},
		"a folder":           {"model", python3Stage, "model", false, nil},
		"wrong path":         {"other", goStage, "weights/a.onnx", false, []string{`environment.STAGECOACH_MODEL: got "weights/a.onnx", and there is no other/weights/a.onnx, want a file or folder of the handler's folder, such as a.safetensors, weights/b.onnx`}},
		"wrong path, Python": {"other", python3Stage, "model.safetensors", false, []string{`got "model.safetensors", and there is no other/model.safetensors`}},
		"nothing there":      {"empty", onnxStage, "", false, []string{"there is no empty/model/model.onnx, want the model there, or environment.STAGECOACH_MODEL", "no .onnx or .safetensors"}},
		"outside":            {"model", onnxStage, "../model.onnx", false, []string{`got "../model.onnx", want a path inside the image`}},
		"a pointer":          {"pointer", onnxStage, "", false, []string{"model pointer/model/model.onnx: not a whole ONNX model"}},
		"a pointer, Python":  {"pointer", python3Stage, "", false, []string{"not a whole ONNX model"}},
		"cut":                {"cut", python3Stage, "", false, []string{"model cut/model: cut/model/m.safetensors: safetensors: 7 bytes, want at least the 8 of the header's length"}},
		"cut, a file":        {"cut", python3Stage, "model/m.safetensors", false, []string{"model cut/model/m.safetensors: cut/model/m.safetensors: safetensors: 7 bytes"}},
		"without parameters": {"lost", onnxStage, "", false, []string{"model lost/model/model.onnx: its external data ", " are missing, want "}},
		"classifier":         {"classifier", onnxStage, "", false, nil},
		"ZipMap":             {"zipmap", onnxStage, "", false, []string{`model zipmap/model/model.onnx: output "output_probability" is a seq(map(int64,tensor(float))), want a tensor`, `options={"zipmap": False}`}},
		// No session loads it.
		"ZipMap, own code":      {"zipmap", goStage, "model/model.onnx", true, []string{`options={"zipmap": False}`}},
		"ZipMap, Python":        {"zipmap", python3Stage, "", false, nil},
		"labels":                {"labels", onnxStage, "", false, []string{`output "label" is a tensor(string), want a tensor of numbers or bool`, "extract_model"}},
		"labels, with own code": {"labels", onnxStage, "", true, nil},
	} {
		fn := stack.Function{Handler: tc.handler}
		if tc.model != "" {
			fn.Environment = map[string]string{wire.EnvModel: tc.model}
		}
		err := checkModel(fn, modelStage{tc.language, tc.handler, filepath.Join(dir, tc.handler), tc.ownCode})
		if len(tc.want) == 0 && err != nil {
			t.Errorf("%s: %v", name, err)
		}
		for _, want := range tc.want {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want %q", name, err, want)
			}
		}
	}
}

// TestBuildChecksTheModel builds a classifier with skl2onnx's default output, in the template's
// folder.
func TestBuildChecksTheModel(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles with cgo")
	}
	dir := t.TempDir()
	handler(t, filepath.Join(dir, "f"), onnxStage)
	b := open(t, dir, map[string]stack.Function{
		"f":     {Lang: onnxStage, Handler: "./f"},
		"wrong": {Lang: onnxStage, Handler: "./f", Environment: map[string]string{wire.EnvModel: "model/other.onnx"}},
	})
	model := filepath.Join(dir, "f/model/model.onnx")
	for _, tc := range []struct {
		name         string
		text, zipMap bool
		want         string
	}{
		{"f", false, true, `model f/model/model.onnx: output "output_probability" is a seq(map(int64,tensor(float))), want a tensor`},
		// The template's code is not the user's.
		{"f", true, false, `model f/model/model.onnx: output "label" is a tensor(string)`},
		{"wrong", false, false, `got "model/other.onnx", and there is no f/model/other.onnx, want a file or folder of the handler's folder, such as model/model.onnx`},
		{"f", false, false, ""},
	} {
		proctest.Classifier(t, model, tc.text, tc.zipMap)
		before, _ := os.ReadFile(model)
		_, err := b.Build(t.Context(), tc.name)
		if after, _ := os.ReadFile(model); !bytes.Equal(before, after) {
			t.Fatalf("the build has changed the handler's model from %d to %d bytes", len(before), len(after))
		}
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%v, want %q", err, tc.want)
		}
	}
}
