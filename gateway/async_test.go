package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagecoach-serving/stagecoach/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

func TestAccept(t *testing.T) {
	f := newFront(t, nil)
	w := f.do(http.MethodPost, "/async-function/echo/p?q=1", "hello", "X-Callback-Url", "http://127.0.0.1:1/cb", "X-Call-Id", "mine",
		"X-Timeout", "5s", "Content-Type", "text/plain")
	if w.Code != http.StatusAccepted || w.Header().Get("X-Call-Id") != "mine" || w.Body.Len() != 0 {
		t.Fatalf("status %d, header %v, body %q", w.Code, w.Header(), w.Body)
	}
	if len(f.invoker.asked) != 0 {
		t.Error("it ran before the answer")
	}
	var e Entry
	if err := e.UnmarshalBinary(f.journal.entries[0]); err != nil {
		t.Fatal(err)
	}
	if e.CallID != "mine" || e.Name != "echo" || e.Request.Target != "echo.openfaas-fn" || e.Timeout != 5*time.Second ||
		e.Callback != "http://127.0.0.1:1/cb" || string(e.Request.Input[0].Bytes) != "hello" || header(e.Request, "Http-Path")[0] != "/p" {
		t.Errorf("entry %+v", e)
	}
	if header(e.Request, "X-Callback-Url") != nil {
		t.Error("the function gets the callback's URL")
	}
}

func TestAcceptRefuses(t *testing.T) {
	f := newFront(t, nil)
	for _, method := range []string{http.MethodGet, http.MethodPut, http.MethodHead} {
		if w := f.do(method, "/async-function/echo", ""); w.Code != http.StatusMethodNotAllowed || w.Header().Get("Allow") != http.MethodPost {
			t.Errorf("%s: status %d, header %v", method, w.Code, w.Header())
		}
	}
	if w := f.do(http.MethodPost, "/async-function/nosuch", ""); w.Code != http.StatusNotFound {
		t.Errorf("unknown: status %d", w.Code)
	}
	for _, u := range []string{"ftp://x", "/cb", "http://", "http://x/\x7f", "http://x/" + strings.Repeat("a", 2048)} {
		if w := f.do(http.MethodPost, "/async-function/echo", "", "X-Callback-Url", u); w.Code != http.StatusBadRequest || !strings.Contains(w.Body.String(), "X-Callback-Url") {
			t.Errorf("callback %.20q: status %d %q", u, w.Code, w.Body)
		}
	}
	if len(f.journal.entries) != 0 {
		t.Errorf("%d entries, want none", len(f.journal.entries))
	}
	f.journal.refuse = fmt.Errorf("9 MiB: %w", ErrTooLarge)
	if w := f.do(http.MethodPost, "/async-function/echo", "x"); w.Code != http.StatusRequestEntityTooLarge {
		t.Errorf("too large for the journal: status %d", w.Code)
	}
	f.journal.refuse = errors.New("full: secret detail")
	w := f.do(http.MethodPost, "/async-function/echo", "x")
	if h := w.Header(); w.Code != http.StatusServiceUnavailable || h.Get("Retry-After") == "" || h.Get("X-OpenFaaS-Internal") == "" || h.Get("X-Call-Id") == "" {
		t.Errorf("journal fails: status %d, header %v", w.Code, h)
	}
}

func TestEntryBinary(t *testing.T) {
	e := Entry{
		Request: task.Request{
			ID: "a.b", Target: "echo.openfaas-fn", Traceparent: "t", Header: []task.Header{{Name: "N", Value: "v\x00ü"}},
			Input: tensor.Activation{{ContentType: "text/plain", Bytes: []byte("x")}, {ContentType: "a/b", Bytes: []byte("y")}},
		},
		CallID: "a", Name: "echo", Timeout: time.Second, Callback: "http://x", Accepted: time.Unix(1, 2).UTC(),
	}
	b, err := e.MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	var got Entry
	if err := got.UnmarshalBinary(b); err != nil || !reflect.DeepEqual(got, e) {
		t.Errorf("got %+v, %v, want %+v", got, err, e)
	}
	for i := range b {
		if err := got.UnmarshalBinary(b[:i]); err == nil {
			t.Errorf("cut to %d of %d bytes: no error", i, len(b))
		}
	}
	b[0] = 99
	if err := got.UnmarshalBinary(b); err == nil || !strings.Contains(err.Error(), "version") {
		t.Errorf("unknown version: %v", err)
	}
}

