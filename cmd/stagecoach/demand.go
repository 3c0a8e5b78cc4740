package main

import (
	"context"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/control"
	"github.com/stagecoach-serving/stagecoach/control/learn"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/request/gateway"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// demandBucket is the KV bucket of what was learned.
const demandBucket = "demand"

// teaching is what learns from requests, and what counts them.
type teaching struct {
	demand  *learn.Demand
	traffic *control.Traffic // nil: nothing is recorded
}

// taught is an Invoker whose requests teach.
type taught struct {
	gateway.Invoker
	teaching
}

// Invoke implements gateway.Invoker.
func (t taught) Invoke(ctx context.Context, r task.Request) (*task.Response, *task.Error) {
	begun := t.traffic.Begun(r.Target)
	resp, err := t.Invoker.Invoke(ctx, r)
	t.traffic.Ended(r.Target, begun, err == nil)
	if err != nil {
		t.demand.Ended(r.Target, err.Stages, false)
	} else {
		t.demand.Ended(r.Target, resp.Stages, true)
	}
	return resp, err
}

// newTraffic returns the counts of requests for a record. It takes objectives from the registry.
func newTraffic(r *provider.Registry) *control.Traffic {
	return control.NewTraffic(func(app string) time.Duration {
		g, _ := r.Graph(pipeline.ParseKey(app))
		return g.SLO
	})
}

// learnedObserver adds to snapshots what was learned, the batches that follow from it, and the
// measured accuracy of chains.
type learnedObserver struct {
	control.Observer
	demand   *learn.Demand
	accuracy *provider.Accuracies
}

// Observe implements control.Observer.
func (o learnedObserver) Observe(ctx context.Context) (plan.Snapshot, error) {
	s, err := o.Observer.Observe(ctx)
	if err == nil {
		o.demand.Fill(&s)
		o.accuracy.Fill(&s)
		s.ChooseBatches()
	}
	return s, err
}
