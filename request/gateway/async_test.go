package gateway

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

func TestAcceptJournalsRequest(t *testing.T) {
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

func TestAcceptRefusesInvalidRequests(t *testing.T) {
	f := newFront(t, nil)
	for _, method := range []string{http.MethodGet, http.MethodPut, http.MethodHead} {
		if w := f.do(method, "/async-function/echo", ""); w.Code != http.StatusMethodNotAllowed || w.Header().Get("Allow") != http.MethodPost {
			t.Errorf("%s: status %d, header %v", method, w.Code, w.Header())
		}
	}
	if w := f.do(http.MethodPost, "/async-function/nosuch", ""); w.Code != http.StatusNotFound {
		t.Errorf("unknown: status %d", w.Code)
	}
	for _, u := range []string{"ftp://x", "/cb", "http://", "http://x/\x7f", "http://x/" + strings.Repeat("a", 2048), "http://x:0/", "http://x:70000", "http://x:65536/", "http://:80/", "http://[::1]:99999/"} {
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
	f.journal.refuse = fmt.Errorf("10 wait, see async-queue-limit: %w", ErrQueueFull)
	if w := f.do(http.MethodPost, "/async-function/echo", "x"); w.Code != http.StatusTooManyRequests || w.Header().Get("Retry-After") != "5" || !strings.Contains(w.Body.String(), "async-queue-limit") {
		t.Errorf("too many for the journal: status %d, %v, %q", w.Code, w.Header(), w.Body)
	}
	f.journal.refuse = fmt.Errorf("the disk of x: %w", ErrFull)
	if w := f.do(http.MethodPost, "/async-function/echo", "x"); w.Code != http.StatusServiceUnavailable || w.Header().Get("Retry-After") != "5" || !strings.Contains(w.Body.String(), "the disk of x") {
		t.Errorf("a full journal: status %d, %v, %q", w.Code, w.Header(), w.Body)
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
		CallID: "a", Name: "echo", Timeout: time.Second, Callback: "http://x", Inside: true, Accepted: time.Unix(1, 2).UTC(),
		Inference: &tensor.Inference{ID: "7", Outputs: []tensor.Output{{Name: "y"}}},
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

// TestEntryOfTheFirstVersionStillRuns checks that entries accepted by the first version still run.
func TestEntryOfTheFirstVersionStillRuns(t *testing.T) {
	const head = `{"id":"a.b","target":"echo.openfaas-fn","traceparent":"t","header":[{"Name":"N","Value":"v"}],"callId":"a","name":"echo",` +
		`"timeout":1000000000,"callback":"http://x","inside":true,"accepted":"1970-01-01T00:00:01.000000002Z"}`
	input := tensor.Activation{{ContentType: "text/plain", Bytes: []byte("x")}}
	b := tensor.AppendActivation(append(binary.AppendUvarint([]byte{1}, uint64(len(head))), head...), input)
	want := Entry{
		Request: task.Request{ID: "a.b", Target: "echo.openfaas-fn", Traceparent: "t", Header: []task.Header{{Name: "N", Value: "v"}}, Input: input},
		CallID:  "a", Name: "echo", Timeout: time.Second, Callback: "http://x", Inside: true, Accepted: time.Unix(1, 2).UTC(),
	}
	var got Entry
	if err := got.UnmarshalBinary(b); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
}

func FuzzEntry(f *testing.F) {
	b, err := Entry{Request: task.Request{ID: "a", Input: tensor.Activation{{Bytes: []byte("x")}}}}.MarshalBinary()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte{entryVersionJSON, 2, '{', '}', 0})
	f.Add([]byte{entryVersion, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		var e, again Entry
		if e.UnmarshalBinary(b) != nil {
			return
		}
		c, err := e.MarshalBinary()
		if err != nil {
			return // this time zone cannot be written as JSON
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

// receiver is an HTTP transport that records posts and returns its answers in order.
type receiver struct {
	answers []int // the last one repeats; 0 means that the connection fails
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

func TestWorkRetriesAsConfigured(t *testing.T) {
	ok := func(_ context.Context, r task.Request) (*task.Response, *task.Error) { return echo(r), nil }
	fails := func(e task.Error) func(context.Context, task.Request) (*task.Response, *task.Error) {
		return func(context.Context, task.Request) (*task.Response, *task.Error) { return nil, &e }
	}
	says := func(status, after string) func(context.Context, task.Request) (*task.Response, *task.Error) {
		return func(_ context.Context, r task.Request) (*task.Response, *task.Error) {
			resp := echo(r)
			resp.Header = []task.Header{{Name: task.HeaderStatus, Value: status}, {Name: "Retry-After", Value: after}}
			return resp, nil
		}
	}
	const last = 3
	for name, tc := range map[string]struct {
		invoke  func(context.Context, task.Request) (*task.Response, *task.Error)
		target  string
		attempt int
		once    bool // not idempotent
		again   bool
		busy    bool
		dead    string // must be part of the cause
		status  int    // status of the notice; 0: no notice
		body    string
		after   time.Duration // lower bound
	}{
		"done":                           {invoke: ok, attempt: 1, status: 200, body: "hello"},
		"done at the last chance":        {invoke: ok, attempt: last, status: 200, body: "hello"},
		"an answer not worth another":    {invoke: fails(task.Error{Status: 400, Cause: "bad"}), attempt: 1, status: 400, body: "bad\n"},
		"failed":                         {invoke: fails(task.Error{Status: 500, Stage: "echo", Cause: "boom"}), attempt: 1, again: true, after: time.Second},
		"failed for the last time":       {invoke: fails(task.Error{Status: 500, Stage: "echo", Cause: "boom"}), attempt: last, dead: `attempt 3 of 3: status 500: stage "echo": boom`, status: 500, body: "stage \"echo\": boom\n"},
		"overloaded":                     {invoke: fails(task.Error{Status: 429, Cause: "full", RetryAfter: 40 * time.Second}), attempt: 1, again: true, busy: true, after: 20 * time.Second},
		"a fault, whatever its status":   {invoke: fails(task.Error{Status: 507, Internal: true, Cause: "disk"}), attempt: 2, again: true, after: time.Second},
		"a fault for the last time":      {invoke: fails(task.Error{Status: 507, Internal: true, Cause: "disk"}), attempt: last, dead: "disk", status: 507},
		"a fault of what may run once":   {invoke: fails(task.Error{Status: 507, Internal: true, Cause: "lost"}), attempt: 1, once: true, dead: "lost", status: 507},
		"convicted":                      {invoke: fails(task.Error{Status: 503, Convicted: true, Cause: "its replica ended"}), attempt: 1, dead: "its replica ended", status: 503},
		"deleted in between":             {target: "gone.openfaas-fn", attempt: 1, dead: "no function or pipeline", status: 404},
		"the function's own status":      {invoke: says("503", "30"), attempt: 1, again: true, after: 15 * time.Second},
		"the function's own good status": {invoke: says("201", ""), attempt: 1, status: 201, body: "hello"},
		"the function's own 4xx":         {invoke: says("422", ""), attempt: 1, status: 422, body: "hello"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFront(t, nil)
			f.invoker.f = tc.invoke
			e := Entry{
				Request: task.Request{
					ID: "mine.1", Target: "echo.openfaas-fn", Input: tensor.Activation{{ContentType: "text/plain", Bytes: []byte("hello")}},
					Header: []task.Header{{Name: "X-Attempt", Value: "999"}, {Name: "X-Redelivered", Value: "true"}},
				},
				CallID: "mine", Name: "echo", Timeout: time.Minute, Callback: "http://client:81/cb", Accepted: time.Unix(7, 0),
			}
			if tc.target != "" {
				e.Request.Target = pipeline.ParseKey(tc.target).String()
			}
			retry := Retry{Attempts: last, Codes: []int{429, 500, 503}, Faults: !tc.once, MinWait: time.Second, MaxWait: time.Minute}
			end := f.Work(t.Context(), e, Try{Attempt: tc.attempt}, retry)
			if end.Again != tc.again || end.Busy != tc.busy || end.After < tc.after || end.After > time.Minute {
				t.Errorf("%+v, want again %t after %v, busy %t", end, tc.again, tc.after, tc.busy)
			}
			if (end.Err != nil) != (tc.again || tc.dead != "") || tc.dead != "" && !strings.Contains(end.Err.Error(), tc.dead) {
				t.Errorf("error %v, want %q", end.Err, tc.dead)
			}
			if tc.target == "" {
				if got := header(f.invoker.last(t), "X-Attempt"); len(got) != 1 || got[0] != strconv.Itoa(tc.attempt) {
					t.Errorf("the function reads attempts %q, want %d", got, tc.attempt)
				}
				if got := header(f.invoker.last(t), "X-Redelivered"); len(got) != 0 {
					t.Errorf("the function reads redelivered %q of a first delivery", got)
				}
				f.Work(t.Context(), e, Try{Attempt: tc.attempt, Redelivered: true}, retry)
				if got := header(f.invoker.last(t), "X-Redelivered"); len(got) != 1 || got[0] != "true" {
					t.Errorf("the function reads redelivered %q, want true", got)
				}
			}
			switch n := end.Notice; {
			case n == nil:
				if tc.status != 0 {
					t.Error("nothing is told")
				}
			case n.Status != tc.status || n.CallID != "mine" || n.Name != "echo" || n.URL != e.Callback || n.Host() != "client:81" ||
				!n.Start.Equal(e.Accepted) || n.Attempt != tc.attempt || tc.body != "" && string(n.Body) != tc.body:
				t.Errorf("notice %+v", n)
			}
		})
	}
}

// TestRunThatIsCutShortDoesNotCount checks that an entry is not done if its process ends during the
// run.
func TestRunThatIsCutShortDoesNotCount(t *testing.T) {
	f := newFront(t, nil)
	ctx, stop := context.WithCancel(t.Context())
	f.invoker.f = func(context.Context, task.Request) (*task.Response, *task.Error) {
		stop()
		return nil, &task.Error{Status: 500}
	}
	e := Entry{Request: task.Request{Target: "echo.openfaas-fn"}, Timeout: time.Minute, Callback: "http://client/cb"}
	if end := f.Work(ctx, e, Try{Attempt: 1}, Retry{}); !errors.Is(end.Err, context.Canceled) || end.Notice != nil {
		t.Errorf("%+v, want canceled and nothing told", end)
	}
}

func TestRetryWait(t *testing.T) {
	r := Retry{MinWait: time.Second, MaxWait: 10 * time.Second}
	for attempt, want := range map[int][2]time.Duration{1: {1, 2}, 2: {1, 3}, 3: {2, 6}, 9: {5, 10}, 100: {5, 10}} {
		for range 100 {
			if d := r.wait(attempt, 0); d < want[0]*time.Second || d > want[1]*time.Second {
				t.Errorf("after attempt %d: %v, want %d to %d s", attempt, d, want[0], want[1])
			}
		}
	}
	if d := (Retry{}).wait(3, time.Hour); d != 0 {
		t.Errorf("without waits: %v", d)
	}
}

func TestNoticeBinary(t *testing.T) {
	n := Notice{URL: "http://x/y", Result: Result{
		CallID: "c", Name: "f", Status: 500, ContentType: "text/plain", Body: []byte("b"), Start: time.Unix(1, 2).UTC(), Duration: 3, Attempt: 4,
	}}
	b, err := n.MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	var got Notice
	if err := got.UnmarshalBinary(b); err != nil || !reflect.DeepEqual(got, n) {
		t.Errorf("got %+v, %v, want %+v", got, err, n)
	}
	for i := range len(b) - 1 { // the body may have any length
		if err := got.UnmarshalBinary(b[:i]); err == nil {
			t.Errorf("cut to %d of %d bytes: no error", i, len(b))
		}
	}
}

func FuzzNotice(f *testing.F) {
	b, err := Notice{URL: "http://x", Result: Result{CallID: "a", Body: []byte("x")}}.MarshalBinary()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte{noticeVersion, 2, '{', '}'})
	f.Fuzz(func(t *testing.T, b []byte) {
		var n, again Notice
		if n.UnmarshalBinary(b) != nil {
			return
		}
		c, err := n.MarshalBinary()
		if err != nil {
			return // JSON cannot write this time
		}
		if err := again.UnmarshalBinary(c); err != nil || !bytes.Equal(n.Body, again.Body) || n.URL != again.URL {
			t.Fatalf("%v after a round trip of %q", err, b)
		}
	})
}

func TestDeliverRetriesUnlessRefused(t *testing.T) {
	for name, tc := range map[string]struct {
		answer, attempt int
		err, again      bool
		after           [2]time.Duration
	}{
		"taken":               {204, 1, false, false, [2]time.Duration{}},
		"refused":             {404, 1, true, false, [2]time.Duration{}},
		"redirected":          {307, 1, true, false, [2]time.Duration{}},
		"nobody there":        {0, 1, true, true, [2]time.Duration{1, 2}},
		"too much":            {429, 2, true, true, [2]time.Duration{1, 3}},
		"broken":              {503, 4, true, true, [2]time.Duration{4, 12}},
		"broken for too long": {503, 10, true, false, [2]time.Duration{}},
	} {
		t.Run(name, func(t *testing.T) {
			r := &receiver{answers: []int{tc.answer}}
			end := NewCallbacks(r, nil).Deliver(t.Context(), Notice{URL: "http://user:pass@client/cb?key=hidden", Result: Result{Status: 200, Attempt: 7, Body: []byte("x")}}, Try{Attempt: tc.attempt})
			if (end.Err != nil) != tc.err || end.Again != tc.again || end.After < tc.after[0]*time.Second || end.After > tc.after[1]*time.Second {
				t.Errorf("%+v, want error %t, again %t after %v s", end, tc.err, tc.again, tc.after)
			}
			if end.Err != nil && (strings.Contains(end.Err.Error(), "pass") || strings.Contains(end.Err.Error(), "hidden") || !strings.Contains(end.Err.Error(), "callback to http://client/cb: ")) {
				t.Errorf("the error tells the password or the query, or not where to: %v", end.Err)
			}
			if len(r.posts) != 1 || r.bodies[0] != "x" || r.posts[0].Header.Get("X-Attempt") != "7" {
				t.Errorf("%d posts, want one", len(r.posts))
			}
			if got, want := r.posts[0].Header.Get("X-Redelivered") == "true", tc.attempt > 1; got != want {
				t.Errorf("redelivered %t at attempt %d, want %t", got, tc.attempt, want)
			}
		})
	}
	again := &receiver{answers: []int{204}}
	NewCallbacks(again, nil).Deliver(t.Context(), Notice{URL: "http://client/cb"}, Try{Attempt: 1, Redelivered: true})
	if again.posts[0].Header.Get("X-Redelivered") != "true" {
		t.Error("what an earlier process may have told is not marked")
	}
	ctx, stop := context.WithCancel(t.Context())
	stop()
	if end := NewCallbacks(&receiver{answers: []int{0}}, nil).Deliver(ctx, Notice{URL: "http://client"}, Try{Attempt: 1}); end.Err == nil || end.Again {
		t.Errorf("cut short: %+v", end)
	}
}

// TestInsideCallbacksReachNoMoreThanFunctions checks that the callback of a request sent by a
// function may reach only what functions may reach.
func TestInsideCallbacksReachNoMoreThanFunctions(t *testing.T) {
	for _, inside := range []bool{false, true} {
		f := newFront(t, nil)
		if inside {
			f.handler = f.InsideHandler(http.NotFoundHandler())
		}
		if w := f.do(http.MethodPost, "/async-function/echo", "x", "X-Callback-Url", "http://client/cb"); w.Code != http.StatusAccepted {
			t.Fatalf("status %d: %s", w.Code, w.Body)
		}
		var e Entry
		if err := e.UnmarshalBinary(f.journal.entries[0]); err != nil {
			t.Fatal(err)
		}
		end := f.Work(t.Context(), e, Try{Attempt: 1}, Retry{Attempts: 1})
		b, err := end.Notice.MarshalBinary()
		var n Notice
		if err == nil {
			err = n.UnmarshalBinary(b)
		}
		if err != nil {
			t.Fatal(err)
		}
		out, in := &receiver{answers: []int{204}}, &receiver{answers: []int{204}}
		if end := NewCallbacks(out, in).Deliver(t.Context(), n, Try{Attempt: 1}); end.Err != nil || len(in.posts)+len(out.posts) != 1 || (len(in.posts) == 1) != inside {
			t.Errorf("inside %t: %d posts inside, %d outside, %v", inside, len(in.posts), len(out.posts), end.Err)
		}
	}
}

// TestDeliverOverHTTP uses the real client and a real receiver, which speaks HTTP/2 over TLS.
func TestDeliverOverHTTP(t *testing.T) {
	for version, start := range map[int]func(*httptest.Server){1: (*httptest.Server).Start, 2: (*httptest.Server).StartTLS} {
		got := make(chan *http.Request, 1)
		s := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got <- r }))
		s.EnableHTTP2 = true
		start(s)
		defer s.Close()
		transport := CallbackTransport(new(net.Dialer).DialContext)
		if version == 2 {
			transport.TLSClientConfig = &tls.Config{RootCAs: s.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs}
		}
		c := NewCallbacks(transport, transport)
		defer c.Close()
		if end := c.Deliver(t.Context(), Notice{URL: s.URL + "/cb", Result: Result{CallID: "mine", Status: 200, Body: []byte("x")}}, Try{Attempt: 1}); end.Err != nil {
			t.Fatal(end.Err)
		}
		if r := <-got; r.ProtoMajor != version || r.Method != http.MethodPost || r.URL.Path != "/cb" || r.Header.Get("X-Call-Id") != "mine" {
			t.Errorf("received %s %s %s %v, want HTTP/%d", r.Method, r.URL, r.Proto, r.Header, version)
		}
	}
}

// TestCallOf checks that a request's id is its X-Call-Id, whether the client or the gateway
// chose it.
func TestCallOf(t *testing.T) {
	ids := newIDs()
	made := ids.next()
	for request, want := range map[string]string{made: made, "mine." + made: "mine", "a.b." + made: "a.b"} {
		if got := CallOf(request); got != want {
			t.Errorf("%s: %q, want %q", request, got, want)
		}
	}
}
