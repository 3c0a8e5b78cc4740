package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	openloop "github.com/stagecoach-serving/stagecoach/bench/load"
	"github.com/stagecoach-serving/stagecoach/control/cluster"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// simTimeout is that of a request.
const simTimeout = time.Minute

// deployments are the case's stages, of the pipeline with the name of the case.
func (c *simCase) deployments() []client.Deployment {
	var out []client.Deployment
	for i, s := range c.stages {
		low, high := s.bounds(c.budget)
		d := client.Deployment{
			Service: s.name, Image: "stagecoach/wait:0.1.0",
			Labels:      map[string]string{"com.openfaas.scale.min": fmt.Sprint(low), "com.openfaas.scale.max": fmt.Sprint(high)},
			EnvVars:     map[string]string{"wait_mean": s.mean.String(), "wait_cv": fmt.Sprint(s.cv)},
			Annotations: map[string]string{"stagecoach.dev/pipeline": c.pipeline()},
		}
		if s.next != "" {
			d.Annotations["stagecoach.dev/next"] = s.next
		}
		if s.each {
			d.Annotations["stagecoach.dev/each"] = "true"
		}
		if i == 0 && c.slo > 0 {
			d.Annotations["stagecoach.dev/slo"] = c.slo.String()
		}
		out = append(out, d)
	}
	return out
}

func (c *simCase) pipeline() string { return strings.ReplaceAll(c.name, "_", "-") }

// real runs the case: all replicas are ready and idle when its load begins, as in the simulator.
func (c *simCase) real(ctx context.Context, api *client.Client, seed uint64) (outcome, error) {
	if err := deployAll(ctx, api, c.deployments()); err != nil {
		return outcome{}, err
	}
	return c.load(ctx, api, seed)
}

// load sends the case's requests to its stages, which are deployed.
func (c *simCase) load(ctx context.Context, api *client.Client, seed uint64) (outcome, error) {
	body := openloop.Body{Text: "x"}
	header := map[string]string{"X-Timeout": simTimeout.String(), "Content-Type": "text/plain"}
	if c.items > 1 { // a list has an item a member
		body.Text = "[1" + strings.Repeat(",1", c.items-1) + "]"
		header["Content-Type"] = "application/json"
	}
	cfg, err := openloop.Scenario{
		Gateway: api.URL(), Seed: seed, Timeout: 2 * simTimeout, MaxInFlight: 4000, CV: &c.cv, Rate: c.rate, SLO: c.slo,
		Targets: []openloop.TargetSpec{{Function: c.pipeline(), Body: body, Headers: header}},
	}.Config("")
	if err != nil {
		return outcome{}, err
	}
	r, err := openloop.Run(ctx, cfg)
	if err != nil {
		return outcome{}, err
	}
	for _, warning := range r.Warnings {
		console.Progress("bench sim: %s: %s", c.name, warning)
	}
	for _, k := range r.Total.Errors {
		console.Progress("bench sim: %s: %d requests failed: %s: %s", c.name, k.Count, k.Kind, k.Example)
	}
	l := r.Total.Latency
	out := outcome{requests: float64(r.Total.Offered), failed: float64(r.Total.Failed + r.Total.NotSent), mean: l.Mean, p50: orNaN(l.P50), p99: orNaN(l.P99)}
	for _, s := range c.stages {
		line, err := api.Timeline(ctx, s.name)
		if err != nil {
			return out, err
		}
		out.replicaSeconds += replicaSeconds(line.Events, r.Started, r.Started.Add(cfg.Duration))
	}
	return out, nil
}

// replicaSeconds is for how long there were replicas between two instants, from their orders until they had stopped: those that start
// and those that drain occupy the machine, too.
func replicaSeconds(events []schema.Event, from, to time.Time) float64 {
	begun, sum := map[string]time.Time{}, 0.0
	add := func(since, until time.Time) {
		if since.Before(from) {
			since = from
		}
		if until.After(to) {
			until = to
		}
		sum += max(until.Sub(since).Seconds(), 0)
	}
	for _, e := range events {
		switch cluster.Kind(e.Kind) {
		case cluster.Ordered:
			begun[e.Replica] = e.At
		case cluster.Stopped, cluster.Failed, cluster.Lost:
			add(begun[e.Replica], e.At) // of none that is known: from the beginning
			delete(begun, e.Replica)
		}
	}
	for _, since := range begun {
		add(since, to)
	}
	return sum
}

// deployAll deploys functions and waits for the replicas that they have without a load.
func deployAll(ctx context.Context, api *client.Client, all []client.Deployment) error {
	for _, d := range all {
		if err := api.Deploy(ctx, d); err != nil {
			return err
		}
	}
	for _, d := range all {
		if err := client.WaitReady(ctx, api, []client.Deployment{d}, io.Discard); err != nil {
			return err
		}
	}
	return nil
}

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

// saturate sends so many requests, of some clients one after another, and returns how long all of them took. Each gets the answers, one at
// a time; nil: nobody does.
func saturate(ctx context.Context, api *client.Client, function, contentType, body string, clients, calls int, each func(client.Answer)) (time.Duration, error) {
	var sent atomic.Int64
	var mu sync.Mutex
	var group sync.WaitGroup
	errs := make([]error, clients)
	begun := time.Now()
	for i := range clients {
		group.Go(func() {
			for sent.Add(1) <= int64(calls) && errs[i] == nil {
				var a client.Answer
				if a, errs[i] = api.Invoke(ctx, function, contentType, []byte(body)); errs[i] == nil && each != nil {
					mu.Lock()
					each(a)
					mu.Unlock()
				}
			}
		})
	}
	group.Wait()
	return time.Since(begun), errors.Join(errs...)
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