func FuzzEntry(f *testing.F) {
	b, err := Entry{Request: task.Request{ID: "a", Input: tensor.Activation{{Bytes: []byte("x")}}}}.MarshalBinary()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte{entryVersion, 2, '{', '}'})
	f.Add([]byte{entryVersion, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		var e, again Entry
		if e.UnmarshalBinary(b) != nil {
			return
		}
		c, err := e.MarshalBinary()
		if err != nil {
			return // a time that JSON does not write
		}
		if err := again.UnmarshalBinary(c); err != nil {
			t.Fatalf("%v after a round trip of %q", err, b)
		}
		d, err := again.MarshalBinary()
		if err != nil || !bytes.Equal(c, d) {
			t.Fatalf("%q, then %q (%v)", c, d, err)
		}
	})
}

// receiver is an HTTP transport that records posts and answers in turn.
type receiver struct {
	answers []int // the last one repeats; 0: the connection fails
	posts   []*http.Request
	bodies  []string
	at      []time.Time
}

func (r *receiver) RoundTrip(req *http.Request) (*http.Response, error) {
	b, err := io.ReadAll(req.Body)
	if err != nil {
		return nil, err
	}
	status := r.answers[min(len(r.posts), len(r.answers)-1)]
	r.posts, r.bodies, r.at = append(r.posts, req), append(r.bodies, string(b)), append(r.at, time.Now())
	if status == 0 {
		return nil, errors.New("connection refused")
	}
	return &http.Response{StatusCode: status, Body: http.NoBody, Header: http.Header{"Location": {"http://elsewhere"}}, Request: req}, nil
}

func TestWork(t *testing.T) {
	ok := func(_ context.Context, r task.Request) (*task.Response, *task.Error) { return echo(r), nil }
	fails := func(e task.Error) func(context.Context, task.Request) (*task.Response, *task.Error) {
		return func(context.Context, task.Request) (*task.Response, *task.Error) { return nil, &e }
	}
	for name, tc := range map[string]struct {
		invoke func(context.Context, task.Request) (*task.Response, *task.Error)
		target string
		last   bool
		again  bool
		status string // X-Function-Status of the callback; empty: none
		body   string
	}{
		"done":                    {invoke: ok, status: "200", body: "hello"},
		"function failed":         {invoke: fails(task.Error{Status: 500, Stage: "echo", Cause: "boom"}), status: "500", body: "stage \"echo\": boom\n"},
		"platform failed":         {invoke: fails(task.Error{Status: 503, Internal: true, Cause: "none"}), again: true},
		"overloaded":              {invoke: fails(task.Error{Status: 429, Cause: "full"}), again: true},
		"platform failed, last":   {invoke: fails(task.Error{Status: 503, Internal: true, Cause: "none"}), last: true, again: true, status: "503", body: "none\n"},
		"deleted in between":      {target: "gone.openfaas-fn", status: "404"},
		"function failed, last":   {invoke: fails(task.Error{Status: 400, Cause: "bad"}), last: true, status: "400", body: "bad\n"},
		"done at the last chance": {invoke: ok, last: true, status: "200", body: "hello"},
	} {
		t.Run(name, func(t *testing.T) {
			cb := &receiver{answers: []int{204}}
			f := newFront(t, func(c *Config) { c.Callbacks = NewCallbacks(cb) })
			f.invoker.f = tc.invoke
			e := Entry{
				Request: task.Request{ID: "mine.1", Target: "echo.openfaas-fn", Input: tensor.Activation{{ContentType: "text/plain", Bytes: []byte("hello")}}},
				CallID:  "mine", Name: "echo", Timeout: time.Minute, Callback: "http://client/cb", Accepted: time.Unix(7, 0),
			}
			if tc.target != "" {
				e.Request.Target = tc.target
			}
			if err := f.Work(t.Context(), e, tc.last); (err != nil) != tc.again {
				t.Errorf("Work: %v, again %t", err, tc.again)
			}
			if tc.status == "" {
				if len(cb.posts) != 0 {
					t.Errorf("callback %v before the last run", cb.posts[0].Header)
				}
				return
			}
			if len(cb.posts) != 1 {
				t.Fatalf("%d callbacks, want 1", len(cb.posts))
			}
			h := cb.posts[0].Header
			if h.Get("X-Function-Status") != tc.status || h.Get("X-Call-Id") != "mine" || h.Get("X-Function-Name") != "echo" ||
				h.Get("X-Start-Time") != "7000000000" || h.Get("X-Duration-Seconds") == "" || !strings.HasPrefix(h.Get("Content-Type"), "text/plain") {
				t.Errorf("header %v, want status %s", h, tc.status)
			}
			if tc.body != "" && cb.bodies[0] != tc.body {
				t.Errorf("body %q, want %q", cb.bodies[0], tc.body)
			}
		})
	}
}

