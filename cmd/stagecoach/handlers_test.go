package main

import (
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// shells is a function whose request bodies are scripts, a process per request.
func shells(name string) fn {
	return fn{name, "echo-http", one(), nil, map[string]string{"fprocess": "sh", "mode": "streaming"}}
}

// TestStaticFunction checks that a function in mode static serves the files of its image. A mode
// that does not exist is refused at the deploy.
func TestStaticFunction(t *testing.T) {
	t.Parallel()
	images := t.TempDir()
	r := start(t, "--images", images, "--ort", "")
	for name, text := range map[string]string{"home/app/public/index.html": "<h1>Hi</h1>\n", "home/app/public/a/b.css": "b {}\n", "docs/index.html": "docs\n", "secret": "no\n"} {
		file := filepath.Join(images, "example/site/1", name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil { //nolint:gosec // the function's user reads it
			t.Fatal(err)
		}
	}
	site := fn{"site", "example/site:1", one(), nil, map[string]string{"mode": "static"}}
	docs := fn{"docs", "example/site:1", one(), nil, map[string]string{"mode": "static", "static_path": "docs"}}
	lost := fn{"lost", "example/site:1", one(), nil, map[string]string{"mode": "static", "static_path": "/nosuch"}}
	r.deployAll(site, docs, lost)
	for path, want := range map[string]string{"/function/site/": "<h1>Hi</h1>\n", "/function/site/a/b.css": "b {}\n", "/function/docs": "docs\n"} {
		if a := r.must(http.StatusOK, http.MethodGet, path, "", "X-Timeout", "2m"); string(a.Body) != want {
			t.Errorf("%s: %q, want %q", path, a.Body, want)
		}
	}
	r.must(http.StatusNotFound, http.MethodGet, "/function/site/secret", "")
	if a := r.must(http.StatusServiceUnavailable, http.MethodGet, "/function/lost", "", "X-Timeout", "2m"); !strings.Contains(string(a.Body), `static_path="/nosuch"`) {
		t.Errorf("%s, want which folder is not there", a.Body)
	}
	for _, mode := range []string{"afterburn", "lambda"} {
		d := site
		d.env = map[string]string{"mode": mode}
		err := r.Deploy(t.Context(), d.deployment())
		if err == nil || !strings.Contains(err.Error(), `status 400`) || !strings.Contains(err.Error(), `envVars.mode: got "`+mode+`", want http, streaming, serializing or static`) {
			t.Errorf("mode %s: %v, want 400, the field and the modes", mode, err)
		}
	}
}

// TestErrorBodiesHideTheMachine checks that clients never get the paths of the state and image
// folders, whatever fails. The operator's log has these paths.
func TestErrorBodiesHideTheMachine(t *testing.T) {
	t.Parallel()
	images := t.TempDir()
	r := start(t, "--images", images)
	built := proctest.Built(t, "images", "stagecoach", "echo-http", "0.1.0", "echo-http")
	program, err := os.ReadFile(built)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"web", "gone"} {
		dir := filepath.Join(images, "stagecoach", name, "0.1.0")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "echo-http"), program, 0o755); err != nil { //nolint:gosec // a program
			t.Fatal(err)
		}
	}
	of := func(name, image string, env ...string) fn {
		f := httpFn(name, one(), env...)
		f.image = image
		return f
	}
	asleep := of("gone", "gone")
	asleep.labels = map[string]string{"min": "0", "zero": "true", "max": "1"}
	r.deployAll(
		of("missing", "web", "fprocess", "./no-such-program"),
		of("forks", "web", "mode", "streaming", "fprocess", "./no-such-program"),
		of("says", "web", "mode", "streaming", "fprocess", "sh"),
		of("crashes", "web"), asleep,
	)
	if err := os.RemoveAll(filepath.Join(images, "stagecoach", "gone")); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct{ path, body, want string }{
		{"/function/missing", "", "no-such-program"},
		{"/function/forks", "", "no-such-program"},
		{"/function/says", "echo $PWD/x >&2; exit 3", "exit status 3"},
		{"/function/crashes/exit", "", "exit status 3"},
		{"/function/gone", "", "no folder"},
	} {
		a := r.send(http.MethodPost, tc.path, tc.body, "X-Timeout", "2m")
		if a.Status < 500 || !strings.Contains(string(a.Body), tc.want) {
			t.Errorf("%s: status %d %s, want a failure with %q", tc.path, a.Status, a.Body, tc.want)
		}
		for _, folder := range []string{r.state, images} {
			if strings.Contains(string(a.Body), folder) {
				t.Errorf("%s: %s, which has the path %s", tc.path, a.Body, folder)
			}
		}
	}
	if log := r.log.String(); !strings.Contains(log, images) {
		t.Error("the log has no path of an image: the operator cannot find it")
	}
}

