package quart

import (
	"github.com/stagecoach-serving/stagecoach/autoscaler"
	"github.com/stagecoach-serving/stagecoach/autoscaler/baseline"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/sim"
	"github.com/stagecoach-serving/stagecoach/sim/study"
)

// The contenders of [Bounds].
const (
	byStages    = "stages"
	byPipelines = "pipelines"
	byModel     = "model"
	byCounts    = "counts"
	byCopies    = "copies"
)

// boundsLetter returns the letter that stands for a contender in maps.
func boundsLetter(name string) string {
	return map[string]string{byPipelines: "p", byModel: "m", byCounts: "s", byCopies: "c"}[name]
}

// boundsKnobs is the search space of all contenders that scale. keep_s is the seconds for which a
// count of replicas is kept before it may fall. most limits the number of GPUs at any time, as a
// multiple of the budget, and so the mean number. Its largest value allows more than any load
// needs, or the whole cluster.
var (
	boundsKnobs    = []study.Knob{{Name: "keep_s", Values: []float64{0.5, autoscaler.Hold.Seconds()}}, {Name: "most", Values: []float64{1, 1.25, 1.5, 4}}}
	boundsDefaults = []float64{autoscaler.Hold.Seconds(), 4}
)

// kept returns the knobs in the order of sizing, with a price of 0. After a burst, counts are kept
// longer than usual, by the same factor as in the defaults.
func kept(k []float64) []float64 {
	const burst = float64(autoscaler.Panic) / float64(autoscaler.Hold)
	return []float64{autoscaler.DrainWithin.Seconds(), k[0], burst * k[0], autoscaler.Attainment, 0}
}

// scaling returns the parts of ours with their defaults, except that replicas get no extra CPU. The
// contenders that do not scale by stage get none either, so only replica counts are compared.
func scaling(c condition) parts {
	return parts{start: c.starts, quart: autoscaler.QuartConfig{NoCPU: true}}
}

// most limits the GPUs of all stages together to what the knob most allows.
func (c condition) most(s sim.Scenario, k []float64) sim.Scenario {
	s.Budget = max(int(min(k[1]*c.budget(), gpus))/s.Stages[0].GPU, len(s.Stages))
	return s
}

// boundsContenders returns the contenders of [Bounds]. under has the conditions by the names of
// their scenarios.
func boundsContenders(under map[string]condition) []study.Contender {
	type apply = func(s sim.Scenario, c condition, k []float64) sim.Scenario
	in := func(a apply) func(sim.Scenario, []float64) sim.Scenario {
		return func(s sim.Scenario, k []float64) sim.Scenario { return a(s, under[s.Name], k) }
	}
	scales := func(name, title, source string, a apply) study.Contender {
		return study.Contender{Name: name, Title: title, Source: source, Space: boundsKnobs, Defaults: boundsDefaults, Ours: name == byStages, Apply: in(a)}
	}
	stays := func(name, title, source string, a apply) study.Contender {
		return study.Contender{Name: name, Title: title, Source: source, Apply: in(a)}
	}
	return []study.Contender{
		scales(byStages, "stage by stage", "this repository's defaults, but processors", func(s sim.Scenario, c condition, k []float64) sim.Scenario {
			return scaling(c).put(c.most(s, k), byStages, kept(k))
		}),
		scales(byPipelines, "whole pipelines", "as many of each stage as of the one that needs the most; nothing is corrected, as that is by stage", scaleWhole),
		scales(byModel, "the model as one function", "no pipeline; this repository's defaults, but processors", func(s sim.Scenario, c condition, k []float64) sim.Scenario {
			return scaling(c).put(c.most(whole(s), k), byModel, kept(k))
		}),
		stays(byCounts, "fixed counts of stages", "the budget, shared by the stages' work, whatever comes", func(s sim.Scenario, c condition, _ []float64) sim.Scenario {
			return c.stay(s, byCounts)
		}),
		stays(byCopies, "fixed copies of the model", "the budget, whatever comes; no pipeline", func(s sim.Scenario, c condition, _ []float64) sim.Scenario {
			return c.stay(whole(s), byCopies)
		}),
	}
}

func scaleWhole(s sim.Scenario, c condition, k []float64) sim.Scenario {
	s = starts(c.most(s, k), c.starts)
	s.Policies = []sim.Policy{{Name: byPipelines, Make: func(sim.Run) (policy.Set, error) {
		set, err := policy.Names{Corrector: "none"}.Choose()
		return policy.WithAllocator(set, byPipelines, autoscaler.NewUniform(sized(kept(k)))), err
	}}}
	return s
}

// stay gives stages fixed replica counts that use up the budget. Each stage starts with one
// replica. Each further replica goes to the stage whose replicas have the most work.
func (c condition) stay(s sim.Scenario, name string) sim.Scenario {
	s = starts(s, c.starts)
	each := func(st *sim.Stage) float64 { return st.Service.Profile[0].Mean.Seconds() / float64(st.Min*st.Slots) }
	for left := int(c.budget()) - len(s.Stages); left > 0; left-- {
		most := &s.Stages[0]
		for i := range s.Stages {
			if st := &s.Stages[i]; each(st) > each(most) {
				most = st
			}
		}
		most.Min++
	}
	s.Policies = []sim.Policy{{Name: name, Make: func(sim.Run) (policy.Set, error) {
		set, err := policy.Names{Corrector: "none"}.Choose()
		return policy.WithAllocator(set, "static", baseline.Static{}), err // each stage's minimum
	}}}
	return s
}
