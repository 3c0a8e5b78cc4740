package autoscaler

import (
	"fmt"
	"slices"

	"github.com/stagecoach-serving/stagecoach/autoscaler/accuracy"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// build sets the problem of a domain, but the demand that a plan is made for. It returns why
// package accuracy cannot plan for the domain; empty: it can.
func (e *exactMix) build() string {
	e.pasts = make([]Past, len(e.lanes))
	for i := range e.lanes {
		l := &e.lanes[i]
		if past := e.was.Greedy[l.f.Name]; past != nil {
			e.pasts[i] = *past
		}
		l.bound(&e.pasts[i], e.b, *e.s)
		e.functions = append(e.functions, l.f)
	}
	e.problem = accuracy.Problem{Replicas: e.b.Replicas}
	known := false
	for i := range e.stages {
		st := &e.stages[i]
		if len(st.classes) > 1 {
			return "variants of stage " + st.name + " take different lengths"
		}
		out := accuracy.Stage{Name: st.name}
		for _, lane := range st.lanes {
			l := &e.lanes[lane]
			if l.f.MaxLength > 0 && len(st.lanes) > 1 {
				return "variants of stage " + st.name + " take different lengths"
			}
			known = known || l.f.Service.Known && l.f.Service.Mean > 0 || len(l.f.Profile) > 0
			out.Variants = append(out.Variants, variantOf(l))
		}
		e.problem.Stages = append(e.problem.Stages, out)
	}
	if !known {
		return "no service time is known"
	}
	e.addBudgets()
	if why := e.addPipelines(); why != "" {
		return why
	}
	e.addDemand()
	return ""
}

// variantOf returns a lane as a variant, with the batches of its profile.
func variantOf(l *mixLane) accuracy.Variant {
	v := accuracy.Variant{Name: l.f.Name, Accuracy: l.f.Accurate(), Least: l.least, Most: l.most, Factor: itemsPerCall(l.f)}
	if l.most <= l.least { // Most 0 means no bound
		v.Most = max(l.least, 1)
	}
	largest := max(l.f.Batch, l.f.AutoBatch, 1)
	for _, b := range l.f.ProfiledBatches() {
		if b.Size <= largest {
			v.Batches = append(v.Batches, accuracy.Batch{Size: b.Size, Time: b.Mean.Seconds(), Rate: float64(l.slots*b.Size) / b.Mean.Seconds()})
		}
	}
	if len(v.Batches) == 0 {
		v.Batches = []accuracy.Batch{{Size: max(l.f.Batch, 1), Time: max(l.latency, l.service), Rate: float64(max(l.slots, 1)) / l.service}}
	}
	return v
}

// itemsPerCall returns the mean number of items that a function returns per call.
func itemsPerCall(f *plan.Function) float64 {
	items := 1.0
	switch {
	case f.Items.Known && f.Items.Mean >= 0:
		items = f.Items.Mean
	case f.Learned.Known && f.Learned.Factor > 0:
		items = f.Learned.Factor
	}
	return min(max(items, 1e-6), 1e6) // 0 means 1 in package accuracy
}

// addBudgets adds CPU, memory and device memory to the problem. Devices have room for whole
// replicas only, so plans are checked against the devices afterwards.
func (e *exactMix) addBudgets() {
	devices, whole := 0.0, 0.0
	for _, pool := range e.b.Devices {
		devices += float64(max(pool.Free, 0))
		if whole == 0 || float64(pool.Memory) < whole {
			whole = float64(pool.Memory)
		}
	}
	e.problem.Budgets = []float64{float64(max(e.b.CPUMilli, 0)), float64(max(e.b.Memory, 0)), devices}
	for i := range e.stages {
		for k, lane := range e.stages[i].lanes {
			f := e.lanes[lane].f
			uses := []float64{float64(max(f.CPUMilli, 0)), float64(max(f.Memory, 0)), 0}
			if f.GPU > 0 {
				uses[2] = float64(f.GPU) * float64(max(f.DeviceMemory, 0))
				if f.DeviceMemory <= 0 {
					uses[2] = float64(f.GPU) * max(whole, 1)
				}
			}
			e.problem.Stages[i].Variants[k].Uses = uses
		}
	}
	for k := range e.problem.Budgets { // numbers near 1 are better for the solver
		unit := 0.0
		for i := range e.problem.Stages {
			for _, v := range e.problem.Stages[i].Variants {
				unit = max(unit, v.Uses[k])
			}
		}
		if unit == 0 {
			continue
		}
		e.problem.Budgets[k] /= unit
		for i := range e.problem.Stages {
			for j := range e.problem.Stages[i].Variants {
				e.problem.Stages[i].Variants[j].Uses[k] /= unit
			}
		}
	}
}

// addPipelines adds the domain's pipelines.
func (e *exactMix) addPipelines() string {
	covered := make([]bool, len(e.stages))
	for _, name := range e.d.Pipelines {
		p, ok := e.s.Pipeline(name)
		if !ok {
			continue
		}
		if p.SLO <= 0 {
			return "pipeline " + name + " has no objective (stagecoach.dev/slo)"
		}
		out := accuracy.Pipeline{
			Name: name, Objective: p.SLO.Seconds(), Hop: planHop, Queueing: accuracy.HalfForQueueing, MinAccuracy: p.MinAccuracy,
		}
		at, into := make([]int, len(p.Stages)), make([]int, len(p.Stages))
		for k, stage := range p.Stages {
			if at[k] = e.stage(stage); at[k] < 0 {
				return "stage " + stage + " is not deployed"
			}
			covered[at[k]] = true
		}
		for _, edge := range forward(p) {
			into[edge.To]++
			out.Steps = append(out.Steps, accuracy.Step{From: at[edge.From], To: at[edge.To], Whole: !edge.Each})
		}
		roots := 0
		for k := range p.Stages {
			switch {
			case into[k] > 1:
				return "stage " + p.Stages[k] + " joins the answers of several stages"
			case into[k] == 0:
				out.Root = at[k]
				roots++
			}
		}
		if roots != 1 {
			return fmt.Sprintf("pipeline %s has %d entries", name, roots)
		}
		out.Chains = e.chains(p, at)
		e.problem.Pipelines, e.pipelines = append(e.problem.Pipelines, out), append(e.pipelines, p)
	}
	for i := range covered {
		if !covered[i] {
			return "stage " + e.stages[i].name + " is in no pipeline"
		}
	}
	return ""
}

// chains returns the measured accuracies of a pipeline's chains, whose stages are at these indices
// of the problem. A pipeline with several last stages has none.
func (e *exactMix) chains(p *plan.Pipeline, at []int) (out []accuracy.Measured) {
	for _, c := range p.Accuracies {
		m := accuracy.Measured{Stages: at, Accuracy: c.Accuracy}
		for k, name := range c.Functions {
			lane := slices.IndexFunc(e.stages[at[k]].lanes, func(lane int) bool { return e.lanes[lane].f.Name == name })
			if lane < 0 { // it is not deployed any more
				break
			}
			m.Variants = append(m.Variants, lane)
		}
		if len(m.Variants) == len(at) {
			out = append(out, m)
		}
	}
	return out
}

// addDemand sets the expected demand of each pipeline: the rate at its entry. If other pipelines go
// through the entry as well, what comes from them does not count, and if several begin there, each
// has an equal part.
func (e *exactMix) addDemand() {
	for i := range e.problem.Pipelines {
		root := e.problem.Pipelines[i].Root
		st := &e.stages[root]
		rate, begin := st.rate, 0
		for k := range e.problem.Pipelines {
			if e.problem.Pipelines[k].Root == root {
				begin++
			}
			for _, s := range e.problem.Pipelines[k].Steps {
				if s.To == root {
					rate -= e.sent(s)
				}
			}
		}
		var since plan.Demand
		for _, lane := range st.lanes {
			if f := e.lanes[lane].f; f.Name == st.name {
				since = f.Demand
			}
		}
		rate = min(max(rate, 0)/float64(begin), mostRate/4)
		expected := e.expected(e.pipelines[i].Name, rate, since.Since)
		e.demand = append(e.demand, expected)
		e.problem.Pipelines[i].Demand = expected
	}
}

// sent returns the items per second that go along a step, as measured at its beginning.
func (e *exactMix) sent(s accuracy.Step) float64 {
	items := 0.0
	for k, lane := range e.stages[s.From].lanes {
		factor := 1.0
		if !s.Whole {
			factor = e.problem.Stages[s.From].Variants[k].Factor
		}
		items += e.lanes[lane].measured * factor
	}
	return items
}
