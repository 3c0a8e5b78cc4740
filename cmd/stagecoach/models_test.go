package main

import (
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/onnx"
)

// TestBrokenModels deploys models of which not all is there, or for which no memory is: callers and the operator are told, and a
// good deploy mends it.
func TestBrokenModels(t *testing.T) {
	t.Parallel()
	images := t.TempDir()
	stage := proctest.Built(t, "images", "stagecoach", "wait", "0.1.0", "stage")
	onnxStage := proctest.Built(t, "images", "stagecoach", "onnx", "0.1.0", "stage")
	good, err := os.ReadFile(proctest.Built(t, "images", "stagecoach", "wait", "0.1.0", "model", "rec.onnx"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(proctest.Built(t, "images", "stagecoach"), filepath.Join(images, "stagecoach")); err != nil {
		t.Fatal(err)
	}
	image := func(name string) (dir string) {
		dir = filepath.Join(images, "bad", name, "1")
		if err := errors.Join(os.MkdirAll(dir, 0o755), proctest.Copy(stage, filepath.Join(dir, "stage"))); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	if err := os.WriteFile(filepath.Join(image("truncated"), "model.onnx"), good[:len(good)/2], 0o600); err != nil {
		t.Fatal(err)
	}
	corrupt := append([]byte(nil), good...)
	for i := range corrupt[:200] { // the names of operators and versions are not what they were
		if corrupt[i] >= 'a' && corrupt[i] <= 'y' {
			corrupt[i]++
		}
	}
	if err := os.WriteFile(filepath.Join(image("corrupt"), "model.onnx"), corrupt, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, bytes := range map[string]int64{"short": 1000, "huge": 1 << 40} {
		dir := image(name)
		if _, _, err := onnx.Synthetic(dir, onnx.Encoder{Layers: 1, Width: 128, Heads: 2}, 1); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(filepath.Join(dir, "weights.bin"), bytes); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"path", "zipmap", "labels"} { // images that no build has checked
		dir := filepath.Join(images, "bad", name, "1")
		if err := errors.Join(os.MkdirAll(dir, 0o755), proctest.Copy(onnxStage, filepath.Join(dir, "stage"))); err != nil {
			t.Fatal(err)
		}
		if name != "path" {
			proctest.Classifier(t, filepath.Join(dir, "model.onnx"), name == "labels", name == "zipmap")
		}
	}
	r := start(t, "--images", images)
	for name, causes := range map[string][]string{
		"truncated": {"model.onnx", "not a whole ONNX model"},
		"corrupt":   {"zygote: "},
		"short":     {"weights.bin have 1000 bytes, want at least"},
		"huge":      {"needs about", "1024 GiB of external data", "it can never fit here"},
		"path":      {"model model.onnx: there is no ", "/bad/path/1/model.onnx, want STAGECOACH_MODEL to be the path of a file"},
		"zipmap":    {"output_probability is a sequence, want a tensor", `options={"zipmap": False}`},
		"labels":    {`model.onnx: output "label" is BYTES`, "want numbers or BOOL", "fit it with numbers as labels"},
	} {
		t.Run(name, func(t *testing.T) {
			r := *r
			r.t = t
			env := map[string]string{"STAGECOACH_MODEL": "model.onnx", "wait_mean": "1ms"}
			r.deployAll(fn{name: name, image: "bad/" + name + ":1", labels: zero, env: env})
			a := r.must(http.StatusServiceUnavailable, http.MethodPost, "/function/"+name, "x")
			shown := r.shows(name).Annotations["stagecoach.dev/status"]
			for _, cause := range causes {
				if !strings.Contains(string(a.body), cause) || !strings.Contains(shown, cause) {
					t.Errorf("503: %s\nstatus: %s\nwant %q in both", a.body, shown, cause)
				}
			}
			r.deployAll(waitFn(name, "1ms", zero, nil))
			r.must(http.StatusOK, http.MethodPost, "/function/"+name, "mended")
		})
	}
}
