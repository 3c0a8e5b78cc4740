package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

func TestInvokePassesRequestToFunction(t *testing.T) {
	f := newFront(t, nil)
	const trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	w := f.do(http.MethodPut, "/function/echo.openfaas-fn/a/b?q=1&q=2", "hello", "Content-Type", "text/plain", "X-Custom", "yes",
		"Traceparent", trace, "Connection", "keep-alive", "Proxy-Authorization", "Basic c2VjcmV0", "X-Timeout", "5", "Http-Method", "forged")
	if w.Code != http.StatusOK || w.Body.String() != "hello" || w.Header().Get("Content-Type") != "text/plain" {
		t.Fatalf("status %d, body %q, header %v", w.Code, w.Body, w.Header())
	}
	r := f.invoker.last(t)
	if r.Target != "echo.openfaas-fn" || r.Traceparent != trace || len(r.Input) != 1 || string(r.Input[0].Bytes) != "hello" {
		t.Errorf("request %+v", r)
	}
	if left := time.Until(r.Deadline); left > 5*time.Second || left < 0 {
		t.Errorf("deadline in %v, want up to 5s", left)
	}
	id := w.Header().Get("X-Call-Id")
	for name, want := range map[string]string{
		"Http-Method": "PUT", "Http-Path": "/a/b", "Http-Query": "q=1&q=2", "X-Custom": "yes", "X-Call-Id": id,
	} {
		if got := header(r, name); !slices.Equal(got, []string{want}) {
			t.Errorf("the function gets %s %q, want %q once", name, got, want)
		}
	}
	for range 20 { // map order is random
		f.do(http.MethodGet, "/function/echo", "", "D", "", "B", "", "A", "", "C", "")
		var names []string
		for _, h := range f.invoker.last(t).Header {
			names = append(names, h.Name)
		}
		if got := strings.Join(names, " "); got != "Http-Method Http-Path X-Call-Id X-Forwarded-For X-Forwarded-Host X-Forwarded-Proto A B C D" {
			t.Fatalf("headers in the order %s", got)
		}
	}
	for _, name := range []string{"Connection", "Proxy-Authorization", "X-Timeout", "Traceparent", "Content-Type"} {
		if got := header(r, name); got != nil {
			t.Errorf("the function gets %s %q, want none", name, got)
		}
	}
	if id == "" || r.ID != id {
		t.Errorf("X-Call-Id %q, request %q, want the same", id, r.ID)
	}
	if n, err := strconv.ParseInt(w.Header().Get("X-Start-Time"), 10, 64); err != nil || time.Since(time.Unix(0, n)) > time.Minute {
		t.Errorf("X-Start-Time %q", w.Header().Get("X-Start-Time"))
	}
	if s, err := strconv.ParseFloat(w.Header().Get("X-Duration-Seconds"), 64); err != nil || s < 0 || s > 60 {
		t.Errorf("X-Duration-Seconds %q", w.Header().Get("X-Duration-Seconds"))
	}
}

func TestSplitPaths(t *testing.T) {
	for path, want := range map[string]string{
		"/function/echo":          "1 echo /",
		"/function/echo/":         "1 echo /",
		"/function/v1.echo/x//y":  "1 v1.echo /x//y",
		"/function/":              "1  /",
		"/function//x":            "1  /x",
		"/function/../system":     "1 .. /system",
		"/async-function/echo/x":  "2 echo /x",
		"/function":               "0  ",
		"/functions/echo":         "0  ",
		"/system/function/echo":   "0  ",
		"//function/echo":         "0  ",
		"":                        "0  ",
		"*":                       "0  ",
		"/async-function":         "0  ",
		"/Function/echo":          "0  ",
		"/function/echo\x00/\xff": "1 echo\x00 /\xff",
	} {
		w, name, rest := split(path)
		if got := fmt.Sprintf("%d %s %s", w, name, rest); got != want {
			t.Errorf("split(%q) = %q, want %q", path, got, want)
		}
	}
}

