package gateway

import (
	"context"
	"log/slog"
	"net/http"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

// Tracer creates the spans of requests; package telemetry implements it.
type Tracer interface {
	// Begin starts the span of a request that came at start. Its parent is the client's span, if
	// there is one.
	Begin(start time.Time, traceparent, tracestate string) Trace
}

// Trace is the span of one request.
type Trace interface {
	// Context returns the traceparent for the request's calls, and whether the span is recorded.
	Context() (traceparent string, recorded bool)
	// End ends the span and creates those of the calls.
	End(task.Ended)
}

// begin starts a request's trace if there is a tracer.
func (g *Gateway) begin(start time.Time, traceparent, tracestate string) Trace {
	if g.cfg.Tracer == nil {
		return nil
	}
	return g.cfg.Tracer.Begin(start, traceparent, tracestate)
}

// trace puts the trace context into a request.
func trace(r *task.Request, t Trace) {
	if t != nil {
		r.Traceparent, r.Traced = t.Context()
	}
}

// ended records the end of a request: its spans and a line in the log. The line is above debug
// level only if the platform or the function failed.
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

// headerValue returns the first field with this name, or "".
func headerValue(h []task.Header, name string) string {
	for _, f := range h {
		if f.Name == name {
			return f.Value
		}
	}
	return ""
}
