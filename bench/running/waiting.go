// Package running has what benches need to use a running product: they deploy functions, wait for
// states, send load and count replicas.
package running

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench"
	openloop "github.com/stagecoach-serving/stagecoach/bench/load"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// Case is a load on a pipeline of stages that wait. It can be run and simulated.
type Case struct {
	Name   string
	Stages []Stage
	Rate   string // as arrivals.ParseProfile has it
	CV     float64
	Items  int // that a request has; 0: one
	Budget int // replicas that all stages together may have; 0: any number
	SLO    time.Duration
}

// Stage is a stage that waits for a lognormal time.
type Stage struct {
	Name     string
	Next     string // empty: none
	Each     bool
	Mean     time.Duration
	CV       float64
	Replicas int // fixed; 0: policies choose
	Batch    int // largest batch; 0: 1
	// BatchCost is the time that each further call of a batch adds, in shares of the first call's.
	BatchCost float64
	Outputs   []int // numbers of items of an answer, drawn at random; nil: 1
	// Functions that can serve the stage too. Only their names, times and replicas count.
	Variants []Stage
}

// ExecTimes has the times of one inference, without waits, from QUART's Table 1. Benches simulate
// these models with stages that wait.
var ExecTimes = map[string]time.Duration{
	"whisper-9b": 74 * time.Millisecond, "bert-21b": 137 * time.Millisecond, "llama-7b": 243 * time.Millisecond,
	"opt-66b": 278 * time.Millisecond, "wideresnet": 646 * time.Millisecond,
}

// What the stand-ins for models have.
const (
	Stages  = 8
	StageCV = 0.1 // of their service times
	Budget  = 24  // replicas
)

// StepRate returns the rate of a load of three parts: low, high, low.
func StepRate(low, high float64, each time.Duration) string {
	return fmt.Sprintf("%.4g:%v,%.4g:%v,%.4g:%v", low, each, high, each, low, each)
}

// SplitEvenly splits a model's time evenly into a chain of stages that wait. The time of the
// seventh stage is then multiplied by the factor seventh.
func SplitEvenly(exec time.Duration, seventh float64) []Stage {
	out := make([]Stage, Stages)
	for i := range out {
		out[i] = Stage{Name: fmt.Sprintf("step-%d", i+1), Mean: exec / Stages, CV: StageCV}
	}
	out[6].Mean = time.Duration(seventh * float64(out[6].Mean))
	return Link(out)
}

// Link makes a chain of stages, and returns it.
func Link(stages []Stage) []Stage {
	for i := range len(stages) - 1 {
		stages[i].Next = stages[i+1].Name
	}
	return stages
}

// Bounds returns the least and the largest number of replicas.
func (s *Stage) Bounds(budget int) (low, high int) {
	if s.Replicas > 0 {
		return s.Replicas, s.Replicas
	}
	return 1, budget
}

// Outcome has the figures of one run of a case.
type Outcome struct {
	Requests, Failed float64
	Mean, P50, P99   float64 // seconds; NaN: too few requests
	ReplicaSeconds   float64
}

// Timeout is the timeout of each request.
const Timeout = time.Minute

// Deployments returns the case's stages as one pipeline, each stage before its variants.
func (c *Case) Deployments() []client.Deployment {
	var out []client.Deployment
	for i := range c.Stages {
		s := &c.Stages[i]
		d := c.deployment(s)
		d.Annotations["stagecoach.dev/pipeline"] = c.Pipeline()
		if s.Next != "" {
			d.Annotations["stagecoach.dev/next"] = s.Next
		}
		if s.Each {
			d.Annotations["stagecoach.dev/each"] = "true"
		}
		if i == 0 && c.SLO > 0 {
			d.Annotations["stagecoach.dev/slo"] = c.SLO.String()
		}
		out = append(out, d)
		for k := range s.Variants {
			v := c.deployment(&s.Variants[k])
			v.Annotations["stagecoach.dev/variant-of"] = s.Name
			out = append(out, v)
		}
	}
	return out
}

// deployment returns a function without its place in the pipeline.
func (c *Case) deployment(s *Stage) client.Deployment {
	low, high := s.Bounds(c.Budget)
	d := client.Deployment{
		Service: s.Name, Image: "stagecoach/wait:0.1.0",
		Labels:      map[string]string{"com.openfaas.scale.min": fmt.Sprint(low), "com.openfaas.scale.max": fmt.Sprint(high)},
		EnvVars:     map[string]string{"wait_mean": s.Mean.String(), "wait_cv": fmt.Sprint(s.CV)},
		Annotations: map[string]string{},
	}
	if s.Batch > 1 {
		d.Annotations["stagecoach.dev/batch"] = fmt.Sprint(s.Batch)
		d.EnvVars["wait_batch_cost"] = fmt.Sprint(s.BatchCost)
	}
	if len(s.Outputs) > 0 {
		d.EnvVars["wait_items"] = strings.Trim(strings.ReplaceAll(fmt.Sprint(s.Outputs), " ", ","), "[]")
	}
	return d
}

// Pipeline returns the name of the case's pipeline.
func (c *Case) Pipeline() string { return strings.ReplaceAll(c.Name, "_", "-") }

// Real deploys the case's stages and sends its load. All replicas are ready and idle when the load
// begins, as in the simulator.
func (c *Case) Real(ctx context.Context, api *client.Client, seed uint64) (Outcome, error) {
	if err := DeployAll(ctx, api, c.Deployments()); err != nil {
		return Outcome{}, err
	}
	return c.Load(ctx, api, seed)
}

// Load sends the case's requests to its stages, which are deployed.
func (c *Case) Load(ctx context.Context, api *client.Client, seed uint64) (Outcome, error) {
	body := openloop.Body{Text: "x"}
	header := map[string]string{"X-Timeout": Timeout.String(), "Content-Type": "text/plain"}
	if c.Items > 1 { // a list has one item per member
		body.Text = "[1" + strings.Repeat(",1", c.Items-1) + "]"
		header["Content-Type"] = "application/json"
	}
	cfg, err := openloop.Scenario{
		Gateway: api.URL(), Seed: seed, Timeout: 2 * Timeout, MaxInFlight: 4000, CV: &c.CV, Rate: c.Rate, SLO: c.SLO,
		Targets: []openloop.TargetSpec{{Function: c.Pipeline(), Body: body, Headers: header}},
	}.Config("")
	if err != nil {
		return Outcome{}, err
	}
	r, err := openloop.Run(ctx, cfg)
	if err != nil {
		return Outcome{}, err
	}
	for _, warning := range r.Warnings {
		console.Progress("bench sim: %s: %s", c.Name, warning)
	}
	for _, k := range r.Total.Errors {
		console.Progress("bench sim: %s: %d requests failed: %s: %s", c.Name, k.Count, k.Kind, k.Example)
	}
	l := r.Total.Latency
	out := Outcome{Requests: float64(r.Total.Offered), Failed: float64(r.Total.Failed + r.Total.NotSent), Mean: l.Mean, P50: bench.OrNaN(l.P50), P99: bench.OrNaN(l.P99)}
	for _, d := range c.Deployments() {
		line, err := api.Timeline(ctx, d.Service)
		if err != nil {
			return out, err
		}
		out.ReplicaSeconds += ReplicaSeconds(line.Events, r.Started, r.Started.Add(cfg.Duration))
	}
	return out, nil
}
