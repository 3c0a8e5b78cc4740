package watchdog

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/hop"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/stage"
)

// carrying runs carry for a request to h, with a gateway at v. The call ends with the test.
func carrying(t *testing.T, v *rendezvous, h http.Handler, request string) <-chan stage.Result {
	t.Helper()
	e := newExchanges(h, 2, 0, 0)
	t.Cleanup(func() { e.close(context.WithoutCancel(t.Context())) })
	return carryAgain(t, e, v, request)
}

func carryAgain(t *testing.T, e *exchanges, v *rendezvous, request string) <-chan stage.Result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	t.Cleanup(cancel)
	done := make(chan stage.Result, 1)
	// e.close waits for it.
	go func() { done <- e.carryIn(ctx, &stage.Call{}, "unix token "+v.path, []byte(request)) }()
	return done
}

// next waits for a connection of a replica whose call has not ended.
func (v *rendezvous) next(t *testing.T, done <-chan stage.Result) *caller {
	t.Helper()
	select {
	case c := <-v.conns:
		return c
	case r := <-done:
		t.Fatalf("the call has ended, with %v and %d items, and no replica came to the rendezvous", r.Err, len(r.Output))
	case <-time.After(soon):
		t.Fatal("nobody was met")
	}
	return nil
}

// meetsSmall reads the token of a replica that has the request, and asks for its answer.
func (c *caller) meetsSmall(t *testing.T) {
	t.Helper()
	b := make([]byte, len("token+"))
	if _, err := io.ReadFull(c.in, b); err != nil || string(b) != "token+" {
		t.Fatalf("%q, %v, want the token", b, err)
	}
	if n := c.in.Buffered(); n > 0 {
		t.Fatalf("%d bytes came before they were asked for", n)
	}
	_, _ = io.WriteString(c, "\n")
}

// kept decodes an answer that came as a result.
func kept(t *testing.T, method string, r stage.Result) (*http.Response, string) {
	t.Helper()
	if r.Err != nil || len(r.Output) != 1 || r.Output[0].ContentType != task.TypeResponse {
		t.Fatalf("%v with %d items, want an answer", r.Err, len(r.Output))
	}
	in := bufio.NewReader(bytes.NewReader(r.Output[0].Bytes))
	resp, err := http.ReadResponse(in, &http.Request{Method: method})
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil || in.Buffered() > 0 {
		t.Fatalf("the answer's body: %v, and %d bytes after it", err, in.Buffered())
	}
	return resp, string(body)
}

// TestSmallAnswersAreResults checks that an answer that is complete before it is flushed or large
// is the call's result, without a rendezvous.
func TestSmallAnswersAreResults(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		request string
		h       http.HandlerFunc
		status  int
		body    string
		header  http.Header // part of the expected header
		trailer http.Header
	}{
		"echo": {hello, func(w http.ResponseWriter, r *http.Request) { _, _ = io.Copy(w, r.Body) }, 200, "hello", nil, nil},
		"a length": {hello, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "2")
			_, _ = io.WriteString(w, "ok")
		}, 200, "ok", http.Header{"Content-Length": {"2"}}, nil},
		"nothing": {hello, func(http.ResponseWriter, *http.Request) {}, 200, "", http.Header{"Content-Length": {"0"}}, nil},
		"204":     {hello, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }, 204, "", nil, nil},
		"304":     {hello, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNotModified) }, 304, "", nil, nil},
		"HEAD": {"HEAD / HTTP/1.1\r\nHost: f\r\n\r\n", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "1000000")
		}, 200, "", http.Header{"Content-Length": {"1000000"}}, nil},
		"several values": {hello, func(w http.ResponseWriter, _ *http.Request) {
			w.Header()["Set-Cookie"] = []string{"a=1", "b=2"}
			http.Error(w, "no", http.StatusTeapot)
		}, 418, "no\n", http.Header{"Set-Cookie": {"a=1", "b=2"}}, nil},
		"a trailer": {hello, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Trailer", "Sum")
			_, _ = io.WriteString(w, "body")
			w.Header().Set("Sum", "4")
		}, 200, "body", nil, http.Header{"Sum": {"4"}}},
		"as large as may be": {hello, func(w http.ResponseWriter, _ *http.Request) {
			for range 60 {
				_, _ = w.Write(make([]byte, 1<<10))
			}
		}, 200, strings.Repeat("\x00", 60<<10), nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			v := newRendezvous(t)
			method, _, _ := strings.Cut(tc.request, " ")
			resp, body := kept(t, method, <-carrying(t, v, tc.h, tc.request))
			if resp.StatusCode != tc.status || body != tc.body || !reflect.DeepEqual(resp.Trailer, tc.trailer) {
				t.Errorf("%d with %d bytes and trailer %v, want %d with %d and %v", resp.StatusCode, len(body), resp.Trailer, tc.status, len(tc.body), tc.trailer)
			}
			for name, want := range tc.header {
				if got := resp.Header[name]; !reflect.DeepEqual(got, want) {
					t.Errorf("%s: %q, want %q", name, got, want)
				}
			}
			if d, err := time.ParseDuration(resp.Header.Get(task.HeaderDirect)); tc.body != "" && (err != nil || d < 0) {
				t.Errorf("the time before the answer: %v, %v", d, err)
			}
			if len(v.conns) != 0 {
				t.Error("the replica came to the rendezvous")
			}
		})
	}
}