// TestTheLastDotBeginsTheNamespace checks that a URL names exactly one of two targets with similar
// keys, whether or not it exists.
func TestTheLastDotBeginsTheNamespace(t *testing.T) {
	f := newFront(t, func(c *Config) {
		c.Directory = directory{"x.team-a": true, "x.team-a.openfaas-fn": true, "v1.echo.openfaas-fn": true}
	})
	for name, want := range map[string]string{
		"x.team-a": "x.team-a", "x.team-a?namespace=openfaas-fn": "x.team-a", "x%2Eteam-a/p": "x.team-a", "x.team-a.openfaas-fn": "x.team-a.openfaas-fn",
		"x": "", "v1.echo": "", "v1.echo.openfaas-fn": "v1.echo.openfaas-fn",
	} {
		for _, way := range []string{"/function/", "/async-function/"} {
			w := f.do(http.MethodPost, way+name, "hello")
			switch {
			case want == "":
				if w.Code != http.StatusNotFound {
					t.Errorf("%s%s: status %d, want 404", way, name, w.Code)
				}
			case way == "/function/":
				if r := f.invoker.last(t); w.Code != http.StatusOK || r.Target != want {
					t.Errorf("%s%s: status %d, target %q, want %q", way, name, w.Code, r.Target, want)
				}
			default:
				var e Entry
				if err := e.UnmarshalBinary(f.journal.entries[len(f.journal.entries)-1]); err != nil || w.Code != http.StatusAccepted || e.Request.Target != want {
					t.Errorf("%s%s: status %d, target %q, want %q", way, name, w.Code, e.Request.Target, want)
				}
			}
		}
	}
}

func FuzzSplit(f *testing.F) {
	for _, s := range []string{"/function/a", "/function/a/b", "/async-function/a.b/", "/function/", "/x", "/function/..//"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, path string) {
		w, name, rest := split(path)
		if w == noCall {
			if strings.HasPrefix(path, "/function/") || strings.HasPrefix(path, "/async-function/") || name+rest != "" {
				t.Fatalf("split(%q) = no call, %q, %q", path, name, rest)
			}
			return
		}
		prefix := map[way]string{syncCall: "/function/", asyncCall: "/async-function/"}[w]
		if strings.Contains(name, "/") || !strings.HasPrefix(rest, "/") {
			t.Fatalf("split(%q): name %q, rest %q", path, name, rest)
		}
		if joined := prefix + name + rest; joined != path && joined != path+"/" {
			t.Fatalf("split(%q) loses or makes up text: %q", path, joined)
		}
	})
}

func TestUnknownNamesMakeNoSeries(t *testing.T) {
	f := newFront(t, nil)
	for i := range 50 {
		w := f.do(http.MethodPost, fmt.Sprintf("/function/nosuch-%d", i), "")
		if w.Code != http.StatusNotFound || !strings.Contains(w.Body.String(), fmt.Sprintf("nosuch-%d", i)) || w.Header().Get("X-Call-Id") == "" {
			t.Fatalf("status %d, %q, %v", w.Code, w.Body, w.Header())
		}
	}
	if w := f.do(http.MethodPost, "/function/"+strings.Repeat("x", 5000), ""); w.Body.Len() > 300 {
		t.Errorf("a long name is answered with %d bytes", w.Body.Len())
	}
	if got := f.series(t); len(got) != 0 {
		t.Errorf("series %v, want none", got)
	}
	f.do(http.MethodPost, "/function/echo", "")
	f.do(http.MethodPost, "/function/echo.openfaas-fn", "")
	f.invoker.f = func(context.Context, task.Request) (*task.Response, *task.Error) {
		return nil, &task.Error{Status: 418, Cause: "odd"}
	}
	f.do(http.MethodPost, "/function/echo", "")
	want := map[string]float64{
		"gateway_function_invocation_started{echo.openfaas-fn}":   3,
		"gateway_function_invocation_total{200 echo.openfaas-fn}": 2,
		"gateway_function_invocation_total{400 echo.openfaas-fn}": 1,
		"gateway_functions_seconds{200 echo.openfaas-fn}":         2,
		"gateway_functions_seconds{400 echo.openfaas-fn}":         1,
	}
	if got := f.series(t); !maps.Equal(got, want) {
		t.Errorf("series %v, want %v", got, want)
	}
	if n := f.Invocations(pipeline.ParseKey("echo.openfaas-fn")); n != 3 {
		t.Errorf("%g invocations, want 3", n)
	}
}

