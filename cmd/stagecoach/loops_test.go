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
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// one are labels of a function that has exactly one replica.
func one() map[string]string { return map[string]string{"min": "1", "max": "1"} }

// replaced waits until a stuck replica of the function was replaced, and checks the recorded cause.
// beyond is the limit that the call passed.
func (r *rig) replaced(t *testing.T, name, beyond string) {
	t.Helper()
	cause := regexp.MustCompile(`^call \S+ ran (\S+) beyond ` + regexp.QuoteMeta(beyond) + ` and did not end$`)
	r.until(late, "the replica to be given up", func() bool { return len(r.events(name, "stuck")) > 0 })
	e := r.events(name, "stuck")[0]
	ran := time.Duration(0)
	if m := cause.FindStringSubmatch(e.Cause); m != nil {
		ran, _ = time.ParseDuration(m[1])
	}
	if ran < 2*time.Second {
		t.Errorf("event %+v, want the cause %v, and 2 s at least", e, cause)
	}
	r.until(late, "the old replica to be stopped, and another one ready", func() bool {
		for _, end := range r.events(name, "stopped") {
			if end.Replica == e.Replica {
				return end.Cause == e.Cause && r.shows(name).AvailableReplicas == 1
			}
		}
		return false
	})
	for _, kind := range []string{"failed", "lost"} {
		if all := r.events(name, kind); len(all) > 0 {
			t.Errorf("events %+v, want that being replaced is no failure", all)
		}
	}
	s := r.shows(name)
	if s.Status() != "ready" || !strings.Contains(s.LastFailure(), e.Replica+" stuck: "+e.Cause) {
		t.Errorf("status %q, last failure %q, want ready and the cause", s.Status(), s.LastFailure())
	}
	if log := r.log.String(); !strings.Contains(log, e.Cause) {
		t.Errorf("the log does not say %q", e.Cause)
	}
}

// TestLoopingHandlersAreReplaced has a handler per kind of function that goes on after exec_timeout
// or its caller's deadline. The caller gets 504, and the replica is replaced.
func TestLoopingHandlersAreReplaced(t *testing.T) {
	t.Parallel()
	r := start(t)
	loops := func(name string, env ...string) fn { return httpFn(name, one(), env...) }
	stubborn := func(name string, env ...string) fn {
		f := fn{name, "wait", one(), nil, map[string]string{"wait_mean": "1h", "wait_cv": "0", "wait_stubborn": "true"}}
		for i := 0; i < len(env); i += 2 {
			f.env[env[i]] = env[i+1]
		}
		return f
	}
	r.deployAll(loops("web", "exec_timeout", "3s"), loops("patient"), stubborn("stage", "exec_timeout", "3s"), stubborn("late"))
	for _, tc := range []struct {
		name, path, beyond string
		header             []string
		told               string
	}{
		{"web", "/spin?for=10m", "exec_timeout=3s", nil, "exec_timeout, 3s"},
		{"patient", "/spin?for=10m", "its deadline", []string{"X-Timeout", "3s"}, ""},
		{"stage", "", "exec_timeout=3s", nil, "exec_timeout, 3s"},
		{"late", "", "its deadline", []string{"X-Timeout", "3s"}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r.until(late, "a replica", func() bool { return r.shows(tc.name).AvailableReplicas == 1 })
			a := r.must(http.StatusGatewayTimeout, http.MethodPost, "/function/"+tc.name+tc.path, "x", tc.header...)
			if !strings.Contains(string(a.Body), tc.told) {
				t.Errorf("body %s, want %q", a.Body, tc.told)
			}
			r.replaced(t, tc.name, tc.beyond)
			if tc.path != "" {
				r.must(http.StatusOK, http.MethodPost, "/function/"+tc.name+"/echo", "x", "X-Timeout", "1m")
			}
		})
	}
}

// TestOtherCallsEndOnAStuckReplica checks a replica that is stuck because of one call. The
// replica's other calls go on until they end. Meanwhile, another replica serves new calls.
func TestOtherCallsEndOnAStuckReplica(t *testing.T) {
	t.Parallel()
	r := start(t)
	r.deployAll(httpFn("web", one()))
	r.until(late, "a replica", func() bool { return r.shows("web").AvailableReplicas == 1 })
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		a, err := r.trySend(http.MethodPost, "/function/web/slow?for=15s&name=other", "", "X-Timeout", "3m")
		if err != nil || a.Status != http.StatusOK || string(a.Body) != "done\n" {
			t.Errorf("%v: status %d %s, want that the other call ends well", err, a.Status, a.Body)
		}
	})
	r.until(soon, "the other call to run", func() bool { return r.line("web").Running == 1 })
	r.must(http.StatusGatewayTimeout, http.MethodPost, "/function/web/spin?for=10m", "", "X-Timeout", "2s")
	r.until(late, "the replica to be given up", func() bool { return len(r.events("web", "stuck")) == 1 })
	// The replacement answers.
	r.must(http.StatusOK, http.MethodPost, "/function/web/echo", "x", "X-Timeout", "1m")
	if len(r.events("web", "stopped")) > 0 {
		t.Log("the machine is slow: the other call ended first")
	}
	wg.Wait()
	r.replaced(t, "web", "its deadline")
	if ready := r.events("web", "ready"); len(ready) != 2 {
		t.Errorf("%d replicas were ready, want the first and its replacement", len(ready))
	}
}

// TestLoopingPythonHandlerIsReplaced: the replica of a handler in Python that never returns is
// replaced.
func TestLoopingPythonHandlerIsReplaced(t *testing.T) {
	t.Parallel()
	py := proctest.Pip(t)
	images := t.TempDir()
	r := start(t, "--images", images, "--ort", "")
	c := &operator{t, t.TempDir(), r.Base}
	if err := os.MkdirAll(filepath.Join(c.dir, "loops"), 0o755); err != nil {
		t.Fatal(err)
	}
	c.write("loops/handler.py", `import stagecoach as sc


@sc.each
def infer(state, call: sc.Call) -> str:
    while call.input.text() == "loop":
        pass
    return "done"
`)
	c.write("stack.yml", fmt.Sprintf(`version: 1.0
provider: {name: openfaas, gateway: "http://127.0.0.1:8080"}
functions:
  loops:
    lang: python3-stage
    handler: ./loops
    image: example/loops:latest
    fprocess: %s ./stage
    environment: {exec_timeout: 3s}
    labels: {com.openfaas.scale.min: "1", com.openfaas.scale.max: "1"}
`, py))
	c.run("loops", "", "build", "--images", images)
	c.run("loops: ready with 1 replicas", "", "deploy", "--wait")
	a := r.must(http.StatusGatewayTimeout, http.MethodPost, "/function/loops", "loop")
	if !strings.Contains(string(a.Body), "exec_timeout, 3s") {
		t.Errorf("body %s, want exec_timeout", a.Body)
	}
	r.replaced(t, "loops", "exec_timeout=3s")
	c.run(`^done$`, "x", "invoke", "loops", "--header", "X-Timeout="+time.Minute.String())
	c.run(`Last failure: +\S+ loops-\S+ stuck: call \S+ ran \S+ beyond exec_timeout=3s and did not end`, "", "describe", "loops")
}
