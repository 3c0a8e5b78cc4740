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
	// calls per second that the slowest of these stages can serve; 0 if no call waits there
	through float64
	effort  float64 // see contender
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
		lines := linesBefore(p, &finder)
		for _, name := range p.Stages {
			f, ok := finder.Function(name)
			if !ok {
				continue
			}
			if f.Service.Known {
				service += max(f.Service.Mean.Seconds(), 0)
				effort += max(f.Service.Mean.Seconds(), 0) / float64(max(f.Slots, 1))
			}
		}
		for k, name := range p.Stages {
			if !slices.Contains(p.Stages[:k], name) {
				l, rate := loads[name], g.lambda
				if f, ok := finder.Function(name); ok && f.Stage.Known { // variants serve the rest
					lane := newStage(f)
					rate = min(rate, lane.lambda)
				}
				l.rate += rate
				if lines[k].before > l.before {
					l.before, l.through = lines[k].before, lines[k].through
				}
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

// lineBefore has the calls that wait at the stages before a stage, and the calls per second that
// the slowest of these stages can serve with its ready replicas.
type lineBefore struct{ before, through float64 }

// linesBefore returns the calls that wait before each stage of p, on the path with the most calls.
func linesBefore(p *plan.Pipeline, finder *plan.Finder) []lineBefore {
	out, stages := make([]lineBefore, len(p.Stages)), make([]lineBefore, len(p.Stages))
	for k, name := range p.Stages {
		out[k].through, stages[k].through = math.Inf(1), math.Inf(1)
		if f, ok := finder.Function(name); ok {
			stages[k].before = float64(max(f.Waiting, 0))
			if g := newStage(f); g.known {
				ready, _ := f.Current()
				stages[k].through = float64(g.servers(ready)) * g.mu
			}
		}
	}
	for _, e := range forward(p) {
		if line := out[e.From].before + stages[e.From].before; line > out[e.To].before {
			out[e.To] = lineBefore{line, min(out[e.From].through, stages[e.From].through)}
		}
	}
	return out
}