// TestInvocationsIncludeCallsAsStage checks that a function's count includes its answered calls as
// a stage, once per call however many attempts it took.
func TestInvocationsIncludeCallsAsStage(t *testing.T) {
	there := directory{"film.openfaas-fn": true, "cut.openfaas-fn": true, "grade.openfaas-fn": true}
	f := newFront(t, func(c *Config) { c.Directory = there })
	stages := []task.Timing{
		{Function: "cut.openfaas-fn", Task: 1, Attempt: 1, Code: task.ReplicaLost},
		{Function: "cut.openfaas-fn", Task: 1, Attempt: 2},
		{Function: "grade.openfaas-fn", Task: 2, Attempt: 1},
		{Function: "grade.openfaas-fn", Task: 3, Attempt: 1},
	}
	f.invoker.f = func(context.Context, task.Request) (*task.Response, *task.Error) {
		return &task.Response{Stages: stages}, nil
	}
	f.do(http.MethodPost, "/function/film", "")
	f.invoker.f = func(context.Context, task.Request) (*task.Response, *task.Error) {
		// This call was waiting when the request failed.
		canceled := task.Timing{Function: "grade.openfaas-fn", Task: 3, Attempt: 1, Code: task.Canceled}
		return nil, &task.Error{Status: 500, Stages: append(stages[:3:3], canceled)}
	}
	f.do(http.MethodPost, "/function/film", "")
	f.Work(t.Context(), Entry{Name: "film", Request: task.Request{Target: "film.openfaas-fn"}, Timeout: time.Minute}, Try{Attempt: 1}, Retry{Attempts: 1})
	// The function runs alone.
	f.invoker.f = func(context.Context, task.Request) (*task.Response, *task.Error) {
		return &task.Response{Stages: stages[:1]}, nil
	}
	f.do(http.MethodPost, "/function/cut", "")
	count := func(name string) float64 { return f.Invocations(pipeline.ParseKey(name + ".openfaas-fn")) }
	if film, cut, grade := count("film"), count("cut"), count("grade"); film != 3 || cut != 4 || grade != 4 {
		t.Errorf("%g of film, %g of cut, %g of grade, want 3, 4 and 4", film, cut, grade)
	}
	delete(there, "grade.openfaas-fn")
	f.Tidy()
	if cut, grade := count("cut"), count("grade"); cut != 4 || grade != 0 {
		t.Errorf("%g of cut, %g of grade, which is gone, want 4 and 0", cut, grade)
	}
}

