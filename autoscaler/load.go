package autoscaler

import (
	"math"
	"slices"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// load is the load of a function's pipelines. rate is in requests per second. burst is the sum over
// pipelines of rate times burstiness, per second of the pipeline's service time.
type load struct {
	rate, burst float64
	before      float64 // calls that wait at earlier stages, on the path with the most calls
	effort      float64 // see contender
}

// pipelineLoads returns for each function the load of its pipelines.
func pipelineLoads(s *plan.Snapshot) map[string]load {
	loads := map[string]load{}
	finder := s.Finder()
	for i := range s.Pipelines {
		p := &s.Pipelines[i]
		if len(p.Stages) == 0 {
			continue
		}
		entry, ok := s.Function(p.Stages[0])
		if !ok {
			continue
		}
		g := newStage(entry)
		if entry.Stage.Known && entry.Stage.Rate > 0 { // whatever the lane
			g.lambda = min(entry.Stage.Rate, math.MaxInt32)
		}
		service, effort := 0.0, 0.0
		before, waiting := make([]float64, len(p.Stages)), make([]float64, len(p.Stages))
		for k, name := range p.Stages {
			f, ok := finder.Function(name)
			if !ok {
				continue
			}
			waiting[k] = float64(max(f.Waiting, 0))
			if f.Service.Known {
				service += max(f.Service.Mean.Seconds(), 0)
				effort += max(f.Service.Mean.Seconds(), 0) / float64(max(f.Slots, 1))
			}
		}
		for _, e := range forward(p) {
			before[e.To] = max(before[e.To], before[e.From]+waiting[e.From])
		}
		for k, name := range p.Stages {
			if !slices.Contains(p.Stages[:k], name) {
				l, rate := loads[name], g.lambda
				if f, ok := finder.Function(name); ok && f.Stage.Known { // variants serve the rest
					lane := newStage(f)
					rate = min(rate, lane.lambda)
				}
				l.rate += rate
				l.before = max(l.before, before[k])
				if effort > 0 && (l.effort == 0 || effort < l.effort) {
					l.effort = effort
				}
				if service > 0 {
					l.burst += g.lambda * bursty(g.ca2) / service
				}
				loads[name] = l
			}
		}
	}
	return loads
}
