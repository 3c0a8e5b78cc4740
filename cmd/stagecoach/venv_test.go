package main

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

const whoHandler = `"""Says who it is, and writes to its home."""
import getpass, os, pathlib, pwd, sys
import stagecoach as sc

AT_IMPORT = getpass.getuser()


@sc.each
def infer(state, call: sc.Call) -> str:
    home = pathlib.Path.home()
    (home / "mine").write_text("x")
    listed = pwd.getpwuid(os.getuid()).pw_name
    return f"{sys.prefix} {AT_IMPORT == getpass.getuser() == listed} {home} {os.environ.get('USER')}"
`

// TestVirtualEnvironments deploys a stage with the interpreters of virtual environments. An
// environment that replicas see works. A deploy is refused with the reason if the environment or
// its base interpreter is below /tmp or in a closed folder.
func TestVirtualEnvironments(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		if os.Getenv("CI") == "true" {
			t.Fatal("needs root")
		}
		t.Skip("needs root")
	}
	python := proctest.Python(t)
	images, open := t.TempDir(), proctest.Outside(t)
	closed := filepath.Join(open, "home")
	if err := os.Mkdir(closed, 0o700); err != nil {
		t.Fatal(err)
	}
	venv := func(folder string, with string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), with, "-m", "venv", "--without-pip", folder)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", cmd, err, out)
		}
		return filepath.Join(folder, "bin/python")
	}
	r := start(t, "--images", images, "--ort", "")
	c := &operator{t, t.TempDir(), r.Base}
	if err := os.Mkdir(filepath.Join(c.dir, "who"), 0o755); err != nil {
		t.Fatal(err)
	}
	c.write("who/handler.py", whoHandler)
	stack := func(process, env string) {
		c.write("stack.yml", fmt.Sprintf("version: 1.0\nprovider: {name: openfaas, gateway: \"http://127.0.0.1:8080\"}\nfunctions:\n"+
			"  who: {lang: python3-stage, handler: ./who, image: \"example/who:1\", fprocess: %s ./stage, environment: {%s}}\n", process, env))
	}
	stack(python, "")
	c.run("who", "", "build", "--images", images)

	hidden := venv(filepath.Join(closed, "venv"), python)
	linked := filepath.Join(open, "linked")
	if err := os.Symlink(filepath.Dir(filepath.Dir(hidden)), linked); err != nil {
		t.Fatal(err)
	}
	for process, why := range map[string]string{
		venv(filepath.Join(t.TempDir(), "venv"), python): "functions have an empty /tmp of their own",
		hidden:                              "cannot enter " + closed,
		filepath.Join(linked, "bin/python"): "leads to " + closed,
		venvOn(t, filepath.Join(open, "on-hidden"), hidden): closed,
	} {
		stack(process, "")
		c.refuse(`(?s)400.*envProcess: got .*`+why+`.*such as /opt`, "", "deploy")
		r.must(http.StatusNotFound, http.MethodGet, "/system/function/who", "")
	}

	good := filepath.Join(open, "venv")
	stack(venv(good, python), "")
	c.run("who: created", "", "deploy")
	answer := c.run("", "x", "invoke", "who")
	if f := strings.Fields(answer); len(f) != 4 || f[0] != good || f[1] != "True" || f[2] != "/tmp" || !strings.HasPrefix(f[3], "user-") {
		t.Errorf("it says %q, want %s, a user with one name, and /tmp", answer, good)
	}
	if starts := client.ReplicaStarts(r.line("who").Events); len(starts) == 0 || !strings.HasPrefix(starts[0].Path, "fork") {
		t.Errorf("starts %+v, want a fork", starts)
	}
	stack(filepath.Join(good, "bin/python"), "HOME: /dev/shm, USER: me, LOGNAME: me")
	c.run("who: updated", "", "deploy", "--wait")
	if f := strings.Fields(c.run("", "x", "invoke", "who")); len(f) != 4 || f[2] != "/dev/shm" || f[3] != "me" {
		t.Errorf("it says %q, want what its environment says", f)
	}
}

// venvOn makes a virtual environment in a folder. Its interpreter is a copy of the interpreter
// base, and it names base's folder as its home.
func venvOn(t *testing.T, folder, base string) string {
	t.Helper()
	b, err := os.ReadFile(base)
	if err != nil {
		t.Fatal(err)
	}
	python := filepath.Join(folder, "bin/python")
	if err := os.MkdirAll(filepath.Dir(python), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(python, b, 0o755); err != nil { //nolint:gosec // an interpreter
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, "pyvenv.cfg"), []byte("home = "+filepath.Dir(base)+"\n"), 0o644); err != nil { //nolint:gosec // all read it
		t.Fatal(err)
	}
	return python
}
