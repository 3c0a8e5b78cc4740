package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// What costs are measured with.
const (
	probeWait    = 10 * time.Millisecond
	probeStages  = 3
	probeClients = 4
	probeStarts  = 4 // replicas a stage
)

// probeChain is a chain of stages that wait for exactly so long.
func probeChain() *simCase {
	c := &simCase{name: "probe"}
	for i := range probeStages {
		c.stages = append(c.stages, simStage{name: fmt.Sprintf("probe-%d", i+1), mean: probeWait, replicas: 1})
	}
	link(c.stages)
	return c
}

// freshCosts measures on an `up` of its own.
func freshCosts(ctx context.Context, images string) (out costs, err error) {
	err = onUp(ctx, []string{"--images", images}, func(api *client.Client) error {
		if out, err = measureCosts(ctx, api, 8*time.Second); err != nil {
			return err
		}
		out.start, err = measureStarts(ctx, api)
		return err
	})
	return out, err
}

// measureCosts measures for so long what a slot and a hop cost, on stages of its own that wait for exactly 10 ms. A slot whose line is never
// empty tells by the rate of its answers; requests that come one by one to a chain take its slots, and two hops each. Both run at once, so
// that the machine is the same for them.
func measureCosts(ctx context.Context, api *client.Client, length time.Duration) (costs, error) {
	c := probeChain()
	c.rate, c.cv = fmt.Sprintf("8:%v", length), 0
	alone := c.deployments()[0]
	alone.Service, alone.Annotations = "probe-alone", nil
	if err := deployAll(ctx, api, append(c.deployments(), alone)); err != nil {
		return costs{}, err
	}
	for range 5 { // connections, and pages
		for _, name := range []string{alone.Service, c.pipeline()} {
			if _, err := api.Invoke(ctx, name, "text/plain", []byte("x")); err != nil {
				return costs{}, err
			}
		}
	}
	var took time.Duration
	var failed error
	calls := int(length / (probeWait * 6 / 5))
	var group sync.WaitGroup
	group.Go(func() { took, failed = saturate(ctx, api, alone.Service, "text/plain", "x", probeClients, calls, nil) })
	one, err := c.load(ctx, api, 1)
	group.Wait()
	switch {
	case err != nil || failed != nil:
		return costs{}, errors.Join(err, failed)
	case one.failed > 0:
		return costs{}, fmt.Errorf("%.0f of %.0f requests to stages that wait for %v failed", one.failed, one.requests, probeWait)
	}
	slot := max(took/time.Duration(calls)-probeWait, 0)
	mean := time.Duration(one.mean * float64(time.Second))
	return costs{slot: slot, hop: max((mean-probeStages*(probeWait+slot))/(2*probeStages), 0)}, nil
}

// measureStarts is the median time from an order of a replica to its being ready, of nine that are ordered at once, as at a step.
func measureStarts(ctx context.Context, api *client.Client) (time.Duration, error) {
	all := probeChain().deployments()
	for i := range all {
		all[i].Service, all[i].Annotations = fmt.Sprintf("start-%d", i+1), nil
		all[i].Labels["com.openfaas.scale.max"] = fmt.Sprint(probeStarts)
	}
	if err := deployAll(ctx, api, all); err != nil {
		return 0, err
	}
	for i := range all {
		body := map[string]any{"serviceName": all[i].Service, "replicas": probeStarts}
		if err := api.Send(ctx, "scale "+all[i].Service, http.MethodPost, "/system/scale-function/"+all[i].Service, body); err != nil {
			return 0, err
		}
		all[i].Labels["com.openfaas.scale.min"] = fmt.Sprint(probeStarts) // to wait for
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
	return time.Duration(median(took) * float64(time.Second)), nil
}
