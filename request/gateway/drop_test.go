package gateway

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// lateError returns the error of a request that a policy dropped.
func lateError(status int) *task.Error {
	e := &task.Error{Status: status, Internal: true, Stage: "echo", Cause: "dropped (late): it is due in 1 ms", Dropped: task.DropLate}
	if status == http.StatusServiceUnavailable {
		e.RetryAfter = 2 * time.Second
	}
	return e
}

// TestClientsLearnWhyTheyWereDropped drops requests of each kind, and reads the answers over HTTP.
// A function cannot send the header itself.
func TestClientsLearnWhyTheyWereDropped(t *testing.T) {
	status, forges := http.StatusServiceUnavailable, false
	drop := func(_ context.Context, r task.Request) (*task.Response, *task.Error) {
		if forges {
			resp := echo(r)
			resp.Header = []task.Header{{Name: "X-Dropped", Value: "forged"}}
			return resp, nil
		}
		return nil, lateError(status)
	}
	f := newFront(t, nil)
	f.invoker.f = drop
	server := httptest.NewServer(f.handler)
	defer server.Close()
	small := newSmall(t, func(_ context.Context, _ *http.Request, _ func() net.Conn) (string, *task.Error) {
		if forges {
			return "HTTP/1.1 200 OK\r\nX-Dropped: forged\r\nContent-Length: 2\r\n\r\nok", nil
		}
		return "", lateError(status)
	})
	streams := newFront(t, func(c *Config) { c.Rendezvous, c.HTTP = small.front.cfg.Rendezvous, small.front.cfg.HTTP })
	streams.invoker.f = func(context.Context, task.Request) (*task.Response, *task.Error) { return nil, lateError(status) }
	streaming := httptest.NewServer(streams.handler)
	defer streaming.Close()
	const text, inference = "text/plain", `{"inputs":[{"name":"x","datatype":"INT8","shape":[1],"data":[1]}]}`
	for name, c := range map[string]struct {
		send func() (*http.Response, error)
		body string
	}{
		"a stage": {func() (*http.Response, error) {
			return http.Post(server.URL+"/function/echo", text, strings.NewReader("x"))
		}, "stage \"echo\": dropped (late): it is due in 1 ms\n"},
		"the inference protocol": {func() (*http.Response, error) {
			return http.Post(server.URL+"/v2/models/echo/infer", "application/json", strings.NewReader(inference))
		}, `{"error":"stage \"echo\": dropped (late): it is due in 1 ms"}`},
		"a function that speaks HTTP": {func() (*http.Response, error) {
			return http.Post(streaming.URL+"/function/echo", text, strings.NewReader("x"))
		}, "stage \"echo\": dropped (late): it is due in 1 ms\n"},
		"a body without a length": {func() (*http.Response, error) {
			return http.Post(streaming.URL+"/function/echo", text, io.MultiReader(strings.NewReader("x")))
		}, "stage \"echo\": dropped (late): it is due in 1 ms\n"},
	} {
		for _, status = range []int{503, 502} {
			t.Run(fmt.Sprint(name, " ", status), func(t *testing.T) {
				resp, err := c.send()
				if err != nil {
					t.Fatal(err)
				}
				b, err := io.ReadAll(resp.Body)
				_ = resp.Body.Close()
				h := resp.Header
				if err != nil || resp.StatusCode != status || h.Get("X-Dropped") != "late" || string(b) != c.body || h.Get("X-Openfaas-Internal") == "" {
					t.Errorf("%d %q %v, %v; want %d and the reason", resp.StatusCode, b, h, err, status)
				}
				if want := map[int]string{503: "2", 502: ""}[status]; h.Get("Retry-After") != want {
					t.Errorf("Retry-After %q, want %q", h.Get("Retry-After"), want)
				}
			})
		}
	}
	if direct := streams.invoker.last(t); !direct.Direct || direct.Arrived.IsZero() {
		t.Errorf("request %+v, want one whose body is at the gateway, with its arrival", direct)
	}
	forges = true
	if w := f.do(http.MethodGet, "/function/echo", ""); w.Code != 200 || w.Header()["X-Dropped"] != nil {
		t.Errorf("a stage forged it: %v", w.Header())
	}
	c := small.dial(t)
	c.send("GET /function/echo HTTP/1.1\r\nHost: x\r\n\r\n")
	if resp, err := http.ReadResponse(c.in, nil); err != nil || resp.StatusCode != 200 || resp.Header["X-Dropped"] != nil {
		t.Errorf("a function that speaks HTTP forged it: %+v, %v", resp, err)
	}
}

