package builder

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach"
	"github.com/stagecoach-serving/stagecoach/image/stack"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// TestPythonDockerfile runs the commands of the Dockerfile of python3-stage, without Docker, on the
// build context of faas-cli. Files and configuration of its image are those of `stagecoach build`.
func TestPythonDockerfile(t *testing.T) {
	py := proctest.Pip(t)
	dir := t.TempDir()
	template, err := fs.Sub(stagecoach.Templates(), python3Stage)
	if err != nil {
		t.Fatal(err)
	}
	text, err := fs.ReadFile(template, "Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	made := filepath.Join(dir, "handler")
	if err := os.CopyFS(made, template); err != nil {
		t.Fatal(err)
	}
	tree(t, made, map[string]string{
		"function/requirements.txt": "./greet-1.0-py3-none-any.whl\n", "function/lib/a.py": "", "function/lib/a_test.py": "", "function/README.md": "",
		"function/.hidden/x.py": "", "function/testdata/x": "", "function/__pycache__/x.pyc": "", "function/model/model.safetensors": noTensors,
	})
	greet(t, filepath.Join(made, "function"))
	commands := filepath.Join(dir, "commands")
	tree(t, commands, map[string]string{"pip": "#!/bin/sh\nexec " + py + " -m pip \"$@\"\n", "python3": "#!/bin/sh\nexec " + py + " \"$@\"\n"})
	for _, name := range []string{"pip", "python3"} {
		if err := os.Chmod(filepath.Join(commands, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}

	r, err := open(t, dir, map[string]stack.Function{"f": {Lang: "python3-stage", Handler: "handler/function", FProcess: py + " ./stage"}}).Build(t.Context(), "f")
	if err != nil {
		t.Fatal(err)
	}
	image := filepath.Join(dir, "image")
	_, script, _ := strings.Cut(string(text), "\nRUN ")
	script, final, ok := strings.Cut(script, "\n\nFROM ")
	if !ok {
		t.Fatalf("want a RUN and a second stage in\n%s", text)
	}
	script = strings.NewReplacer("/handler/", made+"/", "/image", image).Replace(strings.ReplaceAll(script, "\\\n", ""))
	cmd := exec.CommandContext(t.Context(), "sh", "-c", script)
	cmd.Dir = made
	cmd.Env = append(os.Environ(), "PATH="+commands+":"+os.Getenv("PATH"))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	// Its wheel contains it.
	if err := os.Remove(filepath.Join(image, "site-packages/greet/__pycache__/x.pyc")); err != nil {
		t.Error(err)
	}
	matters := func(dir string) []string { // all files except those that normalise changes or removes
		return slices.DeleteFunc(list(t, dir), func(name string) bool {
			return strings.HasPrefix(name, "site-packages/bin/") || strings.HasSuffix(name, "direct_url.json")
		})
	}
	if got, want := matters(image), matters(r.Dir); !slices.Equal(got, want) {
		t.Errorf("Docker's image has\n%v, ours\n%v", got, want)
	}
	checkCompiled(t, image)

	c := config(python3Stage, t.TempDir())
	for _, line := range []string{
		"ENV " + c.Env[0], `ENTRYPOINT ["` + c.Entrypoint[0] + `"]`, "COPY --from=build /image/ /", "LABEL dev.stagecoach.protocol=" + c.Labels["dev.stagecoach.protocol"],
	} {
		if !slices.Contains(strings.Split(final, "\n"), line) {
			t.Errorf("no line %q in\n%s", line, final)
		}
	}
	base, _, _ := strings.Cut(final, "\n")
	if !strings.Contains(string(text), "\nFROM "+base+" AS build\n") {
		t.Errorf("the packages are not made for the image %s", base)
	}
}
