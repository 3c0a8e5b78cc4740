package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// TestStagesShareTheRealPyTorch builds and runs two stages that require PyTorch from pip's index,
// and checks that PyTorch's files are on the disk once. The second build neither asks pip nor
// installs anything. The test needs 10 GB of disk and the index, so it runs only if
// STAGECOACH_TEST_TORCH is set. STAGECOACH_TEST_TORCH_VERSION is the version of PyTorch.
func TestStagesShareTheRealPyTorch(t *testing.T) {
	if os.Getenv("STAGECOACH_TEST_TORCH") == "" {
		t.Skip("fetches PyTorch: set STAGECOACH_TEST_TORCH=1")
	}
	version := cmp.Or(os.Getenv("STAGECOACH_TEST_TORCH_VERSION"), "2.11.0")
	py, images, dir := proctest.Pip(t), t.TempDir(), t.TempDir()
	stack := "version: 1.0\nprovider: {name: openfaas}\nfunctions:\n"
	for _, name := range []string{"one", "two"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
		for file, text := range map[string]string{
			"handler.py":       "import torch\n\ndef infer(state, calls):\n    return ['" + name + " ' + torch.__version__ for _ in calls]\n",
			"requirements.txt": "torch==" + version + "\n",
		} {
			if err := os.WriteFile(filepath.Join(dir, name, file), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		stack += fmt.Sprintf("  %s: {lang: python3-stage, handler: ./%[1]s, image: %[1]s, fprocess: %q}\n", name, py+" ./stage")
	}
	if err := os.WriteFile(filepath.Join(dir, "stack.yml"), []byte(stack), 0o644); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	build := func(name string) (said string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), self, "build", "--json", "--images", images, "--filter", name)
		cmd.Dir, cmd.Env = dir, append(os.Environ(), actAsMain+"=1")
		var all strings.Builder
		cmd.Stderr = &all
		out, err := cmd.Output()
		var made []struct {
			Size    int64
			Seconds float64
		}
		if err == nil {
			err = json.Unmarshal(out, &made)
		}
		if err != nil || len(made) != 1 {
			t.Fatalf("%s: %v, %s\n%s", name, err, out, &all)
		}
		t.Logf("%s: %s in %.1f s", name, plan.Size(made[0].Size), made[0].Seconds)
		return all.String()
	}
	if said := build("one"); !strings.Contains(said, "Successfully installed torch-"+version) {
		t.Errorf("the first build has not installed PyTorch:\n%s", said)
	}
	before := diskOf(t, images)
	if said := build("two"); strings.Contains(said, "torch-"+version) {
		t.Errorf("the second build asked or installed:\n%s", said)
	}
	r := start(t, "--images", images)
	for _, name := range []string{"one", "two"} {
		r.must(http.StatusAccepted, http.MethodPost, "/system/functions", fmt.Sprintf(`{"service":%q,"image":%[1]q,"envProcess":%q}`, name, py+" ./stage"),
			"Content-Type", "application/json")
		if got := string(r.must(http.StatusOK, http.MethodPost, "/function/"+name, "x").Body); !strings.HasPrefix(got, name+" "+version) {
			t.Errorf("%s: got %q, want PyTorch %s", name, got, version)
		}
	}
	after := diskOf(t, images)
	t.Logf("on the disk: %s after the first build, %s with two stages that run", plan.Size(before), plan.Size(after))
	if after > before+before/20 {
		t.Errorf("%d bytes on the disk with two stages, %d with one: want PyTorch once", after, before)
	}
	libraries, err := filepath.Glob(filepath.Join(image.Folder(images), "roots/*/fs/site-packages/torch/lib/libtorch_cpu.so"))
	if err != nil || len(libraries) != 2 {
		t.Fatalf("unpacked are %v, %v, want two", libraries, err)
	}
	one, err := os.Stat(libraries[0])
	two, err2 := os.Stat(libraries[1])
	if err != nil || err2 != nil || !os.SameFile(one, two) {
		t.Errorf("%v and %v (%v, %v), want one file", one, two, err, err2)
	}
}

// diskOf returns the bytes of the disk that the files below a folder use, each file counted once.
func diskOf(t *testing.T, dir string) (n int64) {
	t.Helper()
	seen := map[uint64]bool{}
	if err := filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if st := info.Sys().(*syscall.Stat_t); !seen[st.Ino] {
			seen[st.Ino] = true
			n += st.Blocks * 512
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return n
}
