package recorded

import (
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/sketch"
)

// Outcome is what really happened.
type Outcome struct {
	Seconds   float64           `json:"seconds"` // that Stagecoach ran
	Pipelines []PipelineOutcome `json:"pipelines"`
	Stages    []StageOutcome    `json:"stages"` // with variants, sorted by name
	T         []float64         `json:"t_s"`    // times of the lines
}

// PipelineOutcome is the requests of a pipeline. Latencies are of answered requests. The relative
// error of their quantiles is at most 1/64.
type PipelineOutcome struct {
	Name     string `json:"name"`
	Requests int    `json:"requests"`
	// Counted means that the fields below are known: an older version did not count them.
	Counted        bool    `json:"counted"`
	InTime         float64 `json:"slo_attainment"` // share of the requests that ended
	Failed         float64 `json:"failed"`         // share of the requests that ended
	Mean           float64 `json:"mean_s"`
	P50            float64 `json:"p50_s"`
	P95            float64 `json:"p95_s"`
	P99            float64 `json:"p99_s"`
	ReplicaSeconds float64 `json:"replica_s"` // of its stages
	stages         []string
	latencies      []float64 // means per line, in seconds; 0: none
}

// StageOutcome is the replicas of a function.
type StageOutcome struct {
	Name           string  `json:"name"`
	ReplicaSeconds float64 `json:"replica_s"`
	Replicas       []int   `json:"replicas"` // per line
}

// outcome sets what really happened.
func (c *conversion) outcome() {
	o := &c.run.Outcome
	o.Seconds = c.running()
	for i := range c.moments {
		o.T = append(o.T, c.moments[i].at.Sub(c.begin).Seconds())
	}
	took := map[string]float64{}
	for _, key := range c.keys() {
		f := c.functions[key]
		is := StageOutcome{Name: c.named(key), ReplicaSeconds: c.replicaSeconds(f), Replicas: make([]int, len(c.moments))}
		copy(is.Replicas, f.replicas)
		took[key] = is.ReplicaSeconds
		o.Stages = append(o.Stages, is)
	}
	counts := map[string]int{}
	for _, a := range c.run.Arrivals {
		counts[a.Pipeline]++
	}
	for _, p := range c.chosen {
		is := PipelineOutcome{Name: c.named(p.Name), Requests: counts[c.named(p.Name)]}
		for _, key := range c.keys() {
			f := c.functions[key]
			for _, stage := range p.Stages {
				if key == stage || f.VariantOf == stage {
					is.ReplicaSeconds += took[key]
					is.stages = append(is.stages, c.named(key))
				}
			}
		}
		if a := c.apps[p.Name]; a != nil && a.answered+a.failed > 0 {
			is.count(a, len(c.moments))
		}
		o.Pipelines = append(o.Pipelines, is)
	}
}

// count sets what is known of counted requests.
func (p *PipelineOutcome) count(a *app, lines int) {
	ended := float64(a.answered + a.failed)
	p.Counted, p.InTime, p.Failed = true, float64(a.inTime)/ended, float64(a.failed)/ended
	if a.answered > 0 {
		p.Mean = a.sum.Seconds() / float64(a.answered)
	}
	p.P50, p.P95, p.P99 = quantile(&a.latencies, 0.5), quantile(&a.latencies, 0.95), quantile(&a.latencies, 0.99)
	p.latencies = make([]float64, lines)
	copy(p.latencies, a.means)
}

func quantile(s *sketch.Sketch, q float64) float64 {
	return s.Quantile(q).Round(time.Microsecond).Seconds()
}