func TestErrorsBecomeStatuses(t *testing.T) {
	for name, tc := range map[string]struct {
		err   task.Error
		code  int
		text  string
		retry string
		plat  bool
	}{
		"full line":        {task.Error{Status: 429, Internal: true, Cause: "line is full", RetryAfter: 1500 * time.Millisecond}, 429, "line is full", "2", true},
		"no replica":       {task.Error{Status: 503, Internal: true, Stage: "read", Cause: "no replica"}, 503, `stage "read": no replica`, "1", true},
		"replica lost":     {task.Error{Status: 502, Internal: true, Stage: "read", Cause: "lost"}, 502, "lost", "", true},
		"late":             {task.Error{Status: 504, Internal: true, Cause: "deadline"}, 504, "deadline", "", true},
		"function failed":  {task.Error{Status: 500, Stage: "read", Cause: "boom"}, 500, "boom", "", false},
		"bad input":        {task.Error{Status: 400, Stage: "read", Cause: "no"}, 400, "no", "", false},
		"no status":        {task.Error{Cause: "?"}, 500, "?", "", false},
		"impossible":       {task.Error{Status: 200, Cause: "?"}, 500, "?", "", false},
		"header injection": {task.Error{Status: 500, Cause: "a\r\nX-Evil: 1"}, 500, "X-Evil", "", false},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFront(t, nil)
			f.invoker.f = func(context.Context, task.Request) (*task.Response, *task.Error) { return nil, &tc.err }
			w := f.do(http.MethodPost, "/function/echo", "x", "X-Call-Id", "mine")
			h := w.Header()
			if w.Code != tc.code || !strings.Contains(w.Body.String(), tc.text) {
				t.Errorf("status %d %q, want %d with %q", w.Code, w.Body, tc.code, tc.text)
			}
			if h.Get("Retry-After") != tc.retry || (h.Get("X-OpenFaaS-Internal") != "") != tc.plat || h.Get("X-Evil") != "" {
				t.Errorf("header %v, want Retry-After %q, internal %t", h, tc.retry, tc.plat)
			}
			if h.Get("X-Call-Id") != "mine" || h.Get("X-Duration-Seconds") == "" {
				t.Errorf("header %v lacks the call's", h)
			}
		})
	}
}

func TestBadHeadersAreRefused(t *testing.T) {
	f := newFront(t, nil)
	for _, tc := range [][2]string{
		{"X-Timeout", "soon"},
		{"X-Items", "several"},
		{"X-Items", ""},
		{"Inference-Header-Content-Length", "x"},
		{"X-Timeout", "-1"},
		{"X-Timeout", "0"},
		{"X-Timeout", "2h"},
		{"X-Timeout", "-5s"},
		{"X-Timeout", "99999999999"},
		{"X-Call-Id", strings.Repeat("a", 129)},
		{"X-Call-Id", "../x"},
		{"X-Call-Id", "a b"},
		{"X-Call-Id", "a/b"},
		{"X-Call-Id", "é"},
	} {
		w := f.do(http.MethodPost, "/function/echo", "", tc[0], tc[1])
		if w.Code != http.StatusBadRequest || !strings.Contains(w.Body.String(), tc[0]) {
			t.Errorf("%s %q: status %d %q, want 400 that names the header", tc[0], tc[1], w.Code, w.Body)
		}
		if id := w.Header().Get("X-Call-Id"); !validID(id) {
			t.Errorf("%s %q: X-Call-Id %q comes back", tc[0], tc[1], id)
		}
	}
	if len(f.invoker.asked) != 0 {
		t.Errorf("%d invocations, want none", len(f.invoker.asked))
	}
	if w := f.do(http.MethodPost, "/function/echo?q="+strings.Repeat("x", maxHeader), ""); w.Code != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("long query: status %d, want 431", w.Code)
	}
	f.do(http.MethodPost, "/function/echo", "", "Traceparent", "nonsense")
	if r := f.invoker.last(t); r.Traceparent != "" {
		t.Errorf("traceparent %q is passed on", r.Traceparent)
	}
}

