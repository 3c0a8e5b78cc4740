package autoscaler

import (
	"fmt"
	"slices"

	"github.com/stagecoach-serving/stagecoach/autoscaler/accuracy"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// build sets the problem of a domain, but the demand that a plan is made for. It returns why package
// accuracy cannot plan for the domain; empty: it can.
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
	e.problem = accuracy.Problem{Replicas: e.b.Replicas, Work: planWork}
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
			out.Variants = append(out.Variants, e.variantOf(l))
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
func (e *exactMix) variantOf(l *mixLane) accuracy.Variant {
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

// itemsPerCall returns how many items a call of a function returns.
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
		e.problem.Pipelines, e.pipelines = append(e.problem.Pipelines, out), append(e.pipelines, p)
	}
	for i := range covered {
		if !covered[i] {
			return "stage " + e.stages[i].name + " is in no pipeline"
		}
	}
	return ""
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

// rollout returns the counts on the way to a plan. Replicas that the plan does not want stay while
// those that take their place start, as far as the budget allows. If it does not allow it, at least
// half of a stage's ready replicas stay. If that is not possible either, the plan holds at once.
func (e *exactMix) rollout(target []int) []int {
	counts, ready := slices.Clone(target), make([]int, len(target))
	for i := range e.stages {
		coming := false
		for _, lane := range e.stages[i].lanes {
			ready[lane], _ = e.lanes[lane].f.Current()
			coming = coming || target[lane] > ready[lane]
		}
		for _, lane := range e.stages[i].lanes {
			if coming && target[lane] < ready[lane] {
				counts[lane] = min(ready[lane], max(e.lanes[lane].most, target[lane]))
			}
		}
	}
	if slices.Equal(counts, target) || e.b.Exceeded(e.functions, target) != "" {
		return target
	}
	for e.b.Exceeded(e.functions, counts) != "" {
		if lane := e.shrink(counts, target, ready); lane >= 0 {
			counts[lane]--
			continue
		}
		if lane := e.postpone(counts, ready); lane >= 0 {
			counts[lane]--
			continue
		}
		return target
	}
	for i := range e.lanes {
		if counts[i] != ready[i] {
			return counts
		}
	}
	return target // nothing would ever change
}

// shrink returns the lane of which a replica that the plan does not want can stop: one of the stage
// with the largest part of ready replicas that stay; -1: none.
func (e *exactMix) shrink(counts, target, ready []int) int {
	best, most := -1, 0.5
	for i := range e.stages {
		stay, all, from := 0, 0, -1
		for _, lane := range e.stages[i].lanes {
			stay, all = stay+min(counts[lane], ready[lane]), all+ready[lane]
			if counts[lane] > target[lane] && (from < 0 || counts[lane] > counts[from]) {
				from = lane
			}
		}
		if from >= 0 && all > 1 && float64(stay-1)/float64(all) >= 0.5 && float64(stay)/float64(all) > most {
			best, most = from, float64(stay)/float64(all)
		}
	}
	return best
}

// postpone returns a lane of which a new replica can start later; -1: none.
func (e *exactMix) postpone(counts, ready []int) int {
	best := -1
	for i := range counts {
		if counts[i] > ready[i] && counts[i] > e.lanes[i].least && (best < 0 || counts[i]-ready[i] > counts[best]-ready[best]) {
			best = i
		}
	}
	return best
}

// route returns the routing tables for the replicas that are ready, and the pairs of lanes that are
// too slow together.
func (e *exactMix) route(p *AccuracyPlan, counts []int) (tables []plan.Table, excluded []plan.Chain) {
	able := e.able(counts)
	planned := e.counts(&e.problem, able, p)
	routes := accuracy.MostAccurateFirst(&e.problem, planned)
	lanes := e.s.LanesIn(e.d)
	for _, several := range lanes {
		at := e.stage(several.Stage)
		rows := map[string]plan.Row{}
		for _, from := range plan.Sources(e.steps, lanes, several.Stage) {
			stage, variant := e.source(from)
			may := e.allowed(planned, stage, variant, at)
			var parts []float64
			for _, r := range routes.Routes {
				if r.Stage == at && r.From == stage && r.FromVariant == variant {
					parts = make([]float64, len(e.stages[at].lanes))
					for _, s := range r.Shares {
						parts[s.Variant] = s.Part
					}
				}
			}
			rows[from] = plan.Row{Levels: []plan.Level{e.level(at, may, parts, routes, able)}}
			for k, lane := range e.stages[at].lanes {
				if stage >= 0 && !may[k] {
					excluded = append(excluded, plan.Chain{from, e.lanes[lane].f.Name})
				}
			}
		}
		tables = append(tables, plan.NewTable(several.Stage, e.s.Rev, rows))
	}
	slices.SortFunc(excluded, func(a, b plan.Chain) int { return slices.Compare(a, b) })
	return tables, excluded
}

// able returns the replicas that requests can be routed to: those that are ready, or all of a stage
// without a ready one.
func (e *exactMix) able(counts []int) []int {
	out := make([]int, len(counts))
	for i := range e.stages {
		any := 0
		for _, lane := range e.stages[i].lanes {
			ready, _ := e.lanes[lane].f.Current()
			out[lane] = min(counts[lane], ready)
			any += out[lane]
		}
		for _, lane := range e.stages[i].lanes {
			if any == 0 {
				out[lane] = counts[lane]
			}
		}
	}
	return out
}

// allowed returns which lanes of a stage are in time behind a variant of the stage before, if all
// other stages have their fastest variant. If none is, the fastest one is allowed.
func (e *exactMix) allowed(planned [][]accuracy.Count, from, variant, at int) []bool {
	vs := e.problem.Stages[at].Variants
	time := func(stage, k int) float64 {
		return e.problem.Stages[stage].Variants[k].Batches[planned[stage][k].Batch].Time
	}
	out, any, fastest := make([]bool, len(vs)), false, 0
	for k := range vs {
		out[k] = true
		if time(at, k) < time(at, fastest) {
			fastest = k
		}
		for i := range e.problem.Pipelines {
			p := &e.problem.Pipelines[i]
			if from >= 0 && p.Follows(from, at) && !p.InTime(e.problem.Stages, planned, from, variant, at, k) {
				out[k] = false
			}
		}
		any = any || out[k]
	}
	if !any {
		out[fastest] = true
	}
	return out
}

// level returns the level of a row: parts of the stage's lanes, nil if no request comes from there.
func (e *exactMix) level(at int, may []bool, parts []float64, routes *accuracy.Routes, able []int) plan.Level {
	var fit []int // lanes
	index := map[int]int{}
	for k, lane := range e.stages[at].lanes {
		if index[lane] = k; may[k] {
			fit = append(fit, lane)
		}
	}
	e.byAccuracy(fit)
	slices.SortStableFunc(fit, func(a, b int) int { // those with replicas first
		return min(able[b], 1) - min(able[a], 1)
	})
	functions, shares, sum := make([]*plan.Function, len(fit)), make([]float64, len(fit)), 0.0
	for i, lane := range fit {
		functions[i] = e.lanes[lane].f
		if parts != nil {
			shares[i] = parts[index[lane]]
			sum += shares[i]
		}
	}
	if !(sum > 0) {
		shares[0] = 1
	}
	l := plan.Level{Shares: sharesOf(functions, shares)}
	for i, f := range functions {
		has := slices.ContainsFunc(l.Shares, func(s plan.Share) bool { return s.Lane == f.Name })
		if has && len(l.Shares) == 1 {
			continue
		}
		l.Backups = append(l.Backups, f.Name)
		if spare := routes.Spare[at][index[fit[i]]]; !has && l.Overflow == "" && spare > 0 {
			l.Overflow = f.Name
		}
	}
	if l.Overflow == "" {
		for i, f := range functions {
			if able[fit[i]] > 0 && !slices.ContainsFunc(l.Shares, func(s plan.Share) bool { return s.Lane == f.Name }) {
				l.Overflow = f.Name
			}
		}
	}
	return l
}