// TestOtherAnswersMeetTheGateway checks answers that are flushed early, are large, or follow an
// informational answer. The replica must send the whole answer to the rendezvous, and keep the
// connection for the next answer.
func TestOtherAnswersMeetTheGateway(t *testing.T) {
	t.Parallel()
	more := make(chan struct{})
	large := strings.Repeat("large ", task.MaxMessage/5)
	for name, tc := range map[string]struct {
		h    http.HandlerFunc
		want []string // expected answers, the informational ones first
	}{
		"flushed": {func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "first")
			_ = http.NewResponseController(w).Flush()
			<-more
			_, _ = io.WriteString(w, " last")
		}, []string{"200 first last"}},
		"large": {func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, large) }, []string{"200 " + large}},
		"large in pieces": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", fmt.Sprint(len(large)))
			for p := range strings.SplitAfterSeq(large, " ") {
				_, _ = io.WriteString(w, p)
			}
		}, []string{"200 " + large}},
		"early hints": {func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusEarlyHints)
			_, _ = io.WriteString(w, "ok")
		}, []string{"103 ", "200 ok"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			v := newRendezvous(t)
			e := newExchanges(tc.h, 2, 0, 0)
			defer e.close(context.WithoutCancel(t.Context()))
			done := carryAgain(t, e, v, hello)
			c := v.next(t, done)
			c.meetsSmall(t)
			for i, want := range tc.want {
				resp, err := http.ReadResponse(c.in, nil)
				if err != nil {
					t.Fatal(err)
				}
				if name == "flushed" {
					if b, err := io.ReadAll(io.LimitReader(resp.Body, 5)); string(b) != "first" || err != nil {
						t.Fatalf("%q, %v", b, err)
					}
					close(more)
					want = "200  last"
				}
				b, err := io.ReadAll(resp.Body)
				if got := fmt.Sprint(resp.StatusCode, " ", string(b)); got != want || err != nil {
					t.Errorf("answer %d: %.60q, %v, want %.60q", i, got, err, want)
				}
			}
			if r := <-done; r.Err != nil || len(r.Output) != 0 {
				t.Errorf("%v with %d items", r.Err, len(r.Output))
			}
			if _, err := c.Write([]byte{hop.Ready}); err != nil {
				t.Fatal(err)
			}
			done = carryAgain(t, e, v, hello)
			c.meetsSmall(t) // on the same connection
			_ = c.Close()
			<-done
		})
	}
}

// TestBrokenSmallAnswersAreNotResults checks that an answer that breaks off is not a result, and
// that its part reaches the gateway.
func TestBrokenSmallAnswersAreNotResults(t *testing.T) {
	t.Parallel()
	v := newRendezvous(t)
	done := carrying(t, v, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "100")
		_, _ = io.WriteString(w, "half")
	}), hello)
	c := v.next(t, done)
	c.meetsSmall(t)
	resp, err := http.ReadResponse(c.in, nil)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(resp.Body); string(b) != "half" || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("%q, %v", b, err)
	}
	if r := <-done; r.Err != nil || len(r.Output) != 0 {
		t.Errorf("%v with %d items", r.Err, len(r.Output))
	}
	if r := <-carrying(t, v, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }), hello); r.Err != nil || len(r.Output) != 0 {
		t.Errorf("without a byte: %v with %d items", r.Err, len(r.Output))
	}
	if r := <-carrying(t, v, http.NotFoundHandler(), "GET /"); r.Err == nil {
		t.Error("no error for a request that is none")
	}
}

// TestRequestEndsWhenItsCallerLeaves checks that the function's request ends without an answer when
// its caller leaves.
func TestRequestEndsWhenItsCallerLeaves(t *testing.T) {
	t.Parallel()
	v := newRendezvous(t)
	begun := make(chan struct{})
	e := newExchanges(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		close(begun)
		<-r.Context().Done()
	}), 2, 0, 0)
	ctx, leave := context.WithCancel(t.Context())
	done := make(chan stage.Result, 1)
	go func() { done <- e.carryIn(ctx, &stage.Call{}, "unix token "+v.path, []byte(hello)) }()
	<-begun
	leave()
	if r := <-done; !errors.Is(r.Err, context.Canceled) || len(r.Output) != 0 {
		t.Errorf("%v with %d items", r.Err, len(r.Output))
	}
	e.close(t.Context())
	if r := e.carryIn(t.Context(), &stage.Call{}, "unix token "+v.path, []byte(hello)); !errors.Is(r.Err, errEnds) {
		t.Errorf("after the end: %v", r.Err)
	}
}
