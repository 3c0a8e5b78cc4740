package autoscaler

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// mixing is a domain as stages with lanes, for which a mix is sought.
type mixing struct {
	lanes  []mixLane
	order  []int // lanes by function's name
	stages []mixStage
	steps  []plan.Step
}

// mixLane is a function that serves a stage.
type mixLane struct {
	stage
	of          int // index of its stage
	least, most int // replicas
	wait        float64
	rates       []float64 // see rate; -1: not computed
}

// mixStage is a stage with its lanes.
type mixStage struct {
	name    string
	lanes   []int   // the best first: see better
	rate    float64 // tasks per second, with those that wait
	sources []mixSource
	classes []mixClass
}

// mixClass is the tasks of a stage whose inputs are of about one length.
type mixClass struct {
	length int     // the longest input; 0: any
	share  float64 // of the stage's tasks
	takes  []bool  // by the stage's lanes
}

// mixTasks is the tasks of one class from one source of a stage.
type mixTasks struct{ source, class int }

// mixSource is where tasks of a stage come from.
type mixSource struct {
	from    string // as in plan.Source
	lane    int    // -1: no lane
	allowed []bool // by the stage's lanes
}

// newMixing returns the domain d of s. Objectives leave tasks some time to wait; part is the part
// of this time that mean waits may take.
func newMixing(s *plan.Snapshot, d plan.Domain, part float64) (*mixing, error) {
	m := &mixing{steps: s.Steps(d)}
	for _, name := range d.Functions {
		if _, ok := s.Function(name); !ok {
			return nil, fmt.Errorf("function %q of the domain: not in snapshot %d, want domains of the same snapshot", name, s.Rev)
		}
	}
	for _, st := range stagesOf(s, d) {
		of := mixStage{name: st.name, rate: st.rate + float64(st.waiting)/DrainWithin.Seconds()}
		for i := range st.lanes {
			of.lanes = append(of.lanes, len(m.lanes))
			m.lanes = append(m.lanes, mixLane{stage: st.lanes[i], of: len(m.stages)})
		}
		slices.SortStableFunc(of.lanes, func(x, y int) int { return better(m.lanes[x].f, m.lanes[y].f) })
		m.classify(&of, st.lengths)
		m.stages = append(m.stages, of)
	}
	for i := range m.lanes {
		m.order = append(m.order, i)
	}
	slices.SortFunc(m.order, func(x, y int) int { return cmp.Compare(m.lanes[x].f.Name, m.lanes[y].f.Name) })
	m.guess()
	m.sort()
	lanes := s.LanesIn(d)
	for i := range m.stages {
		st := &m.stages[i]
		for _, from := range plan.Sources(m.steps, lanes, st.name) {
			src := mixSource{from: from, lane: -1, allowed: make([]bool, len(st.lanes))}
			for k := range src.allowed {
				src.allowed[k] = true
			}
			if from != plan.FromClient && from != plan.FromJoin {
				src.lane = m.lane(from)
			}
			st.sources = append(st.sources, src)
		}
	}
	for i := range m.lanes {
		m.lanes[i].wait = m.lanes[i].latency
	}
	for _, name := range d.Pipelines {
		if p, ok := s.Pipeline(name); ok && p.SLO > 0 {
			m.exclude(p, part)
		}
	}
	return m, nil
}

