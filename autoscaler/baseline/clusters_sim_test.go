package baseline_test

import (
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/baseline"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/sim"
)

func init() { // as cmd/stagecoach does
	policy.AddAllocator("hpa", baseline.NewHPA(baseline.HPAConfig{}))
	policy.AddAllocator("kpa", baseline.NewKPA(baseline.KPAConfig{}))
}

// twoLevels is a pipeline at 3 requests per second, then 15 for two minutes, then 3 again.
const twoLevels = `
duration: 10m
seeds: 1
nodes: [{count: 4, memory: 64Gi, cpu: 32}]
pipelines: [{name: p, slo: 1200ms, arrivals: {rate: "3:2m,15:2m,3:6m"}}]
stages:
- {name: a, next: [b], max: 20, start: {cold: 4s}, service: {dist: gamma, cv: 0.2, mean: 200ms}}
- {name: b, next: [c], max: 20, start: {cold: 4s}, service: {dist: gamma, cv: 0.2, mean: 300ms}}
- {name: c, max: 20, start: {cold: 4s}, service: {dist: gamma, cv: 0.2, mean: 100ms}}
`

// foreseeing returns policies with an oracle of the run.
func foreseeing(base policy.Set, wait float64) func(sim.Run) (policy.Set, error) {
	return func(r sim.Run) (policy.Set, error) {
		at, err := r.Arrivals("p")
		if err != nil {
			return policy.Set{}, err
		}
		cfg := baseline.OracleConfig{Arrivals: at, Wait: wait}
		for i, service := range []time.Duration{200, 300, 100} {
			cfg.Stages = append(cfg.Stages, baseline.OracleStage{Function: pipeline.Key{Name: string(rune('a' + i)), Namespace: "sim"}.String(), Service: service * time.Millisecond, Start: 4 * time.Second})
		}
		o, err := baseline.NewOracle(cfg)
		return policy.WithAllocator(base, "oracle", o), err
	}
}

// TestClustersScaleUpAndDown runs each allocator in the simulator under a step in load. Except for
// Static, an allocator must have more replicas during the step than before it, and fewer again long
// after it. The oracle must have a shorter mean latency than all others, without more replicas.
func TestClustersScaleUpAndDown(t *testing.T) {
	scenario, err := sim.Parse(strings.NewReader(twoLevels))
	if err != nil {
		t.Fatal(err)
	}
	base, err := policy.Names{Corrector: "none", Warmer: "none"}.Choose()
	if err != nil {
		t.Fatal(err)
	}
	with := func(name string, make func(sim.Run) (policy.Set, error)) sim.Policy {
		return sim.Policy{Name: name, Make: make}
	}
	scenario.Policies = []sim.Policy{
		{Name: "hpa", Names: policy.Names{Allocator: "hpa", Corrector: "none", Warmer: "none"}},
		{Name: "kpa", Names: policy.Names{Allocator: "kpa", Corrector: "none", Warmer: "none"}},
		with("oracle", foreseeing(base, 0.5)),
		with("static", func(sim.Run) (policy.Set, error) {
			return policy.WithAllocator(base, "static", baseline.Static{Level: 10. / 3}), nil
		}),
	}
	model, err := scenario.Model(func(string) (io.ReadCloser, error) { return nil, errors.New("no files") })
	if err != nil {
		t.Fatal(err)
	}
	r, err := model.Run(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	by := map[string]sim.PolicyResult{}
	for _, p := range r.Policies {
		by[p.Name] = p
		if p.Refused.Mean > 0 || p.Held.Mean > 0 {
			t.Errorf("%s: %s", p.Name, p.Complaint)
		}
		replicas := func(from, to float64) (mean float64) { // of all stages, between these seconds
			n := 0.0
			for i, at := range p.Series.T {
				if from <= at && at < to {
					n++
					for _, stage := range p.Series.Replicas {
						mean += float64(stage[i])
					}
				}
			}
			return mean / n
		}
		before, during, after := replicas(90, 110), replicas(180, 240), replicas(580, 600)
		mean := p.Pipelines[0].Mean.Mean
		t.Logf("%s: %.1f, %.1f, %.1f replicas, %.1f on average; %.3f s a request", p.Name, before, during, after, p.Replicas.Mean, mean)
		if p.Name != "static" && !(during > 1.5*before && after < during/1.5) {
			t.Errorf("%s: %.1f replicas, during the step %.1f, after it %.1f; want more, and fewer again", p.Name, before, during, after)
		}
		if p.Name == "static" && (before != 10 || during != 10) {
			t.Errorf("static: %g replicas, %g, want 10", before, during)
		}
	}
	oracle := by["oracle"]
	for _, other := range []string{"hpa", "kpa", "static"} {
		if o := by[other]; !(oracle.Pipelines[0].Mean.Mean < o.Pipelines[0].Mean.Mean && oracle.Replicas.Mean <= o.Replicas.Mean) {
			t.Errorf("oracle: %g s for %g replicas, want both less than of %s: %g s, %g", oracle.Pipelines[0].Mean.Mean, oracle.Replicas.Mean, other, o.Pipelines[0].Mean.Mean, o.Replicas.Mean)
		}
	}
}