// TestRequestsWithSameCallIDStaySeparate checks that two requests with the same X-Call-Id stay
// separate.
func TestRequestsWithSameCallIDStaySeparate(t *testing.T) {
	f := newFront(t, nil)
	seen := map[string]bool{}
	for range 3 {
		w := f.do(http.MethodPost, "/function/echo", "", "X-Call-Id", "order-66")
		r := f.invoker.last(t)
		if got := w.Header().Get("X-Call-Id"); got != "order-66" || header(r, "X-Call-Id")[0] != got {
			t.Errorf("X-Call-Id %q, the function gets %q", got, header(r, "X-Call-Id"))
		}
		if seen[r.ID] || !strings.HasPrefix(r.ID, "order-66.") || !validID(r.ID) {
			t.Errorf("request id %q, want a new one that starts with order-66.", r.ID)
		}
		seen[r.ID] = true
	}
	a, b := newIDs(), newIDs()
	seen = map[string]bool{}
	for range 100 {
		seen[a.next()], seen[b.next()] = true, true
	}
	if len(seen) != 200 {
		t.Errorf("%d different ids of 200", len(seen))
	}
}

func TestServerTiming(t *testing.T) {
	ms := time.Millisecond
	f := newFront(t, nil)
	f.invoker.f = func(_ context.Context, r task.Request) (*task.Response, *task.Error) {
		resp := echo(r)
		resp.Header = []task.Header{{Name: "x-model", Value: "v4"}, {Name: "Content-Length", Value: "999"}, {Name: "X-OpenFaaS-Internal", Value: "forged"}}
		resp.Stages = []task.Timing{
			{Stage: "ocr-detect", Wait: 1200 * time.Microsecond, Service: 130100 * time.Microsecond},
			{Stage: "ocr-read", Wait: ms, Service: 2 * ms},
			{Stage: "ocr-read", Wait: 3 * ms, Service: 4 * ms},
		}
		return resp, nil
	}
	w := f.do(http.MethodPost, "/function/echo", "x")
	const want = `ocr-detect.wait;dur=1.200, ocr-detect.service;dur=130.100, ` +
		`ocr-read.wait;dur=4.000;desc="2 calls", ocr-read.service;dur=6.000;desc="2 calls"`
	if got := w.Header().Get("Server-Timing"); got != want {
		t.Errorf("Server-Timing\n%s, want\n%s", got, want)
	}
	if h := w.Header(); h.Get("X-Model") != "v4" || h.Get("Content-Length") != "1" || h.Get("X-OpenFaaS-Internal") != "" {
		t.Errorf("header %v", h)
	}
	f.invoker.f = func(_ context.Context, r task.Request) (*task.Response, *task.Error) {
		resp := echo(r)
		resp.Stages = []task.Timing{
			{Stage: "read", Code: task.ReplicaLost, Replica: "read-0", Batch: 3, BatchSize: 8}, {Stage: "read", Replica: "read-1", Batch: 9, BatchSize: 4, Wait: ms, Service: 2500 * time.Microsecond},
		}
		return resp, nil
	}
	f.cfg.Measures = func(key pipeline.Key, holder string) bool {
		return key.String() == "echo.openfaas-fn" && holder == "me"
	}
	for function, says := range map[string]string{"echo": "you", "v1.echo.openfaas-fn": "me"} {
		w = f.do(http.MethodPost, "/function/"+function, "x", "X-Batch-Timing", says)
		if got := w.Header().Values("Server-Timing"); len(got) != 1 || strings.Contains(got[0], "batch") {
			t.Errorf("%s of who says %q: %q, want nothing of batches, which tell of others' calls", function, says, got)
		}
	}
	w = f.do(http.MethodPost, "/function/echo", "x", "X-Batch-Timing", "me")
	if got, want := w.Header().Values("Server-Timing"), []string{"read.wait;dur=1.000, read.service;dur=2.500", `read.batch;dur=2.500;desc="9 of 4 on read-1"`}; !slices.Equal(got, want) {
		t.Errorf("with batches %q, want %q", got, want)
	}
	var many []task.Timing
	for i := range 1000 {
		many = append(many, task.Timing{Stage: fmt.Sprint("stage-", i)})
	}
	if n := strings.Count(serverTiming(many), ".wait"); n != maxTimings {
		t.Errorf("%d stages of 1000, want %d", n, maxTimings)
	}
}

