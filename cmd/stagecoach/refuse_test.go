package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// TestRequestsThatWouldBeLateAreRefused sends one replica ten times the load that it can serve.
// Requests that would wait too long are refused at once, and reach no replica.
func TestRequestsThatWouldBeLateAreRefused(t *testing.T) {
	t.Parallel()
	r := start(t)
	r.deployAll(waitFn("busy", "800ms", map[string]string{"max": "1"}, nil))
	for range 5 { // its service time gets known
		r.must(http.StatusOK, http.MethodPost, "/function/busy", "x")
	}
	count := r.storm("busy", 50, 5*time.Millisecond)
	// On a busy machine, an accepted request may take longer than expected, and be late.
	ok, overdue := count[http.StatusOK], count[http.StatusGatewayTimeout]
	if refused := count[http.StatusTooManyRequests]; ok < 1 || ok+overdue < 3 || refused < 25 || ok+overdue+refused != 50 {
		t.Errorf("answers by status: %v, want some 200, most 429, perhaps a few 504 and nothing else", count)
	}
	r.must(http.StatusOK, http.MethodPost, "/function/busy", "x") // the replica is free again
	if n := int(r.value(`stagecoach_dispatch_service_seconds_count{function="busy.openfaas-fn"}`)); n < ok+6 || n > ok+overdue+6 {
		t.Errorf("the replica did %d calls, %d were answered in time and %d late", n, ok+6, overdue)
	}
	t.Logf("answers by status: %v", count)
}

// TestExpiredRequestsReachNoReplica sends requests while their service time is unknown, so that
// they are accepted. Requests that expire in the line never reach a replica.
func TestExpiredRequestsReachNoReplica(t *testing.T) {
	t.Parallel()
	r := start(t)
	r.deployAll(waitFn("busy", "2s", map[string]string{"max": "1"}, nil))
	r.must(http.StatusOK, http.MethodPost, "/function/busy", "x")
	count := r.storm("busy", 20, time.Microsecond)
	// No expired request runs before it, see below.
	r.must(http.StatusOK, http.MethodPost, "/function/busy", "x")
	if count[http.StatusOK] < 1 || count[http.StatusGatewayTimeout] < 15 || count[http.StatusOK]+count[http.StatusGatewayTimeout] != 20 {
		t.Errorf("answers by status: %v, want about two 200 and the rest 504", count)
	}
	done := r.value(`stagecoach_dispatch_service_seconds_count{function="busy.openfaas-fn"}`)
	expired := r.value(`stagecoach_dispatch_expired_total{function="busy.openfaas-fn"}`)
	// The second call ends at the deadline of all: it is done, and may be answered too late.
	if ok := float64(count[http.StatusOK] + 2); done < ok || done > ok+1 || expired > float64(count[http.StatusGatewayTimeout]) {
		t.Errorf("%v calls done, %v expired, answers %v and two more", done, expired, count)
	}
	t.Logf("answers by status: %v", count)
}

// storm sends n requests with a pause of the given length between two, each with a timeout of four
// seconds. It counts the answers by status.
func (r *rig) storm(function string, n int, gap time.Duration) map[int]int {
	r.t.Helper()
	answers := make(chan client.Answer, n)
	pace := time.NewTicker(gap)
	defer pace.Stop()
	for range n {
		<-pace.C
		go func() { answers <- r.send(http.MethodPost, "/function/"+function, "x", "X-Timeout", "4s") }()
	}
	count := map[int]int{}
	for range n {
		a := <-answers
		count[a.Status]++
		after, err := strconv.Atoi(a.Header.Get("Retry-After"))
		if a.Status == http.StatusTooManyRequests && (err != nil || after < 1 || !strings.Contains(string(a.Body), `stage "`+function+`"`)) {
			r.t.Errorf("429 with Retry-After %q, want a number from 1 on, and the stage: %s", a.Header.Get("Retry-After"), a.Body)
		}
	}
	return count
}

