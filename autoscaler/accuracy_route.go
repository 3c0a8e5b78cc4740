package autoscaler

import (
	"slices"

	"github.com/stagecoach-serving/stagecoach/autoscaler/accuracy"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

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
