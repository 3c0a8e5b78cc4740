package quart

import (
	"cmp"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler"
	"github.com/stagecoach-serving/stagecoach/autoscaler/baseline"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/sim"
	"github.com/stagecoach-serving/stagecoach/sim/study"
)

// The names of contenders that claims are about.
const (
	oursName      = "ours"
	inflessName   = "infless"
	inferlineName = "inferline"
	cocktailName  = "cocktail"
)

// contenders returns all contenders: baselines with the declared cores and with as many as ours may
// use, the oracle, ours, and ours without each of its parts.
func contenders() []study.Contender {
	declared := slices.Concat(baselines(), papers())
	var equal []study.Contender
	for _, c := range declared {
		equal = append(equal, withMostCores(c))
	}
	return slices.Concat(declared, equal, []study.Contender{oracle(), ours()}, ablations(), observers())
}

// withMostCores returns c with stages that declare as many cores as ours may give them. All else is
// equal: policy, knobs, defaults, and so the candidates.
func withMostCores(c study.Contender) study.Contender {
	apply := c.Apply
	c.Name, c.Title, c.Cores = twin(c.Name), c.Title+", eight cores", mostCores
	c.Source += "; with all cores that a stage was measured with, as ours may use"
	c.Apply = func(s sim.Scenario, k []float64) sim.Scenario { return apply(declaring(s, mostCores), k) }
	return c
}

// compared returns c for all settings except observations, whose replicas are fixed. Unless c says
// otherwise, its replicas use the cores that stages declare.
func compared(c study.Contender) study.Contender {
	c.Cores = cmp.Or(c.Cores, cores)
	c.In = func(s study.Setting) bool { return s.Group != observed }
	return c
}

// rivals has the policies that all baselines use at the levels below their own allocator. Nothing
// is corrected, replicas are spread, and nothing is loaded ahead of need. If replicas do not fit on
// the GPUs, the sharer removes those that gain least. Most baselines would share GPUs in a worse
// way by themselves.
var rivals = policy.Names{Corrector: "none", Sharer: "gain", Placer: "spread", Warmer: "none"}

// rival puts a baseline's allocator into a scenario, with starts from disk or the page cache.
func rival[M any](s sim.Scenario, name string, make func(sim.Run) (plan.Allocator[M], error)) sim.Scenario {
	s = starts(s, plainStart)
	s.Policies = []sim.Policy{{Name: name, Make: func(r sim.Run) (policy.Set, error) {
		set, err := rivals.Choose()
		if err != nil {
			return set, err
		}
		a, err := make(r)
		return policy.WithAllocator(set, name, a), err
	}}}
	return s
}

// inProportion works like rival, for policies that balance the stages of a pipeline. If GPUs are
// short, it keeps the stages in proportion. The sharer of rivals would give GPUs to the function
// that gains most. It would follow the queue from stage to stage, and stop replicas that the policy
// wants to keep.
func inProportion[M any](s sim.Scenario, name string, make func(sim.Run) (plan.Allocator[M], error)) sim.Scenario {
	s = rival(s, name, make)
	choose := s.Policies[0].Make
	s.Policies[0].Make = func(r sim.Run) (policy.Set, error) {
		set, err := choose(r)
		return policy.WithSharer(set, "proportional", baseline.Proportional{}), err
	}
	return s
}

// always returns a maker of an allocator that does not depend on the run.
func always[M any](a plan.Allocator[M]) func(sim.Run) (plan.Allocator[M], error) {
	return func(sim.Run) (plan.Allocator[M], error) { return a, nil }
}

func seconds(v float64) time.Duration { return time.Duration(v * float64(time.Second)) }

// declaring sets the number of cores that every stage declares. It must be one with which the
// stages were measured.
func declaring(s sim.Scenario, cores sim.Milli) sim.Scenario {
	for i := range s.Stages {
		s.Stages[i].CPU, s.Stages[i].CPULimit = cores*1000, cores*1000
	}
	return s
}

func baselines() []study.Contender {
	return []study.Contender{
		compared(study.Contender{
			Name: "static", Title: "fixed counts", Source: "provisioned for what is known beforehand; the default is half of the GPUs",
			Space: []study.Knob{{Name: "level", Low: 1, High: gpus / stages}}, Defaults: []float64{gpus / stages / 2},
			Apply: func(s sim.Scenario, k []float64) sim.Scenario {
				return rival(s, "static", always[struct{}](baseline.Static{Level: k[0]}))
			},
		}),
		compared(study.Contender{
			Name: "uniform", Title: "whole pipelines", Source: "section 3.3: all stages in proportion, by the need of the one that needs the most; our own sizing",
			Space: sizing, Defaults: sizingDefaults,
			Apply: func(s sim.Scenario, k []float64) sim.Scenario {
				return rival(s, "uniform", always[autoscaler.Memory](autoscaler.NewUniform(sized(k))))
			},
		}),
		compared(study.Contender{
			Name: "hpa", Title: "Kubernetes HPA", Source: "HorizontalPodAutoscaler, autoscaling/v2, with its defaults",
			Space:    []study.Knob{{Name: "target", Low: 0.2, High: 0.85}, {Name: "stabilize_s", Low: 15, High: 300, Log: true}},
			Defaults: []float64{baseline.HPATarget, baseline.HPAStabilize.Seconds()},
			Apply: func(s sim.Scenario, k []float64) sim.Scenario {
				return rival(s, "hpa", always(baseline.NewHPA(baseline.HPAConfig{Target: k[0], Stabilize: seconds(k[1])})))
			},
		}),
		compared(study.Contender{
			Name: "kpa", Title: "Knative KPA", Source: "Knative's Pod Autoscaler on concurrency, with its defaults",
			Space: []study.Knob{
				{Name: "target", Low: 0.2, High: 1}, {Name: "stable_s", Low: 6, High: 120, Log: true}, {Name: "panic", Low: 0.05, High: 1}, {Name: "threshold", Low: 1.1, High: 5, Log: true},
			},
			Defaults: []float64{baseline.KPATarget, baseline.KPAStable.Seconds(), baseline.KPAPanic, baseline.KPAThreshold},
			Apply: func(s sim.Scenario, k []float64) sim.Scenario {
				return rival(s, "kpa", always(baseline.NewKPA(baseline.KPAConfig{Target: k[0], Stable: seconds(k[1]), Panic: k[2], Threshold: k[3]})))
			},
		}),
	}
}

// The search space of contenders that size by queueing theory. A price lets a contender spend a
// budget that its objectives do not need. Each other contender has a knob that does so, too. Half
// of the prices are below 0.1 and change little, so that the other knobs are searched without it.
var (
	sizing = []study.Knob{
		{Name: "drain_s", Low: 0.25, High: 8, Log: true},
		{Name: "hold_s", Low: 2, High: 120, Log: true},
		{Name: "panic_s", Low: 5, High: 240, Log: true},
		{Name: "attainment", Low: 0.05, High: 0.999},
		{Name: "price", Low: 0.0003, High: 30, Log: true},
	}
	sizingDefaults = []float64{autoscaler.DrainWithin.Seconds(), autoscaler.Hold.Seconds(), autoscaler.Panic.Seconds(), autoscaler.Attainment, 0}
)

func sized(k []float64) autoscaler.Config {
	return autoscaler.Config{DrainWithin: seconds(k[0]), Hold: seconds(k[1]), Panic: seconds(k[2]), Attainment: k[3], Price: k[4]}
}
