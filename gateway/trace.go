package gateway

import (
	"context"
	"log/slog"
	"net/http"
	"time"

	"github.com/stagecoach-serving/stagecoach/task"
)

// Tracer makes spans of requests; package telemetry has one.
type Tracer interface {
	// Begin starts the span of a request that came at start, below the one that the client names, if it does.
	Begin(start time.Time, traceparent, tracestate string) Trace
}

// Trace is the span of one request.
type Trace interface {
	// Context returns the traceparent for what the request leads to, and whether the span is recorded.
	Context() (traceparent string, recorded bool)
	// End ends the span and makes those of the calls.
	End(task.Ended)
}

// begin starts a request's trace, if there is a tracer.
func (g *Gateway) begin(start time.Time, traceparent, tracestate string) Trace {
	if g.cfg.Tracer == nil {
		return nil
	}
	return g.cfg.Tracer.Begin(start, traceparent, tracestate)
}

// trace gives a request its place in the trace.
func trace(r *task.Request, t Trace) {
	if t != nil {
		r.Traceparent, r.Traced = t.Context()
	}
}

// ended is what becomes of a request's end: spans and a line in the log, which says more than debug's only when the platform
// or the function failed.
func (g *Gateway) ended(t Trace, traceparent string, e task.Ended) {
	level := slog.LevelDebug
	if e.Status >= http.StatusInternalServerError {
		level = slog.LevelInfo
	}
	logs := g.cfg.Log.Enabled(context.Background(), level)
	if t == nil && !logs {
		return
	}
	e.End = time.Now()
	if t != nil {
		traceparent, _ = t.Context()
		t.End(e)
	}
	if !logs {
		return
	}
	attributes := []slog.Attr{
		slog.String("call", e.CallID), slog.String("function", e.Target), slog.Int("status", e.Status),
		slog.Duration("duration", e.End.Sub(e.Start)), slog.Int("attempts", len(e.Calls)),
	}
	if e.Async != "" {
		attributes = append(attributes, slog.String("async", e.Async))
	}
	if validTrace(traceparent) {
		attributes = append(attributes, slog.String("trace", traceparent[3:35]))
	}
	if e.Cause != "" {
		attributes = append(attributes, slog.String("error", e.Cause))
	}
	g.cfg.Log.LogAttrs(context.Background(), level, "request", attributes...)
}

// headerValue returns the first field of that name; empty: there is none.
func headerValue(h []task.Header, name string) string {
	for _, f := range h {
		if f.Name == name {
			return f.Value
		}
	}
	return ""
}
