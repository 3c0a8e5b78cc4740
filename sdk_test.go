package stagecoach_test

import (
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach"
)

// TestSDKIsComplete checks that package stage is made of the same files in the written SDK as here.
// The SDK must require all modules that these files need, and have no tests. Tests of `stagecoach
// build` check that the SDK compiles and serves.
func TestSDKIsComplete(t *testing.T) {
	dir := t.TempDir()
	if err := stagecoach.WriteSDK(dir); err != nil {
		t.Fatal(err)
	}
	got, want := listed(t, dir), listed(t, ".")
	if !slices.Equal(got, want) || len(got) < 10 {
		t.Errorf("the SDK's files:\n%v\nwant those here:\n%v", got, want)
	}
	if err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if strings.HasSuffix(path, "_test.go") {
			t.Errorf("a test in it: %s", path)
		}
		return err
	}); err != nil {
		t.Error(err)
	}
}

// listed returns the files of the packages that package stage is made of, sorted, without the
// standard library.
func listed(t *testing.T, dir string) []string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-mod=readonly", "-deps", "-json=ImportPath,Standard,GoFiles,CgoFiles,CFiles,HFiles", "./stage")
	cmd.Dir = dir
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var all []string
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p struct {
			ImportPath                        string
			Standard                          bool
			GoFiles, CgoFiles, CFiles, HFiles []string
		}
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if !p.Standard {
			for _, f := range slices.Concat(p.GoFiles, p.CgoFiles, p.CFiles, p.HFiles) {
				all = append(all, p.ImportPath+"/"+f)
			}
		}
	}
	slices.Sort(all)
	return all
}

func TestTemplatesHaveTheirFiles(t *testing.T) {
	compiled := []string{"main.go", "function/handler.go"}
	for lang, own := range map[string][]string{
		"go-stage": compiled, "onnx-stage": compiled, "python3-stage": {"stage", "stagecoach/__init__.py", "function/handler.py", "function/requirements.txt"},
	} {
		for _, file := range append([]string{"template.yml", "Dockerfile", "README.md"}, own...) {
			if _, err := fs.Stat(stagecoach.Templates(), lang+"/"+file); err != nil {
				t.Error(err)
			}
		}
	}
}
