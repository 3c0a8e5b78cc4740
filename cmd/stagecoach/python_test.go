package main

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

const pythonHandler = `"""Greets by name."""
import greetings
import stagecoach as sc

MAX_BATCH = 4


def load(model: sc.Model) -> str:
    print("loading", model.path)
    return greetings.HELLO


@sc.each
def infer(state: str, call: sc.Call) -> str:
    name = call.input.text()
    if name == "nobody":
        raise sc.BadInput("nobody, want a name")
    if name == "fails":
        raise RuntimeError("no words")
    if name == "streams":
        call.send(state)
        return ""
    print("greeting", name)
    return f"{state}, {name}"
`

const pythonStack = `version: 1.0
provider: {name: openfaas, gateway: "http://127.0.0.1:8080"}
functions:
  greet:
    lang: python3-stage
    handler: ./greet
    image: example/greet:latest
    fprocess: %[1]s ./stage
    labels: {com.openfaas.scale.min: "0", com.openfaas.scale.zero: "true"}
  misses:
    lang: python3-stage
    handler: ./misses
    image: example/misses:latest
    fprocess: %[1]s ./stage
    labels: {com.openfaas.scale.min: "0", com.openfaas.scale.zero: "true"}
  starter: {lang: python3-stage, handler: ./starter, image: "example/starter:latest", fprocess: %[1]s ./stage}
`

// TestPythonStage acts as an author of stages in Python. A handler with a package from
// requirements.txt is built without a network, deployed, called in every way, put to sleep and
// woken from its zygote. If a handler imports a module that is missing, the build and the start
// report it.
func TestPythonStage(t *testing.T) { onEachRuntime(t, testPythonStage) }

func testPythonStage(t *testing.T, start starter) {
	py := proctest.Pip(t)
	images := t.TempDir()
	r := start(t, "--images", images, "--ort", "")
	c := &operator{t, t.TempDir(), r.Base}
	for name, text := range map[string]string{
		"greet/handler.py": pythonHandler, "greet/requirements.txt": "./greetings-1.0-py3-none-any.whl\n",
		"misses/handler.py": "import no_such_module\n\ninfer = no_such_module.infer\n",
	} {
		if err := os.MkdirAll(filepath.Join(c.dir, filepath.Dir(name)), 0o755); err != nil {
			t.Fatal(err)
		}
		c.write(name, text)
	}
	proctest.Wheel(t, filepath.Join(c.dir, "greet"), "greetings", "1.0", map[string]string{"greetings.py": "HELLO = 'Hello'\n"})
	c.handler("starter", "python3-stage")
	c.write("stack.yml", fmt.Sprintf(pythonStack, py))

	built := c.run(`greet +example/greet:latest +\S+ KiB +sha256:[0-9a-f]{12}`, "", "build", "--images", images, "--filter", "greet")
	if !strings.Contains(built, "Processing ./greetings-1.0-py3-none-any.whl") {
		t.Errorf("a build does not show what pip does:\n%s", built)
	}
	digest := regexp.MustCompile(`greet:latest .*(sha256:\S+)`)
	if again := c.run("", "", "build", "--images", images, "--filter", "greet"); digest.FindStringSubmatch(again)[1] != digest.FindStringSubmatch(built)[1] {
		t.Errorf("built again:\n%s\nbefore:\n%s", again, built)
	}
	c.run("starter", "", "build", "--images", images, "--filter", "starter")
	c.refuse(`functions\.misses: handler: handler\.py:1: it needs the module 'no_such_module', which .*requirements\.txt.*fprocess`, "", "build", "--images", images, "--filter", "misses")
	c.run("misses", "", "build", "--images", images, "--filter", "misses", "--check-imports=false")
	c.run(`starter: ready with 1 replicas`, "", "deploy", "--wait", "--filter", "starter")
	c.run("greet: created", "", "deploy", "--filter", "greet")
	c.run("^You said: hello\n$", "hello", "invoke", "starter")

	c.run("^Hello, Ann$", "Ann", "invoke", "greet")
	c.run("^Hello$", "streams", "invoke", "greet")
	c.refuse("status 400: .*nobody, want a name", "nobody", "invoke", "greet")
	c.refuse("status 500: .*no words", "fails", "invoke", "greet")
	c.refuse("status 400: .*want bytes", `{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1]}]}`, "invoke", "greet", "--header", "Content-Type=application/json")
	r.together("greet")
	to := newReceiver(t)
	r.must(http.StatusAccepted, http.MethodPost, "/async-function/greet", "Ben", "X-Callback-Url", to.URL)
	if got := to.next(t); got.status != "200" || got.body != "Hello, Ben" {
		t.Errorf("callback %+v", got)
	}
	r.until(soon, "the handler's lines in the logs", func() bool {
		out, err := c.try("", "logs", "greet")
		return err == nil && strings.Contains(out, "loading") && strings.Contains(out, "greeting Ann") && strings.Contains(out, "greeting Ben") &&
			strings.Contains(out, "RuntimeError: no words") // where it was raised
	})

	r.must(http.StatusAccepted, http.MethodPost, "/system/scale-function/greet", `{"serviceName":"greet","replicas":0}`)
	r.until(soon, "no replica", func() bool { return r.shows("greet").AvailableReplicas == 0 && r.line("greet").Ready == 0 })
	c.run("^Hello, Cleo$", "Cleo", "invoke", "greet")
	starts := r.starts("greet")
	if last := starts[len(starts)-1]; len(starts) < 2 || last.Loaded || !strings.HasPrefix(last.Path, "fork") {
		t.Errorf("starts %+v, want the last one to be forked by a zygote that was there", starts)
	}
	r.until(soon, "the last call's line", func() bool {
		out, err := c.try("", "logs", "greet")
		return err == nil && strings.Contains(out, "greeting Cleo")
	})
	if out := c.run("", "", "logs", "greet"); strings.Count(out, "loading") != 1 {
		t.Errorf("loaded again for a replica:\n%s", out)
	}

	c.run("misses: created", "", "deploy", "--filter", "misses")
	c.refuse(`status 503: .*no_such_module.*`+regexp.QuoteMeta(py), "x", "invoke", "misses")
	c.run(`Status: .*no_such_module.*\(Python 3\.\d+\.\d+\).*requirements\.txt.*fprocess`, "", "describe", "misses")
}

