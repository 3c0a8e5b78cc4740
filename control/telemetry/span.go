package telemetry

import (
	"context"
	"encoding/binary"
	"math/rand/v2"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	api "go.opentelemetry.io/otel/trace"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// callsTraced bounds the calls of a request that get spans, so that an input of ten thousand items
// does not displace other requests' spans.
const callsTraced = 512

// Span is the span of one request.
type Span struct {
	tracer *Tracer
	ctx    context.Context // contains the span
	span   api.Span
	parent string // traceparent for the request's calls
}

// Begin starts the span of a request that came at start. Its parent is the span in the client's W3C
// headers, if there is one. The sampler decides whether the new span is recorded. By default it is
// recorded if the client's span is, and always if there is none.
func (t *Tracer) Begin(start time.Time, traceparent, tracestate string) *Span {
	ctx := context.Background()
	w3c := propagation.TraceContext{}
	if traceparent != "" {
		ctx = w3c.Extract(ctx, propagation.MapCarrier{"traceparent": traceparent, "tracestate": tracestate})
	}
	s := &Span{tracer: t}
	s.ctx, s.span = t.tracer.Start(ctx, "request", api.WithSpanKind(api.SpanKindServer), api.WithTimestamp(start))
	out := propagation.MapCarrier{}
	w3c.Inject(s.ctx, out)
	s.parent = out["traceparent"]
	return s
}

// Context returns the traceparent for the request's calls, and whether the span is recorded.
func (s *Span) Context() (traceparent string, recorded bool) { return s.parent, s.span.IsRecording() }

// End ends the span and creates those of the calls, on another goroutine.
func (s *Span) End(e task.Ended) {
	if s.span.IsRecording() {
		s.tracer.later(func() { s.end(&e) })
	}
}

func (s *Span) end(e *task.Ended) {
	name := pipeline.ParseKey(e.Target).Short()
	s.span.SetName(e.Method + " /function/" + name)
	if e.Async == "accept" {
		s.span.SetName(e.Method + " /async-function/" + name)
	} else if e.Async != "" {
		s.span.SetName("run " + name)
	}
	s.span.SetAttributes(
		attribute.String("stagecoach.call", e.CallID), attribute.String("stagecoach.function", e.Target),
		attribute.Int("http.response.status_code", e.Status), attribute.Int("stagecoach.attempts", len(e.Calls)),
	)
	if e.Method != "" {
		s.span.SetAttributes(attribute.String("http.request.method", e.Method), attribute.String("stagecoach.path", e.Path))
	}
	if e.Status >= 500 {
		s.span.SetStatus(codes.Error, e.Cause)
	} else if e.Cause != "" {
		s.span.SetAttributes(attribute.String("stagecoach.cause", e.Cause))
	}
	for i := range e.Calls[:min(len(e.Calls), callsTraced)] {
		s.call(&e.Calls[i])
	}
	s.span.End(api.WithTimestamp(e.End))
}

// call creates the spans of one attempt of a call. Queue starts with the call, and inference ends
// with it. The gap between them is transport.
func (s *Span) call(c *task.Timing) {
	t := s.tracer
	ctx := context.WithValue(s.ctx, idKey{}, callID(s.parent, c.Task, c.Attempt))
	ctx, span := t.tracer.Start(ctx, "call "+c.Stage, api.WithSpanKind(api.SpanKindClient), api.WithTimestamp(c.Start), api.WithAttributes(
		attribute.String("stagecoach.stage", c.Stage), attribute.String("stagecoach.function", c.Function),
		attribute.Int64("stagecoach.task", int64(c.Task)), attribute.Int("stagecoach.attempt", int(c.Attempt)),
		attribute.String("stagecoach.outcome", outcomes[min(int(c.Code), len(outcomes)-1)]),
	))
	ctx = context.WithValue(ctx, idKey{}, nil)
	if c.Replica != "" {
		span.SetAttributes(attribute.String("stagecoach.replica", c.Replica))
	}
	if c.Variant != "" {
		span.SetAttributes(attribute.String("stagecoach.variant", c.Variant))
	}
	if c.Batch != 0 {
		span.SetAttributes(attribute.Int64("stagecoach.batch.id", int64(c.Batch)), attribute.Int("stagecoach.batch.size", c.BatchSize))
	}
	if c.Code != task.OK {
		span.SetStatus(codes.Error, c.Message)
	}
	waited := c.Start.Add(c.Wait)
	if waited.After(c.End) {
		waited = c.End
	}
	if c.Wait > 0 {
		options := []api.SpanStartOption{api.WithTimestamp(c.Start)}
		if start, ok := t.startedFor(c); ok {
			options = append(options, api.WithLinks(api.Link{SpanContext: start, Attributes: []attribute.KeyValue{attribute.String("stagecoach.link", "replica start")}}))
		}
		_, queue := t.tracer.Start(ctx, "queue", options...)
		queue.End(api.WithTimestamp(waited))
	}
	if c.Service > 0 {
		begin := c.End.Add(-c.Service)
		if begin.Before(waited) {
			begin = waited
		}
		_, inference := t.tracer.Start(ctx, "inference", api.WithTimestamp(begin))
		inference.End(api.WithTimestamp(c.End))
	}
	span.End(api.WithTimestamp(c.End))
}

// outcomes are the names of task.Code's values.
var outcomes = [...]string{"ok", "bad input", "failed", "replica lost", "expired", "overloaded", "canceled", "unavailable", "redeployed", "out of memory", "dropped", "unknown"}

// callID returns the span id that the function got in its traceparent.
func callID(parent string, number uint32, attempt uint8) api.SpanID {
	sc := api.SpanContextFromContext(propagation.TraceContext{}.Extract(context.Background(),
		propagation.MapCarrier{"traceparent": task.CallParent(parent, number, attempt)}))
	return sc.SpanID()
}

// idKey is the context key of the id for the next span.
type idKey struct{}

// ids generates random ids, except for spans whose id was announced before they existed.
type ids struct{}

// NewIDs implements sdk.IDGenerator.
func (i ids) NewIDs(ctx context.Context) (api.TraceID, api.SpanID) {
	var id api.TraceID
	for !id.IsValid() {
		binary.LittleEndian.PutUint64(id[:8], rand.Uint64())
		binary.LittleEndian.PutUint64(id[8:], rand.Uint64())
	}
	return id, i.NewSpanID(ctx, id)
}

// NewSpanID implements sdk.IDGenerator.
func (ids) NewSpanID(ctx context.Context, _ api.TraceID) api.SpanID {
	if id, ok := ctx.Value(idKey{}).(api.SpanID); ok {
		return id
	}
	var id api.SpanID
	for !id.IsValid() {
		binary.LittleEndian.PutUint64(id[:], rand.Uint64())
	}
	return id
}
