package autoscaler

import (
	"cmp"
	"slices"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// stageLanes is a stage with the functions that can serve it, one or several.
type stageLanes struct {
	name    string
	lanes   []stage // sorted by name
	rate    float64 // arrivals per second at the stage
	waiting int     // tasks in all lanes
}

// stagesOf returns the stages of a domain, sorted by name. A function that serves no other stage is
// a stage of its own.
func stagesOf(s *plan.Snapshot, d plan.Domain) []stageLanes {
	var out []stageLanes
	taken := map[string]bool{}
	add := func(name string, functions []string) {
		st := stageLanes{name: name}
		for _, name := range functions {
			f, ok := s.Function(name)
			if !ok {
				continue
			}
			taken[name] = true
			g := newStage(f)
			st.lanes = append(st.lanes, g)
			st.waiting += g.waiting
			st.rate += g.measured
		}
		for i := range st.lanes { // arrivals at the stage, where they are measured
			if f := st.lanes[i].f; f.Stage.Known && f.Stage.Rate >= 0 && len(st.lanes) > 1 {
				st.rate = min(f.Stage.Rate, mostRate)
			}
		}
		out = append(out, st)
	}
	for _, l := range s.LanesIn(d) {
		add(l.Stage, l.Functions)
	}
	for _, name := range d.Functions {
		if f, ok := s.Function(name); ok && !taken[name] {
			add(f.Serves(), []string{name})
		}
	}
	slices.SortStableFunc(out, func(a, b stageLanes) int { return cmp.Compare(a.name, b.name) })
	return out
}

// mostRate bounds a measured rate, per second.
const mostRate = 1 << 31
