package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	openloop "github.com/stagecoach-serving/stagecoach/bench/load"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// simCase is a load on a pipeline, to be run and to be simulated.
type simCase struct {
	name   string
	stages []simStage
	rate   string // as arrivals.ParseProfile has it
	cv     float64
	items  int // that a request has; 0: one
	budget int // replicas that all stages together may have; 0: any number
	slo    time.Duration
}

// simStage is a stage that waits for a lognormal time.
type simStage struct {
	name     string
	next     string // empty: none
	each     bool
	mean     time.Duration
	cv       float64
	replicas int // fixed; 0: policies choose
}

// execTimes are the times of standalone inference in QUART's Table 1, which `wait` stages stand in for.
var execTimes = map[string]time.Duration{
	"whisper-9b": 74 * time.Millisecond, "bert-21b": 137 * time.Millisecond, "llama-7b": 243 * time.Millisecond,
	"opt-66b": 278 * time.Millisecond, "wideresnet": 646 * time.Millisecond,
}

// What the stand-ins for models have.
const (
	benchStages  = 8
	benchStageCV = 0.1 // of their service times
	benchBudget  = 24  // replicas
)

// stepRate is a load of three parts: low, high, low.
func stepRate(low, high float64, each time.Duration) string {
	return fmt.Sprintf("%.4g:%v,%.4g:%v,%.4g:%v", low, each, high, each, low, each)
}

// splitEvenly is a model that takes so long, split evenly into a chain of stages that wait, of which the seventh takes so many times as long.
func splitEvenly(exec time.Duration, seventh float64) []simStage {
	out := make([]simStage, benchStages)
	for i := range out {
		out[i] = simStage{name: fmt.Sprintf("step-%d", i+1), mean: exec / benchStages, cv: benchStageCV}
	}
	out[6].mean = time.Duration(seventh * float64(out[6].mean))
	return link(out)
}

// link makes a chain of stages.
func link(stages []simStage) []simStage {
	for i := range len(stages) - 1 {
		stages[i].next = stages[i+1].name
	}
	return stages
}

// bounds are the least and the largest number of replicas.
func (s *simStage) bounds(budget int) (low, high int) {
	if s.replicas > 0 {
		return s.replicas, s.replicas
	}
	return 1, budget
}

// outcome is what came of a case, once.
type outcome struct {
	requests, failed float64
	mean, p50, p99   float64 // seconds; NaN: too few requests
	replicaSeconds   float64
}

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
