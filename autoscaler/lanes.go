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
	lengths []plan.LengthShare
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
				st.lengths = f.Lengths
			}
		}
		out = append(out, st)
	}
	for _, l := range s.LanesIn(d) {
		add(l.Stage, l.Functions)
	}
	for _, name := range d.Functions {
		f, ok := s.Function(name)
		if !ok || taken[name] {
			continue
		}
		stage := name
		if _, deployed := s.Function(f.Serves()); !deployed { // its only lane
			stage = f.Serves()
		}
		add(stage, []string{name})
	}
	slices.SortStableFunc(out, func(a, b stageLanes) int { return cmp.Compare(a.name, b.name) })
	return out
}

// mostRate bounds a measured rate, per second.
const mostRate = 1 << 31

// addLanes adds a pipeline whose stages have several lanes, as several pipes. The first has the
// busiest lane of each stage. There is one more for each other lane that gets tasks, so that chains
// with it are in time as well. Lanes without tasks need no time.
func (m *model) addLanes(p *plan.Pipeline, all []plan.Lanes, functions []string, part float64) {
	main := slices.Clone(p.Stages)
	type other struct {
		at   int
		lane string
	}
	var others []other
	for k, name := range p.Stages {
		i, ok := slices.BinarySearchFunc(all, name, func(l plan.Lanes, name string) int { return cmp.Compare(l.Stage, name) })
		if !ok {
			continue
		}
		most := 0.0
		for _, lane := range all[i].Functions {
			at, _ := slices.BinarySearch(functions, lane)
			g := &m.stages[at]
			g.laned = true
			if g.lambda > most {
				most, main[k] = g.lambda, lane
			}
		}
		for _, lane := range all[i].Functions {
			at, _ := slices.BinarySearch(functions, lane)
			if lane != main[k] && m.stages[at].lambda > 0 {
				others = append(others, other{k, lane})
			}
		}
	}
	m.addPipe(p, main, functions, part)
	for _, o := range others {
		stages := slices.Clone(main)
		stages[o.at] = o.lane
		m.addPipe(p, stages, functions, part)
	}
}
