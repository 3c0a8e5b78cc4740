package gateway

import (
	"bytes"
	"context"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// tracer records what it is told.
type tracer struct {
	mu     sync.Mutex
	parent []string
	ended  []task.Ended
}

func (t *tracer) Begin(_ time.Time, traceparent, tracestate string) Trace {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.parent = append(t.parent, traceparent+" "+tracestate)
	return t
}

const ownTrace = "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01"

func (t *tracer) Context() (string, bool) { return ownTrace, true }

func (t *tracer) End(e task.Ended) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ended = append(t.ended, e)
}

// TestTracerSeesEachRequest checks that a tracer sees the start and end of each request, successful
// or not, sync and async, and that the trace context is passed on.
func TestTracerSeesEachRequest(t *testing.T) {
	const client = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	tr := &tracer{}
	var log bytes.Buffer
	f := newFront(t, func(c *Config) {
		c.Tracer = tr
		c.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelInfo}))
	})
	timings := []task.Timing{{Stage: "echo", Attempt: 1}}
	f.invoker.f = func(_ context.Context, r task.Request) (*task.Response, *task.Error) {
		if r.Traceparent != ownTrace || !r.Traced {
			t.Errorf("the request carries %q, traced %t, want the tracer's own", r.Traceparent, r.Traced)
		}
		if string(r.Input[0].Bytes) == "bad" {
			return nil, &task.Error{Status: http.StatusBadGateway, Cause: "lost", Stages: timings}
		}
		resp := echo(r)
		resp.Stages = timings
		return resp, nil
	}
	header := []string{"Traceparent", client, "Tracestate", "a=1", "X-Call-Id", "mine"}
	f.do(http.MethodPost, "/function/echo/p", "good", header...)
	f.do(http.MethodPost, "/function/echo", "bad", header...)
	f.do(http.MethodPost, "/async-function/echo", "good", header...)
	var e Entry
	if err := e.UnmarshalBinary(f.journal.entries[0]); err != nil {
		t.Fatal(err)
	}
	f.Work(t.Context(), e, Try{Attempt: 1}, Retry{Attempts: 1})

	want := []task.Ended{
		{Async: "", Status: http.StatusOK, Method: http.MethodPost, Path: "/p", Calls: timings},
		{Async: "", Status: http.StatusBadGateway, Method: http.MethodPost, Path: "/", Cause: "lost", Calls: timings},
		{Async: "accept", Status: http.StatusAccepted, Method: http.MethodPost, Path: "/"},
		{Async: "run", Status: http.StatusOK, Calls: timings},
	}
	if len(tr.ended) != len(want) {
		t.Fatalf("%d ends, want %d: %+v", len(tr.ended), len(want), tr.ended)
	}
	for i, w := range want {
		got := tr.ended[i]
		if got.Async != w.Async || got.Status != w.Status || got.Method != w.Method || got.Path != w.Path || got.Cause != w.Cause || len(got.Calls) != len(w.Calls) ||
			got.CallID != "mine" || got.Target != "echo.openfaas-fn" || got.End.Before(got.Start) {
			t.Errorf("end %d: %+v, want %+v", i, got, w)
		}
	}
	if tr.parent[0] != client+" a=1" || tr.parent[3] != ownTrace+" a=1" {
		t.Errorf("parents %q, want the client's, and for the run that of the accepting span", tr.parent)
	}
	if lines := strings.Split(strings.TrimSpace(log.String()), "\n"); len(lines) != 1 || !strings.Contains(lines[0], "call=mine function=echo.openfaas-fn status=502") ||
		!strings.Contains(lines[0], "attempts=1 trace=0af7651916cd43dd8448eb211c80319c error=lost") {
		t.Errorf("at info: %q, want one line of the request that failed", lines)
	}
	if n := f.Recent(pipeline.ParseKey("echo.openfaas-fn"), 0).InFlight; n != 0 {
		t.Errorf("%d in flight, want none", n)
	}
}
