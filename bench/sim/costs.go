package sim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/bench/running"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// Settings of the measurement of costs.
const (
	probeWait    = 10 * time.Millisecond
	probeStages  = 3
	probeClients = 4
	probeStarts  = 4 // replicas per stage
)

// probeChain is a chain of stages that wait for exactly this long.
func probeChain() *running.Case {
	c := &running.Case{Name: "probe"}
	for i := range probeStages {
		c.Stages = append(c.Stages, running.Stage{Name: fmt.Sprintf("probe-%d", i+1), Mean: probeWait, Replicas: 1})
	}
	running.Link(c.Stages)
	return c
}

// freshCosts measures the costs on an `up` of its own.
func freshCosts(ctx context.Context, images string) (out Costs, err error) {
	err = running.OnUp(ctx, []string{"--images", images}, func(api *client.Client) error {
		if out, err = MeasureCosts(ctx, api, 8*time.Second); err != nil {
			return err
		}
		out.start, err = measureStarts(ctx, api)
		return err
	})
	return out, err
}

// MeasureCosts measures the costs of a slot and a hop. It deploys stages that wait for exactly 10
// ms, so longer times are the product's cost. One stage always has tasks in its line: its rate of
// answers shows the cost of a slot. Single requests through a chain of three stages show the cost
// of three slots and six hops. Both measurements run at the same time, so that the load of the
// machine is the same for both.
func MeasureCosts(ctx context.Context, api *client.Client, length time.Duration) (Costs, error) {
	c := probeChain()
	c.Rate, c.CV = fmt.Sprintf("8:%v", length), 0
	alone := c.Deployments()[0]
	alone.Service, alone.Annotations = "probe-alone", nil
	if err := running.DeployAll(ctx, api, append(c.Deployments(), alone)); err != nil {
		return Costs{}, err
	}
	for range 5 { // opens connections and touches pages
		for _, name := range []string{alone.Service, c.Pipeline()} {
			if _, err := api.Invoke(ctx, name, "text/plain", []byte("x")); err != nil {
				return Costs{}, err
			}
		}
	}
	var took time.Duration
	var failed error
	calls := int(length / (probeWait * 6 / 5))
	var group sync.WaitGroup
	group.Go(func() {
		took, failed = running.Saturate(ctx, api, alone.Service, "text/plain", "x", probeClients, calls, nil)
	})
	one, err := c.Load(ctx, api, 1)
	group.Wait()
	switch {
	case err != nil || failed != nil:
		return Costs{}, errors.Join(err, failed)
	case one.Failed > 0:
		return Costs{}, fmt.Errorf("%.0f of %.0f requests to stages that wait for %v failed", one.Failed, one.Requests, probeWait)
	}
	slot := max(took/time.Duration(calls)-probeWait, 0)
	mean := time.Duration(one.Mean * float64(time.Second))
	return Costs{slot: slot, hop: max((mean-probeStages*(probeWait+slot))/(2*probeStages), 0)}, nil
}

// measureStarts returns the median time from the order of a replica until it is ready. It orders
// nine replicas together, as a step of the load would do.
func measureStarts(ctx context.Context, api *client.Client) (time.Duration, error) {
	all := probeChain().Deployments()
	for i := range all {
		all[i].Service, all[i].Annotations = fmt.Sprintf("start-%d", i+1), nil
		all[i].Labels["com.openfaas.scale.max"] = fmt.Sprint(probeStarts)
	}
	if err := running.DeployAll(ctx, api, all); err != nil {
		return 0, err
	}
	for i := range all {
		body := map[string]any{"serviceName": all[i].Service, "replicas": probeStarts}
		if err := api.Send(ctx, "scale "+all[i].Service, http.MethodPost, "/system/scale-function/"+all[i].Service, body); err != nil {
			return 0, err
		}
		all[i].Labels["com.openfaas.scale.min"] = fmt.Sprint(probeStarts) // DeployAll waits for this many
	}
	var took []float64
	for _, d := range all {
		if err := client.WaitReady(ctx, api, []client.Deployment{d}, io.Discard); err != nil {
			return 0, err
		}
		line, err := api.Timeline(ctx, d.Service)
		if err != nil {
			return 0, err
		}
		for i, s := range client.ReplicaStarts(line.Events) {
			if i > 0 && s.Ready > 0 { // the first one came with the deployment
				took = append(took, s.Ready.Seconds())
			}
		}
	}
	if len(took) == 0 {
		return 0, fmt.Errorf("no replica of %d more a function became ready", probeStarts-1)
	}
	return time.Duration(bench.Median(took) * float64(time.Second)), nil
}
