package autoscaler

import (
	"cmp"
	"slices"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// exclude forbids lanes behind sources where a chain would be too slow for p's objective, and sets
// how long tasks may wait in each lane. A chain is too slow if its service times on the longest way
// leave less than a tenth of themselves for waits.
//
// A table knows only the lane before, not the whole chain. So the way to a lane counts with the
// slowest chain that is still allowed, and the way from a lane with the fastest lanes. If a source
// would have no lane, it keeps the fastest one: the objective is out of its reach.
func (m *mixing) exclude(p *plan.Pipeline, part float64) {
	slo := p.SLO.Seconds()
	at, into := make([]int, len(p.Stages)), make([]int, len(p.Stages))
	for k, name := range p.Stages {
		at[k] = m.stage(name)
	}
	edges := forward(p)
	for _, e := range edges {
		into[e.To]++
	}
	fast, tail := make([]float64, len(p.Stages)), make([]float64, len(p.Stages))
	for k := range p.Stages {
		if at[k] >= 0 {
			fast[k] = m.fastest(at[k])
		}
	}
	for _, e := range slices.Backward(edges) {
		tail[e.From] = max(tail[e.From], fast[e.To]+tail[e.To])
	}
	head := map[int]float64{} // by lane: seconds of service before it, on the slowest way
	for k := range p.Stages {
		if at[k] < 0 {
			continue
		}
		st := &m.stages[at[k]]
		for i := range st.sources {
			src := &st.sources[i]
			before, used := 0.0, false
			switch src.from {
			case plan.FromClient:
				used = into[k] == 0
			case plan.FromJoin:
				used = into[k] > 1
				for _, e := range edges {
					if e.To == k {
						before = max(before, m.slowest(at[e.From], head))
					}
				}
			default:
				used = into[k] == 1 && slices.ContainsFunc(edges, func(e plan.Edge) bool {
					return e.To == k && at[e.From] == m.lanes[src.lane].of
				})
				before = head[src.lane] + m.lanes[src.lane].latency
			}
			if used {
				m.choose(st, src, head, before, tail[k], slo)
			}
		}
		m.patience(st, p, head, tail[k], part)
	}
}

// fastest returns the shortest service time of a stage's lanes, in seconds.
func (m *mixing) fastest(stage int) float64 {
	least := longest.Seconds()
	for _, lane := range m.stages[stage].lanes {
		least = min(least, m.lanes[lane].latency)
	}
	return least
}

// slowest returns the longest time from the entry until a lane of a stage has served, in seconds.
func (m *mixing) slowest(stage int, head map[int]float64) float64 {
	most := 0.0
	if stage < 0 {
		return 0
	}
	for _, lane := range m.stages[stage].lanes {
		most = max(most, head[lane]+m.lanes[lane].latency)
	}
	return most
}

// choose forbids a source the lanes that are too slow behind it.
func (m *mixing) choose(st *mixStage, src *mixSource, head map[int]float64, before, tail, slo float64) {
	fastest, any := -1, false
	for k, lane := range st.lanes {
		if !src.allowed[k] {
			continue
		}
		if fastest < 0 || m.lanes[lane].latency < m.lanes[st.lanes[fastest]].latency {
			fastest = k
		}
	}
	for k, lane := range st.lanes {
		if src.allowed[k] = src.allowed[k] && (1+leastBudget)*(before+m.lanes[lane].latency+tail) <= slo; src.allowed[k] {
			any = true
		}
	}
	if !any {
		src.allowed[fastest] = true
	}
	for k, lane := range st.lanes {
		if src.allowed[k] {
			head[lane] = max(head[lane], before)
		}
	}
}

// patience sets how long tasks may wait in a stage's lanes: the part of the time that the objective
// leaves, in proportion to their service times on the slowest way.
func (m *mixing) patience(st *mixStage, p *plan.Pipeline, head map[int]float64, tail, part float64) {
	for _, lane := range st.lanes {
		l := &m.lanes[lane]
		way := head[lane] + l.latency + tail
		budget := max(part*(p.SLO.Seconds()-way), leastBudget*way)
		l.wait = min(l.wait, budget*l.latency/way)
	}
}

// tables returns the routing tables of a mix, and the chains that they exclude.
func (m *mixing) tables(s *plan.Snapshot, d plan.Domain, counts []int, e effect) (tables []plan.Table, excluded []plan.Chain) {
	several := s.LanesIn(d)
	for _, l := range several {
		i := m.stage(l.Stage)
		st := &m.stages[i]
		rows := map[string]plan.Row{}
		for at, src := range st.sources {
			row := m.row(i, at, counts, &e)
			rows[src.from] = row
			if src.lane < 0 || m.joins(src.lane, l.Stage) {
				continue
			}
			may := row.Lanes()
			for k, lane := range st.lanes {
				if name := m.lanes[lane].f.Name; !src.allowed[k] && !slices.Contains(may, name) {
					excluded = append(excluded, plan.Chain{src.from, name})
				}
			}
		}
		tables = append(tables, plan.NewTable(l.Stage, s.Rev, rows))
	}
	slices.SortFunc(excluded, func(a, b plan.Chain) int { return slices.Compare(a, b) })
	return tables, excluded
}

// within reports whether the inputs of a class belong to a level. Both lengths are the longest
// input; 0: any. below is the longest input of the level before.
func within(class, below, level int) bool {
	return level == 0 && (class == 0 || class > below) || level > 0 && class > below && class <= level
}

// joins reports whether a lane's answers may also be one part of several for a stage. The row for
// joins has lanes of its own, so no lane can be excluded behind the single one.
func (m *mixing) joins(lane int, stage string) bool {
	return slices.ContainsFunc(m.steps, func(e plan.Step) bool {
		return e.Join && e.To == stage && e.From == m.stages[m.lanes[lane].of].name
	})
}

// row returns the row of a source of a stage. Each level has the flow of its lengths.
func (m *mixing) row(stage, at int, counts []int, e *effect) plan.Row {
	st := &m.stages[stage]
	lanes := make([]*plan.Function, len(st.lanes))
	index := map[string]int{}
	for k, lane := range st.lanes {
		lanes[k] = m.lanes[lane].f
		index[lanes[k].Name] = k
	}
	allowed := func(f *plan.Function) bool { return st.sources[at].allowed[index[f.Name]] }
	below := 0 // the longest input of the level before
	return levels(lanes, func(length int, fit []*plan.Function) plan.Level {
		flow := make([]float64, len(st.lanes))
		for class := range st.classes {
			if of := st.classes[class].length; len(st.classes) > 1 && !within(of, below, length) {
				continue
			}
			for k, f := range e.row(st, stage, mixTasks{at, class}) {
				flow[k] += f
			}
		}
		below = length
		if slices.ContainsFunc(fit, allowed) {
			fit = slices.DeleteFunc(fit, func(f *plan.Function) bool { return !allowed(f) })
		} // else the length matters more than the time
		slices.SortStableFunc(fit, func(a, b *plan.Function) int {
			idle := func(f *plan.Function) int { return min(counts[st.lanes[index[f.Name]]], 1) }
			return cmp.Or(idle(b)-idle(a), better(a, b)) // those with replicas first
		})
		parts, sum := make([]float64, len(fit)), 0.0
		for k, f := range fit {
			parts[k] = flow[index[f.Name]]
			sum += parts[k]
		}
		if !(sum > 0) {
			parts[0] = 1
		}
		l := plan.Level{Shares: sharesOf(fit, parts)}
		for _, f := range fit {
			shares := slices.ContainsFunc(l.Shares, func(s plan.Share) bool { return s.Lane == f.Name })
			if !shares || len(l.Shares) > 1 {
				l.Backups = append(l.Backups, f.Name)
			}
			if !shares && l.Overflow == "" {
				l.Overflow = f.Name
			}
		}
		return l
	})
}