// classify sets the classes of a stage. If the lengths of its tasks are unknown, all tasks are in
// one class, which all lanes take. If no lane takes any length, tasks of unknown length belong to
// the class of the longest ones, as in the table.
func (m *mixing) classify(st *mixStage, lengths []plan.LengthShare) {
	sum := 0.0
	for _, l := range lengths {
		c, any := mixClass{length: l.MaxLength, share: l.Share, takes: make([]bool, len(st.lanes))}, false
		for k, lane := range st.lanes {
			c.takes[k] = m.lanes[lane].f.Takes(l.MaxLength)
			any = any || c.takes[k]
		}
		switch {
		case !(l.Share >= 0):
		case any:
			st.classes, sum = append(st.classes, c), sum+l.Share
		case len(st.classes) > 0:
			st.classes[len(st.classes)-1].share += l.Share
			sum += l.Share
		}
	}
	if !(sum > 0) {
		all := mixClass{share: 1, takes: make([]bool, len(st.lanes))}
		for k := range all.takes {
			all.takes[k] = true
		}
		st.classes, sum = []mixClass{all}, 1
	}
	for i := range st.classes {
		st.classes[i].share /= sum
	}
}

// may reports whether some tasks may go to a lane. If their source is allowed no lane that takes
// their class, the length matters more than the time.
func (st *mixStage) may(of mixTasks, lane int) bool {
	takes, allowed := st.classes[of.class].takes, st.sources[of.source].allowed
	if !takes[lane] || allowed[lane] {
		return takes[lane]
	}
	for k := range allowed {
		if allowed[k] && takes[k] {
			return false
		}
	}
	return true
}

// lane returns the index of a function, or -1.
func (m *mixing) lane(function string) int {
	return slices.IndexFunc(m.lanes, func(l mixLane) bool { return l.f.Name == function })
}

// stage returns the index of a stage, or -1.
func (m *mixing) stage(name string) int {
	return slices.IndexFunc(m.stages, func(st mixStage) bool { return st.name == name })
}

// unmeasured is the service time, in seconds, of a domain without any measured one.
const unmeasured = 0.1

// guess sets the service times of lanes that have not served yet: the mean of the stage's other
// lanes, or of all lanes.
func (m *mixing) guess() {
	mean := func(of func(*mixLane) bool) (float64, bool) {
		sum, n := 0.0, 0
		for i := range m.lanes {
			if l := &m.lanes[i]; l.known && of(l) {
				sum, n = sum+l.service, n+1
			}
		}
		return sum / float64(max(n, 1)), n > 0
	}
	guessed := make([]float64, len(m.lanes))
	for i := range m.lanes {
		l := &m.lanes[i]
		if l.known {
			continue
		}
		service, ok := mean(func(x *mixLane) bool { return x.of == l.of })
		if !ok {
			service, ok = mean(func(*mixLane) bool { return true })
		}
		if !ok {
			service = unmeasured
		}
		guessed[i] = service
	}
	for i, service := range guessed {
		if service > 0 {
			l := &m.lanes[i]
			l.service, l.latency, l.mu, l.known = service, service, 1/service, true
		}
	}
}

// sort puts the stages into topological order. Stages on cycles, which pipelines with opposite
// orders make, come last.
func (m *mixing) sort() {
	placed := make([]bool, len(m.stages))
	waits := func(st *mixStage) bool {
		return slices.ContainsFunc(m.steps, func(e plan.Step) bool {
			from := m.stage(e.From)
			return e.To == st.name && e.From != st.name && from >= 0 && !placed[from]
		})
	}
	var out []mixStage
	for cycles := false; len(out) < len(m.stages); {
		before := len(out)
		for i := range m.stages {
			if st := &m.stages[i]; !placed[i] && (cycles || !waits(st)) {
				placed[i] = true
				out = append(out, *st)
			}
		}
		cycles = len(out) == before
	}
	m.stages = out
	for i := range m.stages {
		for _, k := range m.stages[i].lanes {
			m.lanes[k].of = i
		}
	}
}

// rate returns how many tasks per second n replicas serve in time. It rises with n.
func (l *mixLane) rate(n int) float64 {
	if n <= 0 {
		return 0
	}
	for len(l.rates) <= n {
		l.rates = append(l.rates, -1)
	}
	if l.rates[n] < 0 {
		l.rates[n] = l.serves(n)
	}
	return l.rates[n]
}

