package telemetry

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	api "go.opentelemetry.io/otel/trace"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// ReplicaEvent is a step in a replica's life.
type ReplicaEvent struct {
	At                      time.Time
	Function, Replica, Node string
	// Ordered, started or ready; or failed, stopped or lost, which are ends. Others are ignored.
	Kind   string
	Path   string // for started: fork, cold or process
	Phases []node.Phase
	Cause  string
}

// replica is a replica whose start has a trace.
type replica struct {
	ctx   context.Context
	span  api.Span
	ready time.Time // zero: not ready yet
}

// Replica builds a trace of a replica's start from the steps of its life, which must come in order.
// It does not block.
func (t *Tracer) Replica(e ReplicaEvent) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e.Kind == "ordered" {
		r := &replica{}
		r.ctx, r.span = t.tracer.Start(context.Background(), "replica start", api.WithTimestamp(e.At), api.WithAttributes(
			attribute.String("stagecoach.function", e.Function), attribute.String("stagecoach.replica", e.Replica),
			attribute.String("stagecoach.node", e.Node), attribute.String("stagecoach.why", e.Cause),
		))
		t.replicas[e.Replica] = r
		return
	}
	r := t.replicas[e.Replica]
	if r == nil {
		return
	}
	switch e.Kind {
	case "started":
		r.span.SetAttributes(attribute.String("stagecoach.start.path", e.Path))
		t.phases(r, e)
	case "ready":
		r.ready = e.At
		t.phases(r, e)
		t.later(func() { r.span.End(api.WithTimestamp(e.At)) })
	case "failed", "stopped", "lost":
		if r.ready.IsZero() && e.Kind != "stopped" {
			r.span.SetStatus(codes.Error, e.Cause)
		}
		if !t.later(func() { t.end(r, e) }) { // after the requests that ended before it
			delete(t.replicas, e.Replica)
		}
	}
}

// end forgets a replica. It ends the span of a replica that never became ready.
func (t *Tracer) end(r *replica, e ReplicaEvent) {
	t.mu.Lock()
	delete(t.replicas, e.Replica)
	t.mu.Unlock()
	r.span.End(api.WithTimestamp(e.At)) // does nothing the second time
}

// phases creates spans of consecutive phases, the last of which ended with the event.
func (t *Tracer) phases(r *replica, e ReplicaEvent) {
	t.later(func() {
		begin := e.At
		for _, p := range e.Phases {
			begin = begin.Add(-p.Took)
		}
		for _, p := range e.Phases {
			if p.Took > 0 {
				_, s := t.tracer.Start(r.ctx, p.Name, api.WithTimestamp(begin))
				s.End(api.WithTimestamp(begin.Add(p.Took)))
			}
			begin = begin.Add(p.Took)
		}
	})
}

// startedFor returns the start of the replica that a call ran on, if the replica became ready while
// the call waited.
func (t *Tracer) startedFor(c *task.Timing) (api.SpanContext, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.replicas[c.Replica]
	if r == nil || r.ready.IsZero() || r.ready.Before(c.Start) {
		return api.SpanContext{}, false
	}
	return r.span.SpanContext(), r.span.SpanContext().IsSampled()
}