// TestMemoryOfTheFunctionAlone checks that the platform's own process does not count against
// limits.memory. If a function's process exceeds the limit, its caller and describe get that as the
// cause.
func TestMemoryOfTheFunctionAlone(t *testing.T) {
	needGroups(t)
	t.Parallel()
	r := start(t)
	small := shells("small").deployment()
	small.Limits = &client.Resources{Memory: "64Mi"}
	if err := r.Deploy(t.Context(), small); err != nil {
		t.Fatal(err)
	}
	tiny := shells("tiny").deployment()
	// A watchdog with the race detector alone takes more than that.
	tiny.Limits = &client.Resources{Memory: "8Mi"}
	if err := r.Deploy(t.Context(), tiny); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		if a := r.must(http.StatusOK, http.MethodPost, "/function/tiny", "echo fine", "X-Timeout", "2m"); string(a.Body) != "fine\n" {
			t.Errorf("%q, want fine", a.Body)
		}
	}
	// Together with the interpreter, it takes nearly the limit.
	const most = "exec python3 -c 'b = bytearray(46 << 20); print(len(b))'"
	if a := r.must(http.StatusOK, http.MethodPost, "/function/small", most, "X-Timeout", "2m"); string(a.Body) != "48234496\n" {
		t.Errorf("%q, want all the memory", a.Body)
	}
	const told = "killed: out of memory, its limit is 64 MiB (limits.memory)"
	a := r.must(http.StatusInternalServerError, http.MethodPost, "/function/small", "exec python3 -c 'bytearray(200 << 20)'")
	if !strings.Contains(string(a.Body), told) {
		t.Errorf("%s, want %q", a.Body, told)
	}
	r.limited("eats", client.Resources{Memory: "64Mi"})
	a = r.must(http.StatusBadGateway, http.MethodPost, "/function/eats/eat?mb=512", "", "X-Timeout", "2m")
	s := r.shows("eats")
	if want := "killed: out of memory, its limit is 64 MiB (limits.memory)"; !strings.Contains(string(a.Body), want) || !strings.Contains(s.LastFailure(), "lost: "+want) {
		t.Errorf("body %s, last failure %q, want %q in both", a.Body, s.LastFailure(), want)
	}
}

// TestTmpIsTheReplicasOwn checks a function's /tmp. It is in memory, has the documented size and
// counts against the function's limit. No other function sees it.
func TestTmpIsTheReplicasOwn(t *testing.T) {
	needGroups(t) // who may make them is root
	t.Parallel()
	r := start(t)
	limited := shells("limited").deployment()
	limited.Limits = &client.Resources{Memory: "64Mi"}
	r.deployAll(shells("a"), shells("b"))
	if err := r.Deploy(t.Context(), limited); err != nil {
		t.Fatal(err)
	}
	run := func(name, script string) string {
		t.Helper()
		return string(r.must(http.StatusOK, http.MethodPost, "/function/"+name, script, "X-Timeout", "2m").Body)
	}
	if got := run("a", "echo words > /tmp/file && cat /tmp/file && df --output=fstype,size /tmp | tail -1"); strings.Join(strings.Fields(got), " ") != "words tmpfs 524288" {
		t.Errorf("/tmp of a: %q, want a file system in memory of 512 MiB", got)
	}
	for _, name := range []string{"a", "b"} { // a process per request has it to itself
		if got := run(name, "test -e /tmp/file && echo there || echo none"); got != "none\n" {
			t.Errorf("the file in /tmp of %s: %q, want none", name, got)
		}
	}
	if _, err := os.Stat("/tmp/file"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the machine's /tmp has it too: %v", err)
	}
	// The files stay for a moment after their writer, so the replica may end with it.
	a := r.send(http.MethodPost, "/function/limited", "exec head -c 200M /dev/zero > /tmp/big", "X-Timeout", "2m")
	if want := "killed: out of memory, its limit is 64 MiB (limits.memory)"; a.Status < 500 || !strings.Contains(string(a.Body), want) {
		t.Errorf("status %d %s, want %q", a.Status, a.Body, want)
	}
}
