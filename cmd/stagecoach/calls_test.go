package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// TestCallShowsEachState follows async calls in different states with `stagecoach call`:
//
//   - a call that runs in the second stage of a pipeline
//   - a call that waits behind the first
//   - a call between two attempts
//   - a call whose callback is refused
//   - a call that is done
//   - a call that is dead
//
// After a kill -9, the calls that have not ended and the dead call are still known.
func TestCallShowsEachState(t *testing.T) {
	t.Parallel()
	images := t.TempDir()
	if err := os.Symlink(proctest.Built(t, "images", "stagecoach"), filepath.Join(images, "stagecoach")); err != nil {
		t.Fatal(err)
	}
	folder := filepath.Join(images, "example", "greet", "latest")
	if err := os.MkdirAll(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	const greet = "#!/bin/sh\nname=$(cat)\n[ -n \"$name\" ] || { echo 'greet whom?' >&2; exit 1; }\necho \"Hello, $name!\"\n"
	if err := os.WriteFile(filepath.Join(folder, "greet.sh"), []byte(greet), 0o755); err != nil { //nolint:gosec // to be run
		t.Fatal(err)
	}
	var takes atomic.Bool
	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if !takes.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	t.Cleanup(receiver.Close)
	r := start(t, "--images", images)
	one := map[string]string{"pipeline": "two", "next": "slow", "async-concurrency": "1"}
	slow := waitFn("slow", "10m", map[string]string{"max": "1"}, map[string]string{"pipeline": "two", "async-concurrency": "1"})
	r.deployAll(fn{"quick", "noop", nil, one, nil}, slow)
	for name, attempts := range map[string]string{"once": "1", "often": "5"} {
		d := fn{name: name, image: "example/greet:latest"}.deployment()
		d.Annotations["com.openfaas.retry.attempts"], d.Annotations["com.openfaas.retry.min_wait"] = attempts, "90s"
		if err := r.Deploy(t.Context(), d); err != nil {
			t.Fatal(err)
		}
	}
	c := &operator{t, t.TempDir(), r.Base}
	call := func(id string) (s schema.Call) {
		t.Helper()
		out, err := c.try("", "call", id, "--json")
		if err == nil {
			err = json.Unmarshal([]byte(out), &s)
		}
		if err != nil {
			t.Fatalf("call %s: %v, %s", id, err, out)
		}
		return s
	}
	send := func(to, body string, header ...string) string {
		t.Helper()
		return r.must(http.StatusAccepted, http.MethodPost, "/async-function/"+to, body, header...).Header.Get("X-Call-Id")
	}

	runs := send("two", "x", "X-Call-Id", "order-17", "X-Timeout", "20m")
	waits := send("two", "x")
	retries := send("often", "")
	tells := send("once", "you", "X-Callback-Url", receiver.URL+"/inbox?key=secret")
	done := send("once", "world")
	dead := send("once", "")
	all := []string{"call", done, "--wait"}
	c.run(`(?s)Call: +`+done+`\nFunction: +once.openfaas-fn\nState: +done\n.*Result: +status 200 after .* --body prints it\n`, "", all...)
	c.run("^Hello, world!\n$", "", "call", done, "--body")
	c.refuse(`(?s)State: +dead\n.*Cause: +attempt 1 of 1: status 500: .*greet whom\?.*Letter: +`+dead+` .*call `+dead+`: it is dead`, "", "call", dead, "--wait")
	r.until(late, "the pipeline's call in its second stage", func() bool {
		s := call(runs)
		return s.State == schema.CallRunning && reflect.DeepEqual(s.Stages, []schema.CallStage{{Stage: "slow", Calls: 1, Done: 0, Attempt: 1}})
	})
	c.run(`(?s)Call: +order-17\nFunction: +two.openfaas-fn\nState: +running, attempt 1\nStage: +slow, 0 of 1 calls done, attempt 1\n`, "", "call", runs)
	c.run(`State: +accepted, waits for its first run\n`, "", "call", waits)
	r.until(late, "the first attempt to fail", func() bool { return call(retries).State == schema.CallRetrying })
	c.run(`(?s)State: +retrying, attempt 2 at 20\d\d-.*Cause: +attempt 1 of 5: status 500: .*greet whom\?`, "", "call", retries)
	r.until(late, "a callback that is not taken", func() bool { s := call(tells); return s.State == schema.CallTelling && s.Next != nil })
	c.run(`(?s)State: +telling its result, attempt \d+ at .*Cause: .*status 503.*Callback: +`+receiver.URL+`/inbox\n.*Result: +status 200 `, "", "call", tells)
	c.refuse(`call `+runs+`: status 404: .*it is running, and no result of it is kept yet`, "", "call", runs, "--body")
	c.refuse(`status 404: async call "nobody": it is not known. .* ended before 20\d\d-.*: up remembers the latest 10000 ended calls`, "", "call", "nobody")
	if s := call(call(runs).ID); s.CallID != runs {
		t.Errorf("by its record's id: %+v", s)
	}

	r.kill()
	r.restart()
	c.gateway = r.Base
	if s := call(retries); s.State != schema.CallRetrying || s.Next == nil || s.Attempt != 1 {
		t.Errorf("after a kill: %+v, want the call between its attempts", s)
	}
	if s := call(waits); s.State != schema.CallAccepted && s.State != schema.CallRunning {
		t.Errorf("after a kill: %+v", s)
	}
	if s := call(dead); s.State != schema.CallDead || s.Letter != dead || !strings.Contains(s.Cause, "greet whom?") {
		t.Errorf("after a kill: %+v, want the dead one", s)
	}
	c.refuse(`status 404: .*it is not known`, "", "call", done)
	takes.Store(true)
	c.run(`(?s)State: +done\n.*Result: +status 200 `, "", "call", tells, "--wait")
	c.run("^Hello, you!\n$", "", "call", tells, "--body")
	c.run("redriven: 1", "", "dead", "redrive", dead)
	c.refuse(`it is dead: attempt 1 of 1`, "", "call", dead, "--wait")
	for _, name := range []string{"slow", "quick", "often"} { // so that up need not wait for them
		r.must(http.StatusAccepted, http.MethodDelete, "/system/functions", `{"functionName":"`+name+`"}`)
	}
}
