package main

import (
	"cmp"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/control"
	"github.com/stagecoach-serving/stagecoach/control/cluster"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/request/gateway"
)

// status implements [provider.Status].
type status struct {
	registry *provider.Registry
	local    *cluster.Local
	gateway  *gateway.Gateway
	loop     *control.Loop
	nodes    *nodes
	meter    sandbox.Meter
	log      *slog.Logger
}

// The states of a function's deployed revision. A status begins with one of them.
const (
	stateReady    = "ready"    // it has a replica that takes requests
	stateUpdating = "updating" // it should have such a replica, and has none yet
	stateFailing  = "failing"  // it cannot have the replicas that it should have
	stateAsleep   = "asleep"   // it has no replicas until its next request
)

// State implements provider.Status.
func (s *status) State(key pipeline.Key) provider.State {
	f, ok := s.registry.Function(key)
	if !ok {
		return provider.State{}
	}
	is := s.local.Standing(key, f.Revision, f.Declared.Scale)
	state, detail := stands(is)
	if detail == "" {
		if until, ok := s.local.PinnedUntil(key); ok {
			detail = measuredUntil(until)
		} else {
			detail = barred(s.local.Bars(key))
		}
	}
	if detail != "" {
		state += ": " + detail
	}
	out := provider.State{Replicas: is.Wanted, Available: is.Ready, Invocations: s.gateway.Invocations(key), Status: state}
	if e, ok := s.local.LastFailure(key); ok {
		out.Failure = provider.Failure{At: e.At, Replica: e.Replica, Kind: string(e.Kind), Cause: e.Cause}
	}
	return out
}

// stands returns the state of a function's deployed revision, and its details; detail is empty if
// there are none.
func stands(is cluster.Standing) (state, detail string) {
	switch missing := is.Ready < max(is.Wanted, 1); {
	case is.Failing.Count > 0 && missing:
		return stateFailing, fmt.Sprintf("%s (%s failed, next try %s)", is.Failing.Cause,
			counted(is.Failing.Count, "start", "starts in a row"), is.Failing.Until.UTC().Format(time.TimeOnly))
	case is.Nowhere != "" && missing:
		return stateFailing, is.Nowhere
	case is.Wanted == 0:
		return stateAsleep, ""
	case is.Ready > 0:
		return stateReady, is.Short
	case is.Short != "":
		return stateUpdating, is.Short
	case is.Older > 0:
		return stateUpdating, counted(is.Older, "replica of an older revision serves", "replicas of older revisions serve")
	}
	return stateUpdating, ""
}

// room implements [provider.Room] with the nodes of the cluster.
type room struct{ *cluster.Local }

// Lacking implements provider.Room.
func (r room) Lacking(n provider.Needs) (lacks []provider.Lack) {
	for _, l := range r.Local.Lacking(plan.Function{Memory: n.Memory, CPUMilli: n.CPUMilli, GPU: n.Devices, DeviceMemory: n.DeviceMemory}) {
		lacks = append(lacks, provider.Lack{Of: string(l.Of), Need: l.Need, Most: l.Most})
	}
	return lacks
}

// measuredUntil returns the detail of a function that is pinned to be measured.
func measuredUntil(until time.Time) string {
	return "held at one replica to be measured (stagecoach profile), at least until " + until.UTC().Format(time.TimeOnly)
}

// barred lists the devices that are barred for a function which runs on others. If it runs on none,
// its Short says so.
func barred(bars []plan.Bar) string {
	var out []string
	for _, b := range bars {
		out = append(out, fmt.Sprintf("device %s of node %s is not tried until %s: %s", b.Device, b.Node, b.Until.UTC().Format(time.TimeOnly), b.Cause))
	}
	return strings.Join(out, "; ")
}

// want returns the last decision on a function.
func (s *status) want(key pipeline.Key) (plan.Want, bool) {
	_, p := s.loop.Last()
	i, ok := slices.BinarySearchFunc(p.Wants, key.String(), func(w plan.Want, key string) int { return cmp.Compare(w.Function, key) })
	if !ok {
		return plan.Want{}, false
	}
	return p.Wants[i], true
}

// Replicas implements provider.Status.
func (s *status) Replicas(key pipeline.Key) []provider.Replica {
	all := s.local.Replicas(key)
	f, _ := s.registry.Function(key)
	out := make([]provider.Replica, len(all))
	for i, r := range all {
		out[i] = provider.Replica{
			Name: r.Name, Node: r.Node, State: r.State.String(), Older: r.Revision < f.Revision, Hidden: r.Hidden, Path: r.Path, Phases: r.Phases, Ready: r.Total, Answered: r.Answered,
		}
	}
	return out
}
