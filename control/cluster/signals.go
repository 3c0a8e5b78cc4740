package cluster

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// measured sets f's measurements. A figure that is not a number is left out, because snapshots are
// recorded as JSON, which has no NaN or infinity.
func (l *Local) measured(f *plan.Function, is plan.Signals) {
	is.Demand.Last = l.clock.at(is.Demand.Last)
	if !finite(is.Demand.Rate, is.Demand.CV) {
		is.Demand = plan.Demand{Last: is.Demand.Last}
	}
	is.Stage.Last = l.clock.at(is.Stage.Last)
	if !finite(is.Stage.Rate, is.Stage.CV) {
		is.Stage = plan.Demand{Last: is.Stage.Last}
	}
	if !finite(is.Items.Mean) {
		is.Items = plan.Items{}
	}
	if !finite(is.Service.CV) {
		is.Service = plan.Service{}
	}
	if !finite(is.Busy.Share) {
		is.Busy = plan.Busy{}
	}
	f.Demand, f.Service, f.Wait, f.Busy, f.Waiting, f.Running = is.Demand, is.Service, is.Wait, is.Busy, is.Waiting, is.Running
	f.Stage, f.Lengths, f.Items, f.Survived = is.Stage, is.Lengths, is.Items, is.Survived
}

// expect sets Expected for idle functions of s. A function that its deployment keeps awake may have
// been scaled to 0 by hand, which fill finds out.
func (l *Local) expect(s *plan.Snapshot) {
	var counts map[string]int
	for i := range s.Functions {
		f := &s.Functions[i]
		if l.cfg.Expected == nil || f.Waiting > 0 || f.Running > 0 {
			continue
		}
		if counts == nil {
			counts = l.cfg.Expected()
		}
		f.Expected = counts[f.Name]
	}
}

func finite(values ...float64) bool {
	return !slices.ContainsFunc(values, func(v float64) bool { return math.IsNaN(v) || math.IsInf(v, 0) })
}

// aim sets the loads of functions whose owners declared a target, and returns the targets by
// function.
func (l *Local) aim(s *plan.Snapshot) map[string]plan.Target {
	targets := map[string]plan.Target{}
	var byCPU []pipeline.Key
	for i := range s.Functions {
		if s.Functions[i].Target.Type == "cpu" {
			byCPU = append(byCPU, pipeline.ParseKey(s.Functions[i].Name))
		}
	}
	var cpu map[pipeline.Key]float64
	if len(byCPU) > 0 && l.cfg.CPU != nil {
		cpu = l.cfg.CPU(byCPU)
	}
	for i := range s.Functions {
		if f := &s.Functions[i]; f.Target.Type != "" {
			f.Target = target(f, cpu)
			targets[f.Name] = f.Target
		}
	}
	return targets
}

// target returns the declared load per replica and the present load of all replicas together.
func target(f *plan.Function, cpu map[pipeline.Key]float64) plan.Target {
	t := plan.Target{Type: f.Target.Type, Value: f.Target.Value}
	switch t.Type {
	case "rps":
		t.Load, t.Known = f.Demand.Rate, f.Demand.Known
	case "capacity":
		t.Load, t.Known = float64(f.Waiting+f.Running), true
	case "cpu":
		t.Load, t.Known = cpu[pipeline.ParseKey(f.Name)]
	}
	if !finite(t.Load) || t.Load < 0 {
		t.Load, t.Known = 0, false
	}
	return t
}

// edges returns p's edges as indices into its stages. A stage with one call per item marks the
// edges that lead to it. edges leaves out edges to unknown stages, and the backward edges of a
// faulty graph.
func edges(p *pipeline.Pipeline) []plan.Edge {
	at, count := make(map[string]int, len(p.Stages)), 0
	for i := range p.Stages {
		at[p.Stages[i].Name] = i
		count += len(p.Stages[i].Next)
	}
	out := slices.Grow([]plan.Edge(nil), count)
	for from := range p.Stages {
		for _, next := range p.Stages[from].Next {
			if to, ok := at[next.To]; ok && to > from {
				out = append(out, plan.Edge{From: from, To: to, Each: p.Stages[to].Each})
			}
		}
	}
	slices.SortFunc(out, func(a, b plan.Edge) int { return cmp.Or(cmp.Compare(a.From, b.From), cmp.Compare(a.To, b.To)) })
	if len(out) == 0 {
		return nil
	}
	return slices.Compact(out)
}

// quota is the smallest CPU quota among a function's replicas, in thousandths of a core. Replicas
// differ only while a change is being rolled out. least is that smallest quota. If a plan has set
// it, now has the same value; if it is the declared quota, now is 0.
type quota struct{ now, least int }

// add counts a replica, with the quota that was declared.
func (q *quota) add(r *replica, declared int) {
	if r.state == plan.Draining {
		return
	}
	if may := cmp.Or(r.cpu, declared, math.MaxInt-1); q.least == 0 || may < q.least {
		q.now, q.least = r.cpu, may
	}
}

const (
	startsKept = 8  // starts of a path in its mean; older ones count ever less
	pathsKept  = 16 // twice the number of existing paths
)

// starts holds the start times of a function's replicas, sorted by path. The zero value is ready.
type starts []plan.Start

func (s *starts) add(path string, took time.Duration) {
	i, ok := slices.BinarySearchFunc(*s, path, func(x plan.Start, path string) int { return cmp.Compare(x.Path, path) })
	if !ok {
		if len(*s) == pathsKept {
			return
		}
		*s = slices.Insert(*s, i, plan.Start{Path: path})
	}
	x := &(*s)[i]
	x.N = min(x.N+1, startsKept)
	x.Mean += (took - x.Mean) / time.Duration(x.N)
}
