package main

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/stagecoach-serving/stagecoach/control"
	"github.com/stagecoach-serving/stagecoach/control/cluster"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/provider/admin"
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
			detail = admin.MeasuredUntil(until)
		} else {
			detail = admin.Barred(s.local.Bars(key))
		}
	}
	if snapshot, _ := s.loop.Last(); detail == "" {
		if f, ok := snapshot.Function(key.String()); ok {
			detail = admin.Survived(f.Survived)
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

// Batch implements provider.Status.
func (s *status) Batch(key pipeline.Key) string {
	snapshot, _ := s.loop.Last()
	find := snapshot.Finder()
	at, ok := find.Index(key.String())
	if !ok || snapshot.Functions[at].AutoBatch == 0 {
		return ""
	}
	_, why := snapshot.AutoBatch(at)
	return why
}

// stands returns the state of a function's deployed revision, and its details; detail is empty if
// there are none.
func stands(is cluster.Standing) (state, detail string) {
	switch missing := is.Ready < max(is.Wanted, 1); {
	case is.Failing.Count > 0 && missing:
		return provider.StatusFailing, fmt.Sprintf("%s (%s failed, next try %s)", is.Failing.Cause,
			admin.Counted(is.Failing.Count, "start", "starts in a row"), is.Failing.Until.UTC().Format(time.TimeOnly))
	case is.Nowhere != "" && missing:
		return provider.StatusFailing, is.Nowhere
	case is.Wanted == 0:
		return provider.StatusAsleep, ""
	case is.Ready > 0:
		return provider.StatusReady, is.Short
	case is.Short != "":
		return provider.StatusUpdating, is.Short
	case is.Older > 0:
		return provider.StatusUpdating, admin.Counted(is.Older, "replica of an older revision serves", "replicas of older revisions serve")
	}
	return provider.StatusUpdating, ""
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
