package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/control/cluster"
	"github.com/stagecoach-serving/stagecoach/control/events"
	"github.com/stagecoach-serving/stagecoach/control/telemetry"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/request/gateway"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// flushTimeout bounds how long a collector can delay the shutdown.
const flushTimeout = 5 * time.Second

// openTelemetry opens the tracer, if spans are to go to a collector.
func (u *up) openTelemetry(ctx context.Context) error {
	var err error
	u.tracer, err = telemetry.Open(ctx, telemetry.Config{
		Endpoint: u.cfg.Telemetry.OTLP, Version: version(), Node: u.cfg.Node.Name, Log: u.log, Metrics: u.metrics,
	})
	if err != nil || u.tracer == nil {
		return err
	}
	u.onClose(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), flushTimeout)
		defer cancel()
		return u.tracer.Close(ctx)
	})
	return nil
}

// gatewayTracer returns the tracer in the gateway's type. It returns nil if there is none, so that
// requests have no cost.
func (u *up) gatewayTracer() gateway.Tracer {
	if u.tracer == nil {
		return nil
	}
	return requestTracer{u.tracer}
}

// requestTracer gives the gateway access to the tracer.
type requestTracer struct{ *telemetry.Tracer }

// Begin implements gateway.Tracer.
func (t requestTracer) Begin(start time.Time, traceparent, tracestate string) gateway.Trace {
	return t.Tracer.Begin(start, traceparent, tracestate)
}

// replicaEvent publishes an event of a replica or a node.
func (u *up) replicaEvent(e cluster.Event) {
	of := "replica."
	if e.Replica == "" {
		of = "node."
	}
	u.events.Publish(events.Event{
		At: e.At, Kind: of + strings.ReplaceAll(string(e.Kind), " ", "-"), Function: e.Function, Replica: e.Replica, Node: e.Node,
		Path: e.Path, Phases: phases(e.Phases), Why: e.Cause,
	})
	if u.tracer == nil || e.Replica == "" {
		return
	}
	u.tracer.Replica(telemetry.ReplicaEvent{
		At: e.At, Function: e.Function.String(), Replica: e.Replica, Node: e.Node, Kind: string(e.Kind), Path: e.Path, Phases: e.Phases, Cause: e.Cause,
	})
}

// phases returns the durations of a start's parts by name.
func phases(all []node.Phase) map[string]string {
	if len(all) == 0 {
		return nil
	}
	out := map[string]string{}
	for _, p := range all {
		out[p.Name] = p.Took.String()
	}
	return out
}

// evicted publishes that a node has ended a zygote because memory was short.
func (u *up) evicted(at time.Time, node, function string, bytes int64) {
	u.events.Publish(events.Event{At: at, Kind: "zygote.evicted", Function: pipeline.ParseKey(function), Node: node, Why: fmt.Sprintf("%d MiB for others", bytes>>20)})
}

// deadLetter publishes that an async request, or its callback, has finally failed.
func (u *up) deadLetter(l queue.DeadLetter) {
	u.calls.Died(l)
	u.events.Publish(events.Event{At: l.Died, Kind: "request.dead", Function: pipeline.ParseKey(l.Function), Call: l.ID, Why: l.Cause})
}

// deployed publishes that a function was deployed or removed.
func (u *up) deployed(c provider.Change) {
	e := events.Event{Kind: "function.removed", Function: c.Key}
	if f := c.Function; f != nil {
		e.Kind, e.Why = "function.deployed", fmt.Sprintf("revision %d, image %s", f.Revision, f.Deployment.Image)
	}
	u.events.Publish(e)
}

// announcer publishes how applied plans change the scale of functions, and why.
type announcer struct {
	events *events.Hub
	wants  map[string]int // replicas by function; used only by the goroutine of the control loop
}

// applied publishes an event for each function whose number of wanted replicas p changes.
func (a *announcer) applied(p plan.Plan) {
	next := make(map[string]int, len(p.Wants))
	for _, w := range p.Wants {
		from, to := a.wants[w.Function], len(w.Slots)
		next[w.Function] = to
		if from != to {
			a.events.Publish(events.Event{Kind: "function.scaled", Function: pipeline.ParseKey(w.Function), From: &from, To: &to, Why: w.Why})
		}
	}
	a.wants = next
}
