package gateway

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// TestLargeBodyIsSpooled checks that a large body with one item is spooled while it arrives and
// deleted when its request ends.
func TestLargeBodyIsSpooled(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	store, err := tensor.OpenDir(dir, 4<<20)
	if err != nil {
		t.Fatal(err)
	}
	f := newFront(t, func(c *Config) { c.Spool, c.MaxBody = store, 8<<20 })
	var spooled bool
	f.invoker.f = func(_ context.Context, r task.Request) (*task.Response, *task.Error) {
		if spooled = len(r.Input) == 1 && r.Input[0].Ref != nil; spooled && f.memory.Load() != 0 {
			t.Errorf("%d bytes of memory for a body on disk", f.memory.Load())
		}
		var err error
		if r.Input, err = tensor.Resolve(store, r.Input); err != nil {
			t.Error(err)
		}
		return echo(r), nil
	}
	text := strings.Repeat("0123456789abcdef", 1<<17) // 2 MiB
	for name, tc := range map[string]struct {
		body, contentType string
		chunked, spooled  bool
		status            int
	}{
		"small":          {"abc", "text/plain", false, false, 200},
		"small, chunked": {"abc", "text/plain", true, false, 200},
		"large":          {text, "image/png", false, true, 200},
		"large, chunked": {text, "", true, true, 200},
		"JSON":           {`"` + text + `"`, "application/json", false, false, 200},
		"full":           {text + text + text, "image/png", false, false, 503},
		"full, chunked":  {text + text + text, "image/png", true, false, 503},
		"too large":      {strings.Repeat(text, 5), "image/png", false, false, 413},
		"too, chunked":   {strings.Repeat(text, 5), "image/png", true, false, 503},
	} {
		spooled = false
		r := httptest.NewRequest(http.MethodPost, "/function/echo", io.MultiReader(strings.NewReader(tc.body)))
		if r.ContentLength = -1; !tc.chunked {
			r.ContentLength = int64(len(tc.body))
		}
		if tc.contentType != "" {
			r.Header.Set("Content-Type", tc.contentType)
		}
		w := httptest.NewRecorder()
		f.handler.ServeHTTP(w, r)
		if w.Code != tc.status || spooled != tc.spooled || w.Code == 200 && w.Body.String() != tc.body {
			t.Errorf("%s: %d, spooled %t, %d bytes, want %d, %t: %.200s", name, w.Code, spooled, w.Body.Len(), tc.status, tc.spooled, w.Body)
		}
		if w.Code == 503 && (w.Header().Get("Retry-After") == "" || w.Header().Get("X-OpenFaaS-Internal") == "") {
			t.Errorf("%s: %v", name, w.Header())
		}
		if left, err := os.ReadDir(dir); len(left) != 0 || err != nil || f.memory.Load() != 0 {
			t.Errorf("%s: %v and %d bytes of memory are left, %v", name, left, f.memory.Load(), err)
		}
	}
	if w := f.do(http.MethodPost, "/async-function/echo", text); w.Code != http.StatusAccepted || len(f.journal.entries) != 1 || len(f.journal.entries[0]) < len(text) {
		t.Errorf("async: %d %s", w.Code, w.Body)
	}
}

// TestBodyMemoryIsBounded checks that the memory of all bodies is bounded, and that ended requests
// release theirs.
func TestBodyMemoryIsBounded(t *testing.T) {
	t.Parallel()
	f := newFront(t, func(c *Config) { c.BodyMemory = 100 << 10 })
	in, out := make(chan struct{}), make(chan struct{})
	f.invoker.f = func(_ context.Context, r task.Request) (*task.Response, *task.Error) {
		in <- struct{}{}
		<-out
		return echo(r), nil
	}
	ended := make(chan int)
	go func() { ended <- f.do(http.MethodPost, "/function/echo", strings.Repeat("a", 60<<10)).Code }()
	<-in
	for _, length := range []int64{60 << 10, -1} {
		r := httptest.NewRequest(http.MethodPost, "/function/echo", strings.NewReader(strings.Repeat("b", 60<<10)))
		r.ContentLength = length
		w := httptest.NewRecorder()
		f.handler.ServeHTTP(w, r)
		if w.Code != http.StatusServiceUnavailable || w.Header().Get("Retry-After") != "1" || !strings.Contains(w.Body.String(), "requests.bodyMemory") {
			t.Errorf("%d %v %s", w.Code, w.Header(), w.Body)
		}
	}
	go func() { ended <- f.do(http.MethodPost, "/function/echo", "small").Code }()
	<-in
	close(out)
	for range 2 {
		if code := <-ended; code != http.StatusOK {
			t.Errorf("status %d", code)
		}
	}
	if n := f.memory.Load(); n != 0 {
		t.Errorf("%d bytes are still counted", n)
	}
	go func() { <-in }()
	if w := f.do(http.MethodPost, "/function/echo", strings.Repeat("c", 60<<10)); w.Code != http.StatusOK {
		t.Errorf("afterwards: %d %s", w.Code, w.Body)
	}
}
