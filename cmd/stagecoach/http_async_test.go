package main

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// TestUnhealthyReplicaIsEnded checks that a replica is ended if its health check keeps failing
// after the replica was ready. The failed check is the cause of its end.
func TestUnhealthyReplicaIsEnded(t *testing.T) {
	t.Parallel()
	r := start(t)
	ill := httpFn("ill", map[string]string{"min": "1"}).deployment()
	ill.Annotations = map[string]string{"com.openfaas.health.http.path": "/status?code=500", "com.openfaas.health.http.initialDelay": "300ms", "com.openfaas.health.http.periodSeconds": "100ms"}
	well := httpFn("well", map[string]string{"min": "1"}).deployment()
	well.Annotations = map[string]string{"com.openfaas.health.http.path": "/_/health", "com.openfaas.health.http.periodSeconds": "100ms"}
	for _, d := range []client.Deployment{ill, well} {
		if err := r.Deploy(t.Context(), d); err != nil {
			t.Fatal(err)
		}
	}
	r.must(http.StatusOK, http.MethodPost, "/function/well/echo", "x")
	r.until(soon, "the replica to be given up", func() bool {
		return strings.Contains(r.log.String(), "its health was bad 3 times in a row: /status?code=500 answered 500, want 2xx")
	})
	if n := len(r.events("well", "lost")); n != 0 {
		t.Errorf("the healthy one was lost %d times", n)
	}
}

// TestAsyncHTTP checks async requests to a function that speaks HTTP. The result has the status and
// body that the function answered. A request is retried only after a status that the function's
// annotation names. The function gets the number of the attempt.
func TestAsyncHTTP(t *testing.T) {
	t.Parallel()
	r, to := start(t), newReceiver(t)
	web := httpFn("web", map[string]string{"min": "1"}).deployment()
	web.Annotations = map[string]string{
		"com.openfaas.retry.attempts": "3", "com.openfaas.retry.codes": "503", "com.openfaas.retry.min_wait": "10ms", "com.openfaas.retry.max_wait": "50ms",
	}
	if err := r.Deploy(t.Context(), web); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]struct{ status, attempt, body string }{
		"/status?code=418":        {"418", "1", "status 418\n"},
		"/status?code=503":        {"503", "3", "status 503\n"}, // worth it, in vain
		"/status?code=500":        {"500", "1", "status 500\n"}, // not named
		"/echo":                   {"200", "1", "hello"},
		"/status?code=200&a=b%20": {"200", "1", "status 200\n"},
	} {
		r.must(http.StatusAccepted, http.MethodPost, "/async-function/web"+path, "hello", "X-Callback-Url", to.URL)
		if got := to.next(t); got.status != want.status || got.attempt != want.attempt || got.body != want.body {
			t.Errorf("%s: %s after %s: %q, want %v", path, got.status, got.attempt, got.body, want)
		}
	}
	once := httpFn("once", map[string]string{"min": "1"}).deployment()
	once.Annotations = map[string]string{
		"stagecoach.dev/idempotent": "false", "com.openfaas.retry.attempts": "2", "com.openfaas.retry.min_wait": "10ms", "com.openfaas.retry.max_wait": "50ms",
	}
	if err := r.Deploy(t.Context(), once); err != nil {
		t.Fatal(err)
	}
	// Only 503 says that the work has not begun.
	for code, attempt := range map[string]string{"500": "1", "504": "1", "503": "2"} {
		r.must(http.StatusAccepted, http.MethodPost, "/async-function/once/status?code="+code, "x", "X-Callback-Url", to.URL)
		if got := to.next(t); got.status != code || got.attempt != attempt {
			t.Errorf("what must not run twice: %s after %s, want %s after %s", got.status, got.attempt, code, attempt)
		}
	}
	// 3 MiB: larger than a message, and than the spooled part of a sync body.
	big := strings.Repeat("0123456789abcdef", 3<<16)
	r.must(http.StatusAccepted, http.MethodPost, "/async-function/web/echo", big, "X-Callback-Url", to.URL)
	if got := to.next(t); got.status != "200" || got.body != big {
		t.Errorf("large: %s, %d bytes of %d", got.status, len(got.body), len(big))
	}
	r.must(http.StatusAccepted, http.MethodPost, "/async-function/web/a%2Fb?q=1", "x", "X-Callback-Url", to.URL, "X-Call-Id", "mine", "X-Custom", "v")
	var seen struct {
		Method, URI, Body string
		Header            http.Header
	}
	got := to.next(t)
	if err := json.Unmarshal([]byte(got.body), &seen); err != nil {
		t.Fatalf("%v in %s", err, got.body)
	}
	h := seen.Header
	if seen.Method != http.MethodPost || seen.URI != "/a%2Fb?q=1" || seen.Body != "x" || h.Get("X-Call-Id") != "mine" || h.Get("X-Attempt") != "1" || h.Get("X-Custom") != "v" {
		t.Errorf("the function sees %+v", seen)
	}
}
