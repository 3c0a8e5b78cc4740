package main

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
)

// TestAsyncHTTP: an async request of a function that speaks HTTP has the function's own status and body, is tried again for the
// codes that its annotation names alone, and tells the function which attempt it is.
func TestAsyncHTTP(t *testing.T) {
	t.Parallel()
	r, to := start(t), newReceiver(t)
	web := httpFn("web", map[string]string{"min": "1"}).deployment()
	web.Annotations = map[string]string{
		"com.openfaas.retry.attempts": "3", "com.openfaas.retry.codes": "503", "com.openfaas.retry.min_wait": "10ms", "com.openfaas.retry.max_wait": "50ms",
	}
	if err := r.deploy(t.Context(), web); err != nil {
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
	big := strings.Repeat("0123456789abcdef", 3<<16) // 3 MiB: larger than a message, and than what is spooled of sync ones
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