// TestBadDeploys deploys functions with invalid fields. The answer is 400 with the path of the
// field.
func TestBadDeploys(t *testing.T) {
	t.Parallel()
	r := start(t)
	none := map[string]string(nil)
	for name, tc := range map[string]struct {
		f    fn
		path string // of the field
		part string // of what is wrong with it
	}{
		"annotation": {fn{"f", "noop", none, map[string]string{"nxt": "g"}, none}, `annotations["stagecoach.dev/nxt"]`, "an unknown annotation"},
		"label":      {fn{"f", "noop", map[string]string{"max": "many"}, none, none}, `labels["com.openfaas.scale.max"]`, "many"},
		"image":      {fn{"f", "stagecoach/none:1", none, none, none}, "image", "no folder"},
		"image name": {fn{"f", "../up:1", none, none, none}, "image", ".."},
		"self-loop":  {fn{"f", "noop", none, map[string]string{"pipeline": "p", "next": "f"}, none}, `annotations["stagecoach.dev/next"]`, "cannot follow itself"},
		"name":       {fn{"f g", "noop", none, none, none}, "service", "f g"},
		"env":        {fn{"f", "noop", none, none, map[string]string{"a=b": "c"}}, "envVars", "a=b"},
	} {
		body, err := json.Marshal(tc.f.deployment())
		if err != nil {
			t.Fatal(err)
		}
		a := r.must(http.StatusBadRequest, http.MethodPost, "/system/functions", string(body), "Accept", "application/json")
		var p struct {
			Fields []struct{ Path, Got, Want string }
		}
		if err := json.Unmarshal(a.Body, &p); err != nil || len(p.Fields) != 1 || p.Fields[0].Path != tc.path || !strings.Contains(string(a.Body), tc.part) {
			t.Errorf("%s: %s, want one field %s with %q", name, a.Body, tc.path, tc.part)
		}
		if a := r.send(http.MethodPost, "/system/functions", string(body)); !strings.Contains(string(a.Body), tc.path) {
			t.Errorf("%s: as text: %s, want %s", name, a.Body, tc.path)
		}
	}
	var all []client.FunctionStatus
	if err := r.Get(t.Context(), "/system/functions", &all); err != nil || len(all) != 0 {
		t.Errorf("deployed are %+v, %v, want none", all, err)
	}
}

// TestBrokenFunctions deploys functions whose faults show only when they run. Callers and the
// operator are told the cause, and a good deploy repairs it.
func TestBrokenFunctions(t *testing.T) {
	t.Parallel()
	images := t.TempDir()
	if err := os.Symlink(proctest.Built(t, "images", "stagecoach"), filepath.Join(images, "stagecoach")); err != nil {
		t.Fatal(err)
	}
	dies := filepath.Join(images, "bad", "dies", "1")
	if err := os.MkdirAll(dies, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dies, "stage"), []byte("#!/bin/sh\necho my disk is full >&2\nexit 3\n"), 0o755); err != nil { //nolint:gosec // to be run
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(images, "bad", "empty", "1"), 0o755); err != nil {
		t.Fatal(err)
	}
	r := start(t, "--images", images)
	for name, tc := range map[string]struct {
		f     fn
		cause []string
	}{
		"dies":    {fn{name: "f1", image: "bad/dies:1", labels: zero}, []string{"exit status 3", "my disk is full"}},
		"empty":   {fn{name: "f2", image: "bad/empty:1", labels: zero}, []string{"no executable ./stage and no entrypoint", "no fprocess"}},
		"model":   {fn{name: "f3", image: "wait", labels: zero, env: map[string]string{"STAGECOACH_MODEL": "model/none.onnx"}}, []string{"model/none.onnx"}},
		"setting": {fn{name: "f4", image: "wait", labels: zero, env: map[string]string{"wait_mean": "long"}}, []string{`wait_mean="long"`}},
	} {
		t.Run(name, func(t *testing.T) {
			r := *r
			r.t = t
			r.deployAll(tc.f)
			a := r.must(http.StatusServiceUnavailable, http.MethodPost, "/function/"+tc.f.name, "x")
			for _, part := range append(tc.cause, fmt.Sprintf("stage %q", tc.f.name)) {
				if !strings.Contains(string(a.Body), part) {
					t.Errorf("503: %s, want %q in it", a.Body, part)
				}
			}
			if a.Header.Get("Retry-After") == "" { // nor has it waited for its deadline: that would be 504
				t.Errorf("answered with headers %v, want Retry-After", a.Header)
			}
			if shown := r.shows(tc.f.name).Annotations["stagecoach.dev/status"]; !strings.Contains(shown, tc.cause[0]) || !strings.HasPrefix(shown, "failing: ") {
				t.Errorf("annotation stagecoach.dev/status is %q, want %q in it", shown, tc.cause[0])
			}
			r.deployAll(fn{name: tc.f.name, image: "noop", labels: zero})
			if a := r.must(http.StatusOK, http.MethodPost, "/function/"+tc.f.name, "mended"); string(a.Body) != "mended" {
				t.Errorf("after a good deploy: %q", a.Body)
			}
			if shown := r.shows(tc.f.name).Annotations["stagecoach.dev/status"]; shown != "ready" {
				t.Errorf("after a good deploy the annotation stagecoach.dev/status is %q, want ready", shown)
			}
		})
	}
}

