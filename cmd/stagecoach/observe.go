package main

import (
	"context"
	"time"

	"github.com/stagecoach-serving/stagecoach/cluster"
	"github.com/stagecoach-serving/stagecoach/gateway"
	"github.com/stagecoach-serving/stagecoach/telemetry"
)

// flushTimeout bounds what a collector may cost the shutdown.
const flushTimeout = 5 * time.Second

// openTelemetry makes what sends spans, if somebody wants them.
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

// gatewayTracer is the tracer in the gateway's words; nil when there is none, so that requests pay nothing.
func (u *up) gatewayTracer() gateway.Tracer {
	if u.tracer == nil {
		return nil
	}
	return requestTracer{u.tracer}
}

// requestTracer is the gateway's tracer.
type requestTracer struct{ *telemetry.Tracer }

// Begin implements gateway.Tracer.
func (t requestTracer) Begin(start time.Time, traceparent, tracestate string) gateway.Trace {
	return t.Tracer.Begin(start, traceparent, tracestate)
}

// replicaEvent takes a step in a replica's life to whoever wants to know.
func (u *up) replicaEvent(e cluster.Event) {
	if u.tracer == nil {
		return
	}
	out := telemetry.ReplicaEvent{At: e.At, Function: e.Function, Replica: e.Replica, Node: e.Node, Kind: string(e.Kind), Path: e.Path, Cause: e.Cause}
	for _, p := range e.Phases {
		out.Phases = append(out.Phases, telemetry.Phase(p))
	}
	u.tracer.Replica(out)
}