// together sends good and bad calls at the same time: each gets its own answer.
func (r *rig) together(function string) {
	r.t.Helper()
	var wg sync.WaitGroup
	for i := range 16 {
		name, status, want := fmt.Sprintf("caller %d", i), http.StatusOK, fmt.Sprintf("Hello, caller %d", i)
		if i%3 == 0 {
			name, status, want = "nobody", http.StatusBadRequest, "nobody, want a name"
		}
		wg.Go(func() {
			if a, err := r.trySend(http.MethodPost, "/function/"+function, name); err != nil || a.Status != status || !strings.Contains(string(a.Body), want) {
				r.t.Errorf("%s: %v, %d %s, want %d %s", name, err, a.Status, a.Body, status, want)
			}
		})
	}
	wg.Wait()
}

// TestPythonFromDocker runs an image as the template's Dockerfile makes it, with an interpreter
// that does not run on this machine. The image speaks the stage protocol, so the machine's
// interpreter runs it among the machine's files. An image that does not speak the protocol is no
// Python stage, whatever its environment says.
func TestPythonFromDocker(t *testing.T) {
	t.Parallel()
	py := proctest.Python(t)
	images := t.TempDir()
	c := &operator{t: t, dir: t.TempDir()}
	c.handler("starter", "python3-stage")
	c.write("stack.yml", fmt.Sprintf(pythonStack, py))
	c.run("starter", "", "build", "--images", images, "--folder", "--filter", "starter")
	made := filepath.Join(images, "example/starter/latest")
	if err := os.MkdirAll(filepath.Join(made, "usr/local/bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(made, "usr/local/bin/python3"), []byte("for another machine"), 0o755); err != nil {
		t.Fatal(err)
	}
	img, err := image.Pack(made, image.Config{
		Entrypoint: []string{"/stage"}, Labels: map[string]string{image.ProtocolLabel: image.ProtocolVersion},
		Env: []string{"PATH=/usr/local/bin", "PYTHON_VERSION=3.99.0", "LANG=C.UTF-8", "STAGECOACH_RUNTIME=python"},
	})
	if err != nil {
		t.Fatal(err)
	}
	store, err := image.OpenStore(image.Folder(images))
	if err == nil {
		_, err = store.Add(t.Context(), img, "example/docker:1")
	}
	if err != nil {
		t.Fatal(err)
	}
	store.Close()
	if err := os.Symlink(proctest.Built(t, "images", "stagecoach"), filepath.Join(images, "stagecoach")); err != nil {
		t.Fatal(err)
	}
	r := start(t, "--images", images)
	const deploy = `{"service":%q,"image":%q,"envProcess":"%s ./stage","envVars":{%s}}`
	for _, of := range []struct{ name, image, env, path string }{
		{"docker", "example/docker:1", "", "fork"},
		{"folder", "example/starter:latest", `"STAGECOACH_RUNTIME":"python"`, "fork"},
		// A folder has no image configuration.
		{"silent", "example/starter:latest", "", keysmanager.PathProcess},
	} {
		r.must(http.StatusAccepted, http.MethodPost, "/system/functions", fmt.Sprintf(deploy, of.name, of.image, py, of.env), "Content-Type", "application/json")
		if got := string(r.must(http.StatusOK, http.MethodPost, "/function/"+of.name, "hello").Body); got != "You said: hello\n" {
			t.Errorf("%s: got %q", of.name, got)
		}
		if starts := client.ReplicaStarts(r.line(of.name).Events); len(starts) == 0 || !strings.HasPrefix(starts[0].Path, of.path) {
			t.Errorf("%s: starts %+v, want path %s", of.name, starts, of.path)
		}
	}

	web := httpFn("web", nil, "STAGECOACH_RUNTIME", "python")
	r.deployAll(web)
	r.must(http.StatusOK, http.MethodPost, "/function/web", "hello")
	if starts := client.ReplicaStarts(r.line("web").Events); len(starts) == 0 || starts[0].Path != keysmanager.PathProcess {
		t.Errorf("starts %+v, want a process", starts)
	}
}