// TestUpRefusesInvalidSettings starts up with invalid settings. It ends at once and says why.
func TestUpRefusesInvalidSettings(t *testing.T) {
	t.Parallel()
	r := start(t)
	bad := filepath.Join(t.TempDir(), "bad.yml")
	if err := os.WriteFile(bad, []byte("contol: {tick: 1s}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		args []string
		want string
	}{
		"the state of another":        {[]string{"--state", r.state}, fmt.Sprintf("is in use by another stagecoach, process %d; stop it (kill %[1]d), or choose another --state", r.up.Cmd.Process.Pid)},
		"the address of another":      {[]string{"--listen", r.up.Addr}, "stop the program that listens there, such as another stagecoach, or choose another --listen"},
		"an open door":                {[]string{"--listen", "0.0.0.0:0"}, "without basicAuthDir"},
		"credentials that are absent": {[]string{"--basic-auth-dir", t.TempDir()}, "basic-auth-user"},
		"an unknown field":            {[]string{"--config", bad}, "field contol not found"},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), soon)
			defer cancel()
			args := append([]string{"up", "--listen", "127.0.0.1:0", "--state", t.TempDir()}, tc.args...)
			var stdout, stderr bytes.Buffer
			cmd := exec.CommandContext(ctx, os.Args[0], args...)
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			if err := cmd.Run(); err == nil || cmd.ProcessState.ExitCode() != 1 || !strings.Contains(stderr.String(), tc.want) {
				t.Errorf("ended with %v, want exit status 1 and %q in\n%s", err, tc.want, stderr.String())
			}
			if stdout.Len() > 0 {
				t.Errorf("printed %q, want nothing", stdout.String())
			}
		})
	}
	r.must(http.StatusOK, http.MethodGet, "/healthz", "")
}

// TestBasicAuth checks that the management API requires credentials, and that the data path does
// not.
func TestBasicAuth(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, text := range map[string]string{"basic-auth-user": "admin\n", "basic-auth-password": "s3cret\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r := start(t, "--basic-auth-dir", dir)
	admin := client.New("http://admin:s3cret@" + r.up.Addr)
	if err := admin.Deploy(t.Context(), graph[4].deployment()); err != nil {
		t.Fatal(err)
	}
	wrong := []*client.Client{client.New("http://admin:wrong@" + r.up.Addr), client.New("http://nobody:s3cret@" + r.up.Addr)}
	for i, route := range []string{
		"GET /system/functions", "GET /system", "GET //system/nodes", "GET /system/../system/top", "GET /system/events/", "PUT /system/functions", "DELETE /system/functions", "POST /system/functions", "GET /system/function/e",
		"POST /system/scale-function/e", "GET /system/info", "GET /system/namespaces", "GET /system/pipelines", "GET /system/pipelines/five",
		"GET /system/pipelines/e/explain", "GET /system/demand/e", "GET /system/nodes", "GET /system/nodes/n", "GET /system/cache", "POST /system/cache/evict", "GET /system/top",
		"GET /system/function/e/profile", "PUT /system/function/e/profile", "PUT /system/function/e/pin", "DELETE /system/function/e/pin",
		"GET /system/timeline/e", "GET /system/async/x", "GET /system/dead", "DELETE /system/dead?function=f", "POST /system/dead/x/redrive", "GET /system/secrets", "GET /system/logs", "GET /system/none",
	} {
		method, path, _ := strings.Cut(route, " ")
		callers := []*client.Client{r.Client}
		if i < 5 { // further guesses are answered late
			callers = append(callers, wrong...)
		}
		for _, c := range callers {
			if a, err := c.Do(t.Context(), method, path, "", nil); err != nil || a.Status != http.StatusUnauthorized {
				t.Errorf("%s as %q: status %d, %v, want 401", route, c.User+":"+c.Pass, a.Status, err)
			}
		}
		if a, err := admin.Do(t.Context(), method, path, "", nil); err != nil || a.Status == http.StatusUnauthorized {
			t.Errorf("%s with credentials: status %d, %v", route, a.Status, err)
		}
	}
	var guesses sync.WaitGroup
	var slow, refused atomic.Int64
	for range 50 {
		guesses.Go(func() {
			switch a, err := wrong[0].Do(t.Context(), http.MethodGet, "/system/info", "", nil); {
			case err == nil && a.Status == http.StatusUnauthorized:
				slow.Add(1)
			case err == nil && a.Status == http.StatusTooManyRequests:
				refused.Add(1)
			default:
				t.Errorf("a guess: status %d, %v", a.Status, err)
			}
		})
	}
	if a, err := admin.Do(t.Context(), http.MethodGet, "/system/info", "", nil); err != nil || a.Status != http.StatusOK {
		t.Errorf("with credentials, while somebody guesses: status %d, %v", a.Status, err)
	}
	guesses.Wait()
	if slow.Load() == 0 || refused.Load() == 0 {
		t.Errorf("of 50 guesses at a time %d were answered 401 and %d 429, want some each", slow.Load(), refused.Load())
	}
	r.until(soon, "the guesses in the log", func() bool { return strings.Contains(r.log.String(), "a client tries passwords") })
	var p struct{ Stages []struct{ Name string } }
	if err := admin.Get(t.Context(), "/system/pipelines/five", &p); err != nil || len(p.Stages) != 1 {
		t.Errorf("with credentials: %+v, %v", p, err)
	}
	open := []string{"/function/e", "/healthz", "/metrics"}
	for _, path := range open {
		method := http.MethodGet
		if slices.Index(open, path) == 0 {
			method = http.MethodPost
		}
		r.must(http.StatusOK, method, path, "")
	}
	r.must(http.StatusAccepted, http.MethodPost, "/async-function/e", "x")
}