// TestWorkIsCutShort: an entry whose process ends is not done.
func TestWorkIsCutShort(t *testing.T) {
	cb := &receiver{answers: []int{500}}
	f := newFront(t, func(c *Config) { c.Callbacks = NewCallbacks(cb) })
	ctx, stop := context.WithCancel(t.Context())
	f.invoker.f = func(context.Context, task.Request) (*task.Response, *task.Error) {
		stop()
		return nil, &task.Error{Status: 500}
	}
	e := Entry{Request: task.Request{Target: "echo.openfaas-fn"}, Timeout: time.Minute, Callback: "http://client/cb"}
	if err := f.Work(ctx, e, true); !errors.Is(err, context.Canceled) {
		t.Errorf("Work: %v, want canceled", err)
	}
	if len(cb.posts) != 0 {
		t.Error("the callback tells a result that there is not")
	}
}

func TestDeliver(t *testing.T) {
	for name, tc := range map[string]struct {
		answers []int
		ok      bool
		at      []time.Duration
	}{
		"at once":    {[]int{200}, true, []time.Duration{0}},
		"refused":    {[]int{404}, false, []time.Duration{0}},
		"redirected": {[]int{307}, false, []time.Duration{0}},
		"later":      {[]int{0, 429, 503, 202}, true, []time.Duration{0, 1, 3, 7}},
		"never":      {[]int{0}, false, []time.Duration{0, 1, 3, 7, 15}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r, start := &receiver{answers: tc.answers}, time.Now()
				err := NewCallbacks(r).Deliver(t.Context(), "http://user:pass@client/cb", Result{Status: 200, Body: []byte("x")})
				if (err == nil) != tc.ok {
					t.Errorf("Deliver: %v, want ok %t", err, tc.ok)
				}
				if err != nil && strings.Contains(err.Error(), "pass@") {
					t.Errorf("the error tells the password: %v", err)
				}
				if len(r.at) != len(tc.at) {
					t.Fatalf("%d posts, want %d", len(r.at), len(tc.at))
				}
				for i, at := range r.at {
					if got := at.Sub(start); got != tc.at[i]*time.Second || r.bodies[i] != "x" {
						t.Errorf("post %d after %v with %q, want after %ds", i, got, r.bodies[i], tc.at[i])
					}
				}
			})
		})
	}
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithTimeout(t.Context(), 2*time.Second)
		defer stop()
		r := &receiver{answers: []int{500}}
		if err := NewCallbacks(r).Deliver(ctx, "http://client", Result{}); !errors.Is(err, context.DeadlineExceeded) || len(r.posts) != 2 {
			t.Errorf("%v after %d posts, want 2 within 2s", err, len(r.posts))
		}
	})
}

// TestDeliverOverHTTP has the real client and a real receiver.
func TestDeliverOverHTTP(t *testing.T) {
	got := make(chan *http.Request, 1)
	s := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got <- r }))
	defer s.Close()
	c := NewCallbacks(nil)
	defer c.Close()
	if err := c.Deliver(t.Context(), s.URL+"/cb", Result{CallID: "mine", Status: 200, Body: []byte("x")}); err != nil {
		t.Fatal(err)
	}
	if r := <-got; r.Method != http.MethodPost || r.URL.Path != "/cb" || r.Header.Get("X-Call-Id") != "mine" {
		t.Errorf("received %s %s %v", r.Method, r.URL, r.Header)
	}
}