func TestRequestsAboveInFlightAreRefused(t *testing.T) {
	f := newFront(t, func(c *Config) { c.InFlight = 2 })
	hold, entered := make(chan struct{}), make(chan struct{})
	f.invoker.f = func(_ context.Context, r task.Request) (*task.Response, *task.Error) {
		entered <- struct{}{}
		<-hold
		return echo(r), nil
	}
	codes := make(chan int, 2)
	for range 2 {
		go func() { codes <- f.do(http.MethodPost, "/function/echo", "").Code }()
		<-entered
	}
	if w := f.do(http.MethodPost, "/function/echo", ""); w.Code != http.StatusTooManyRequests || w.Header().Get("Retry-After") == "" {
		t.Errorf("third: status %d, header %v", w.Code, w.Header())
	}
	close(hold)
	for range 2 {
		if code := <-codes; code != http.StatusOK {
			t.Errorf("held: status %d", code)
		}
	}
	f.invoker.f = nil
	if w := f.do(http.MethodPost, "/function/echo", ""); w.Code != http.StatusOK {
		t.Errorf("afterwards: status %d", w.Code)
	}
}

// server serves f over a real listener.
func (f *front) server(t *testing.T) *httptest.Server {
	s := httptest.NewServer(f.handler)
	t.Cleanup(func() {
		s.Client().CloseIdleConnections()
		s.Close()
	})
	return s
}

// unsized hides a reader's length, so that the body is sent in chunks.
type unsized struct{ io.Reader }

func TestBodiesUpToMaxBodyAreServed(t *testing.T) {
	f := newFront(t, func(c *Config) { c.MaxBody = 3 << 20 })
	s := f.server(t)
	for _, size := range []int{0, 1, 511, 512, 513, 4096, 1<<20 - 1, 1 << 20, 1<<20 + 1, 3 << 20, 3<<20 + 1, 5 << 20} {
		payload := bytes.Repeat([]byte("0123456789abcdef"), size/16+1)[:size]
		for name, body := range map[string]io.Reader{"sized": bytes.NewReader(payload), "chunked": unsized{bytes.NewReader(payload)}} {
			resp, err := s.Client().Post(s.URL+"/function/echo", "application/octet-stream", body)
			if err != nil {
				if size > 3<<20 { // the server closes the connection when it refuses a body
					continue
				}
				t.Fatal(err)
			}
			got, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			switch {
			case size > 3<<20 && resp.StatusCode != http.StatusRequestEntityTooLarge:
				t.Errorf("%s %d: status %d, want 413", name, size, resp.StatusCode)
			case size <= 3<<20 && (resp.StatusCode != http.StatusOK || err != nil || !bytes.Equal(got, payload)):
				t.Errorf("%s %d: status %d, %d bytes back, %v", name, size, resp.StatusCode, len(got), err)
			case size <= 3<<20 && resp.ContentLength != int64(size):
				t.Errorf("%s %d: Content-Length %d", name, size, resp.ContentLength)
			}
		}
	}
}

// TestLargeBodyIsNotRead checks that a body whose declared length is too large is refused before it
// arrives.
func TestLargeBodyIsNotRead(t *testing.T) {
	f := newFront(t, nil)
	r := httptest.NewRequest(http.MethodPost, "/function/echo", unsized{iotest.ErrReader(errors.New("it was read"))})
	r.ContentLength = 1<<20 + 1
	w := httptest.NewRecorder()
	f.handler.ServeHTTP(w, r)
	if w.Code != http.StatusRequestEntityTooLarge {
		t.Errorf("status %d %q, want 413", w.Code, w.Body)
	}
	r.ContentLength = 1
	w = httptest.NewRecorder()
	f.handler.ServeHTTP(w, r)
	if w.Code != http.StatusBadRequest || !strings.Contains(w.Body.String(), "it was read") {
		t.Errorf("broken body: status %d %q, want 400", w.Code, w.Body)
	}
}