// TestRequestsSayWhenTheyArrived checks the arrival and the body's size that policies get.
func TestRequestsSayWhenTheyArrived(t *testing.T) {
	f := newFront(t, nil)
	before := time.Now()
	f.do(http.MethodPost, "/function/echo", "x")
	if r := f.invoker.last(t); r.Arrived.Before(before) || r.Arrived.After(time.Now()) || r.Direct {
		t.Errorf("arrived %v, direct %t, want now and its own input", r.Arrived, r.Direct)
	}
	accepted := time.Unix(1000, 0)
	f.Work(t.Context(), Entry{Request: task.Request{Target: "echo.openfaas-fn", Arrived: time.Now()}, Timeout: time.Minute, Accepted: accepted}, Try{Attempt: 3}, Retry{Attempts: 5})
	if r := f.invoker.last(t); !r.Arrived.Equal(accepted) {
		t.Errorf("a third run arrived %v, want when the request was accepted, %v", r.Arrived, accepted)
	}
	s := newStage(t, time.Minute, early(ok))
	c := s.dial(t)
	c.send("POST /function/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello")
	c.answer()
	if r := s.front.invoker.last(t); !r.Direct || r.Body != 5 {
		t.Errorf("direct %t, body of %d bytes, want 5", r.Direct, r.Body)
	}
}

// TestDroppedRunIsFinalUnlessTheFunctionSaysOtherwise checks what follows a dropped run of an async
// request, and that its callback names the reason.
func TestDroppedRunIsFinalUnlessTheFunctionSaysOtherwise(t *testing.T) {
	const last = 3
	for name, c := range map[string]struct {
		status  int
		attempt int
		retry   Retry
		again   bool
	}{
		"by default":                          {503, 1, Retry{Codes: []int{503}, Faults: true}, false},
		"again":                               {503, 1, Retry{Codes: []int{429}, Dropped: true}, true},
		"for the last time":                   {503, last, Retry{Codes: []int{503}, Dropped: true}, false},
		"after what may run once":             {502, 1, Retry{Codes: []int{429, 503}, Dropped: true}, false},
		"again, and the codes have it":        {502, 1, Retry{Codes: []int{502}, Dropped: true}, true},
		"again, and it may run twice":         {502, 1, Retry{Faults: true, Dropped: true}, true},
		"final, although the codes have it":   {502, 1, Retry{Codes: []int{502}, Faults: true}, false},
		"again although no status is retried": {503, 1, Retry{Codes: []int{}, Dropped: true}, true},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFront(t, nil)
			f.invoker.f = func(context.Context, task.Request) (*task.Response, *task.Error) { return nil, lateError(c.status) }
			c.retry.Attempts, c.retry.MinWait, c.retry.MaxWait = last, time.Second, time.Minute
			e := Entry{Request: task.Request{Target: "echo.openfaas-fn", Input: tensor.Activation{{}}}, CallID: "mine", Timeout: time.Minute, Callback: "http://client/cb"}
			end := f.Work(t.Context(), e, Try{Attempt: c.attempt}, c.retry)
			if end.Again != c.again || end.Err == nil || !strings.Contains(end.Err.Error(), "dropped (late)") || end.Dropped != task.DropLate || end.Busy {
				t.Errorf("%+v, want again %t, with the reason", end, c.again)
			}
			if (end.Notice == nil) != c.again {
				t.Fatalf("notice %+v", end.Notice)
			}
			if c.again {
				return
			}
			b, err := end.Notice.MarshalBinary()
			var n Notice
			if err == nil {
				err = n.UnmarshalBinary(b)
			}
			r := &receiver{answers: []int{204}}
			if end := NewCallbacks(r, nil).Deliver(t.Context(), n, Try{Attempt: 1}); err != nil || end.Err != nil {
				t.Fatal(err, end.Err)
			}
			if h := r.posts[0].Header; h.Get("X-Dropped") != "late" || h.Get("X-Function-Status") != fmt.Sprint(c.status) {
				t.Errorf("callback %v, want the reason", h)
			}
		})
	}
	r := &receiver{answers: []int{204}}
	if NewCallbacks(r, nil).Deliver(t.Context(), Notice{URL: "http://client/cb"}, Try{Attempt: 1}); r.posts[0].Header["X-Dropped"] != nil {
		t.Errorf("a result that nobody dropped: %v", r.posts[0].Header)
	}
}
