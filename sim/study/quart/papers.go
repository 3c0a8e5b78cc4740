package quart

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/baseline"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/bench/load/arrivals"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/sim"
	"github.com/stagecoach-serving/stagecoach/sim/study"
)

// papers returns the three policies that the paper compares QUART with, as the paper describes
// them. INFless has no pipeline (section 8.4). InferLine and Cocktail have one.
func papers() []study.Contender {
	return []study.Contender{
		compared(study.Contender{
			Name: inflessName, Title: "INFless", Source: "Yang et al., ASPLOS 2022; a whole model is a function",
			Space: []study.Knob{
				{Name: "alpha", Low: 0.2, High: 1},
				{Name: "load", Low: 0.25, High: 1},
				{Name: "tail", Low: 0.5, High: 0.99},
				{Name: "keep_alive_s", Low: 5, High: 300, Log: true},
			},
			Defaults: []float64{baseline.INFlessAlpha, baseline.INFlessLoad, baseline.INFlessTail, baseline.INFlessKeepAlive.Seconds()},
			Apply: func(s sim.Scenario, k []float64) sim.Scenario {
				cfg := baseline.INFlessConfig{Alpha: k[0], Load: k[1], Tail: k[2], KeepAlive: seconds(k[3])}
				return rival(whole(s), inflessName, always(baseline.NewINFless(cfg)))
			},
		}),
		compared(study.Contender{
			Name: inferlineName, Title: "InferLine", Source: "Crankshaw et al., SoCC 2020; planned for as much of the load as a run, but another part",
			Space: []study.Knob{
				{Name: "stable_s", Low: 2, High: 60, Log: true},
				{Name: "look_s", Low: 5, High: 60, Log: true},
				{Name: "planned_objective", Low: 0.5, High: 8, Log: true},
				{Name: "planned_quantile", Low: 0.9, High: 0.99},
				{Name: "shortest", Low: 1, High: 64, Log: true},
			},
			Defaults: []float64{baseline.InferLineStable.Seconds(), baseline.InferLineLook.Seconds(), 1, 0.99, 1},
			Apply:    inferline,
		}),
		compared(study.Contender{
			Name: cocktailName, Title: "Cocktail", Source: "Gunasekaran et al., NSDI 2022; its resource management, with stages for models",
			Space: []study.Knob{
				{Name: "period_s", Low: 5, High: 60, Log: true},
				{Name: "headroom", Low: 1, High: 3},
				{Name: "keep", Low: 1, High: 6, Whole: true},
				{Name: "smooth", Low: 0.1, High: 1},
			},
			Defaults: []float64{baseline.CocktailPeriod.Seconds(), baseline.CocktailHeadroom, baseline.CocktailKeep, baseline.CocktailSmooth},
			Apply: func(s sim.Scenario, k []float64) sim.Scenario {
				cfg := baseline.CocktailConfig{Period: seconds(k[0]), Headroom: k[1], Keep: int(k[2]), Smooth: k[3]}
				return inProportion(s, cocktailName, always(baseline.NewCocktail(cfg)))
			},
		}),
	}
}

// inferline plans for a sample of the load before the runs begin, once for all runs.
func inferline(s sim.Scenario, k []float64) sim.Scenario {
	planned := sync.OnceValues(func() (baseline.InferLinePlan, error) {
		sample, err := sampled(s)
		if err != nil {
			return baseline.InferLinePlan{}, err
		}
		return baseline.PlanInferLine(row(s), sample, time.Duration(float64(s.Pipelines[0].SLO)*k[2]), k[3], gpus)
	})
	return inProportion(s, inferlineName, func(sim.Run) (plan.Allocator[baseline.InferLineMemory], error) {
		p, err := planned()
		return baseline.NewInferLine(baseline.InferLineConfig{Plan: p, Stable: seconds(k[0]), Look: seconds(k[1]), Shortest: k[4]}), err
	})
}

// row returns what InferLine's planner knows about stages: the times of their batches with the
// cores that they declare.
func row(s sim.Scenario) []baseline.InferLineStage {
	var out []baseline.InferLineStage
	for _, st := range s.Stages {
		x := baseline.InferLineStage{Function: key(st), Slots: st.Slots, Devices: st.GPU, Max: st.Max}
		one := alone(st)
		for b := range st.Batch {
			x.Batches = append(x.Batches, time.Duration(float64(one)*(1+*st.Service.BatchCost*float64(b))))
		}
		out = append(out, x)
	}
	return out
}

// sampleSeed is the seed of loads that a contender may know beforehand. No run uses it.
const sampleSeed = 901

// sampled returns arrivals of a load like a scenario's, as long as its runs.
func sampled(s sim.Scenario) ([]time.Duration, error) {
	a := s.Pipelines[0].Arrivals
	source := a.Make
	if source == nil {
		source = func(seed uint64) (arrivals.Source, error) {
			p, err := arrivals.ParseProfile(a.Rate)
			if err != nil {
				return nil, err
			}
			return arrivals.Renewal(p, *a.CV, seed)
		}
	}
	all, err := source(sampleSeed)
	if err != nil {
		return nil, fmt.Errorf("a sample of the load: %w", err)
	}
	var out []time.Duration
	for all := arrivals.Until(all, s.Duration); ; {
		at, ok := all.Next()
		if !ok {
			return out, nil
		}
		out = append(out, at)
	}
}

// key returns the name of a stage in a snapshot.
func key(s sim.Stage) string { return pipeline.Key{Name: s.Name, Namespace: "sim"}.String() }

// oracle returns the contender that knows when requests will arrive. Like ours, it has the
// KeysManager's starts, and keeps the parameters of key stages in memory. Its stages declare the
// idle cores that ours may use. With fewer cores, it would be too easy for ours to come close to
// the oracle.
func oracle() study.Contender {
	return compared(study.Contender{
		Name: "oracle", Title: "oracle", Source: "knows when every request will come, and declares eight cores; a mark, neither a policy nor a bound", Oracle: true, Cores: mostCores,
		// as fixed counts
		Space: []study.Knob{{Name: "wait", Low: 0.05, High: 64, Log: true}, {Name: "floor", Low: 1, High: 4}}, Defaults: []float64{32, gpus / stages / 2},
		Apply: func(s sim.Scenario, k []float64) sim.Scenario {
			s = declaring(starts(s, keptStart), mostCores)
			s.Policies = []sim.Policy{{Name: "oracle", Make: func(r sim.Run) (policy.Set, error) {
				set, err := policy.Names{Corrector: "none"}.Choose()
				if err != nil {
					return set, err
				}
				o, err := foresee(s, k, r)
				return policy.WithAllocator(set, "oracle", o), err
			}}}
			return s
		},
	})
}

// alone returns how long a single call takes with the cores that its stage declares.
func alone(st sim.Stage) time.Duration {
	p := st.Service.Profile
	return p[slices.IndexFunc(p, func(p sim.Point) bool { return p.CPU == st.CPU && p.Batch == 1 })].Mean
}

func foresee(s sim.Scenario, k []float64, r sim.Run) (baseline.Oracle, error) {
	all, err := r.Arrivals(pipelineName)
	if err != nil {
		return baseline.Oracle{}, err
	}
	cfg := baseline.OracleConfig{Arrivals: all, Wait: k[0], Floor: k[1]}
	for _, st := range s.Stages {
		cfg.Stages = append(cfg.Stages, baseline.OracleStage{
			Function: key(st), Service: alone(st), Start: st.Start.Fork, Batch: st.Batch, BatchCost: *st.Service.BatchCost,
			Slots: st.Slots, Most: st.Max,
		})
	}
	return baseline.NewOracle(cfg)
}