// serves computes rate by bisection: waits rise with the rate.
func (l *mixLane) serves(n int) float64 {
	c := l.servers(n)
	low, high := 0.0, saturated*float64(c)*l.mu
	if meanWait(high, l.mu, c, l.ca2, l.cs2) <= l.wait {
		return high
	}
	for range 24 {
		if mid := (low + high) / 2; meanWait(mid, l.mu, c, l.ca2, l.cs2) <= l.wait {
			low = mid
		} else {
			high = mid
		}
	}
	return low
}

// effect returns what a mix does. Stages are visited in topological order. Each stage's tasks come
// from its sources in proportion to what their lanes serve. The tasks of each class of each source
// go to the best lane that they may go to and that has room, those with the least choice first.
// Tasks without room are not served in time; they go to the lanes that they may go to, in
// proportion to what those serve.
func (m *mixing) effect(counts []int) effect {
	e := effect{flow: make([]float64, len(m.lanes)), rows: make([][]float64, len(m.stages))}
	for i := range m.stages {
		st := &m.stages[i]
		n := len(st.lanes)
		e.rows[i] = make([]float64, len(st.sources)*len(st.classes)*n)
		room := make([]float64, n)
		for k, lane := range st.lanes {
			room[k] = m.lanes[lane].rate(counts[lane])
		}
		weights, order := m.weights(st, e.flow)
		served, value := 0.0, 0.0
		for _, of := range order {
			left, row := st.rate*weights[of.source]*st.classes[of.class].share, e.row(st, i, of)
			for k, lane := range st.lanes {
				if left <= 0 || !st.may(of, k) {
					continue
				}
				take := min(left, room[k])
				room[k], left = room[k]-take, left-take
				row[k] += take
				served += take
				value += take * m.lanes[lane].f.Accurate()
			}
			if left > 0 {
				m.spill(st, of, left, counts, row)
			}
			for k, lane := range st.lanes {
				e.flow[lane] += row[k]
			}
		}
		if st.rate > 0 {
			e.served += served / st.rate
			e.value += value / st.rate
		}
	}
	return e
}

// row returns the flow of some of a stage's tasks to each of the stage's lanes.
func (e *effect) row(st *mixStage, stage int, of mixTasks) []float64 {
	n, at := len(st.lanes), of.source*len(st.classes)+of.class
	return e.rows[stage][at*n : (at+1)*n]
}

// spill adds tasks that find no room to a row.
func (m *mixing) spill(st *mixStage, of mixTasks, left float64, counts []int, row []float64) {
	total, first := 0.0, -1
	for k, lane := range st.lanes {
		if st.may(of, k) {
			total += m.lanes[lane].rate(counts[lane])
			if first < 0 {
				first = k
			}
		}
	}
	for k, lane := range st.lanes {
		switch {
		case !st.may(of, k):
		case total > 0:
			row[k] += left * m.lanes[lane].rate(counts[lane]) / total
		case k == first:
			row[k] += left
		}
	}
}

// weights returns the part of a stage's tasks that comes from each source, and the order in which
// tasks choose lanes.
func (m *mixing) weights(st *mixStage, flow []float64) (weights []float64, order []mixTasks) {
	weights = make([]float64, len(st.sources))
	total := 0.0
	for i, src := range st.sources {
		for class := range st.classes {
			order = append(order, mixTasks{i, class})
		}
		switch {
		case src.lane >= 0:
			weights[i] = flow[src.lane]
		case src.from == plan.FromJoin:
			weights[i] = st.rate
		}
		total += weights[i]
	}
	if total > 0 {
		for i := range weights {
			weights[i] /= total
		}
	} else {
		weights[0] = 1 // plan.FromClient
	}
	choice := func(of mixTasks) (n int) {
		for k := range st.lanes {
			if st.may(of, k) {
				n++
			}
		}
		return n
	}
	slices.SortStableFunc(order, func(x, y mixTasks) int { return choice(x) - choice(y) })
	return weights, order
}
