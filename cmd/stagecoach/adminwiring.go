package main

import (
	"context"
	"fmt"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/control/cluster"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider/admin"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// admin gives the admin API the parts of this process that it reports on.
func (u *up) admin() admin.Config {
	return admin.Config{
		Registry: u.registry, Calls: u.calls, Journal: heldJournal{u.leading}, Requests: u.flow, Loop: u.loop, Replicas: replicas{u.local},
		Lines: u.lines, Recent: u.gateway, Nodes: parameterNodes{u.nodes, u.deployedFunctions()}, Operator: operatorOf(u), Members: membership{u.nodes}, Codes: errorCodes(), Events: u.latest,
		Demand: u.demand, Planes: u.leading.controls.planes,
	}
}

// latest returns the latest n events.
func (u *up) latest(n int) []schema.TopEvent {
	var out []schema.TopEvent
	for _, e := range u.events.Latest(n) {
		out = append(out, schema.TopEvent(e))
	}
	return out
}

// replicas implements admin.Replicas.
type replicas struct{ *cluster.Local }

// Counts implements admin.Replicas.
func (r replicas) Counts() map[pipeline.Key]admin.Count {
	out := map[pipeline.Key]admin.Count{}
	for key, n := range r.Local.Counts() {
		out[key] = admin.Count{Ready: n.Ready, Starting: n.Starting, Draining: n.Draining}
	}
	return out
}

// Ready implements admin.Replicas.
func (r replicas) Ready(key pipeline.Key) (n int) {
	for _, replica := range r.Replicas(key) {
		if replica.State == plan.Ready {
			n++
		}
	}
	return n
}

// Events implements admin.Replicas.
func (r replicas) Events(key pipeline.Key) []schema.Event {
	out := []schema.Event{}
	for _, e := range r.Local.Events(key) {
		out = append(out, schema.Event{At: e.At, Replica: e.Replica, Kind: string(e.Kind), Path: e.Path, Phases: phases(e.Phases), Cause: e.Cause})
	}
	return out
}

// parameterNodes implements admin.Nodes.
type parameterNodes struct {
	*nodes
	functions deployed
}

// Load implements admin.Nodes.
func (p parameterNodes) Load(ctx context.Context, node string, function pipeline.Key) (int64, error) {
	spec, ok := p.functions.Spec(function)
	if !ok {
		return 0, fmt.Errorf("function %q: %w: it was removed meanwhile", function.String(), admin.ErrNotDeployed)
	}
	return p.nodes.Load(ctx, node, spec)
}