func TestHeadHasNoBody(t *testing.T) {
	f := newFront(t, nil)
	f.invoker.f = func(context.Context, task.Request) (*task.Response, *task.Error) {
		return &task.Response{Output: tensor.Input{{Items: tensor.Activation{{ContentType: "text/plain", Bytes: []byte("12345")}}}}}, nil
	}
	s := f.server(t)
	for range 2 { // the second request uses the same connection
		resp, err := s.Client().Head(s.URL + "/function/echo")
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK || resp.ContentLength != 5 || len(b) != 0 || err != nil {
			t.Errorf("HEAD: status %d, length %d, body %q, %v", resp.StatusCode, resp.ContentLength, b, err)
		}
	}
	if got := header(f.invoker.last(t), "Http-Method"); got[0] != "HEAD" {
		t.Errorf("the function gets %q", got)
	}
}

// TestClientThatLeavesCancelsItsRequest checks that the invocation is canceled when the client
// leaves, even after its body has arrived and the read deadline has passed.
func TestClientThatLeavesCancelsItsRequest(t *testing.T) {
	f := newFront(t, nil)
	entered, ended := make(chan struct{}), make(chan error, 1)
	f.invoker.f = func(ctx context.Context, _ task.Request) (*task.Response, *task.Error) {
		close(entered)
		<-ctx.Done()
		ended <- ctx.Err()
		return nil, &task.Error{Status: 503}
	}
	s := f.server(t)
	ctx, hangUp := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL+"/function/echo", strings.NewReader("hello"))
	if err != nil {
		t.Fatal(err)
	}
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		if resp, err := s.Client().Do(req); err == nil {
			resp.Body.Close()
		}
	}()
	<-entered
	hangUp()
	if err := <-ended; err == nil {
		t.Error("the context did not end")
	}
	<-gone
}

// TestLateBodyGets408 checks that a late body gets 408, and that the read deadline does not end an
// invocation whose body arrived in time.
func TestLateBodyGets408(t *testing.T) {
	f := newFront(t, nil)
	s := f.server(t)
	r, w := io.Pipe()
	defer w.Close()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL+"/function/echo", r)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Timeout", "20ms")
	resp, err := s.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusRequestTimeout {
		t.Errorf("slow body: status %d, want 408", resp.StatusCode)
	}
	f.invoker.f = func(ctx context.Context, r task.Request) (*task.Response, *task.Error) {
		late := time.NewTimer(time.Until(r.Deadline) + 50*time.Millisecond)
		defer late.Stop()
		select {
		case <-late.C:
			return echo(r), nil
		case <-ctx.Done():
			return nil, &task.Error{Status: 500, Cause: "the context ended"}
		}
	}
	req, err = http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL+"/function/echo", strings.NewReader("x"))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Timeout", "2s")
	if resp, err = s.Client().Do(req); err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("late answer: status %d, want 200", resp.StatusCode)
	}
}

func TestOtherPathsGoToNextHandler(t *testing.T) {
	f := newFront(t, nil)
	for _, path := range []string{"/", "/system/functions", "/metrics", "/functions/echo"} {
		if w := f.do(http.MethodGet, path, ""); w.Code != http.StatusTeapot {
			t.Errorf("%s: status %d, want the next handler's", path, w.Code)
		}
	}
	if _, err := New(Config{}); err == nil {
		t.Error("New accepts an empty Config")
	}
}

func TestDefaultTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFront(t, nil)
		for value, want := range map[string]time.Duration{"": time.Minute, "7": 7 * time.Second, "1m30s": 90 * time.Second, "1h": time.Hour} {
			f.do(http.MethodGet, "/function/echo", "", "X-Timeout", value)
			if got := time.Until(f.invoker.last(t).Deadline); got != want {
				t.Errorf("X-Timeout %q: deadline in %v, want %v", value, got, want)
			}
		}
	})
}
