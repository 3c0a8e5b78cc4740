package autoscaler

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// Learned is what Sizer has learned about one function's arrival rate. It is updated once per
// decision, and the update takes effect in the next decision.
type Learned struct {
	At    time.Time `json:",omitzero"` // of the last update
	Ratio float64   `json:",omitzero"` // arrivals here per arrival at the stages before it; 0: unknown
}

const (
	// ratioTime is the time constant with which the learned ratio follows the measured one.
	ratioTime = time.Minute
	// mostRatio bounds the ratio: it is between 1/mostRatio and mostRatio.
	mostRatio = 64
)

// update returns l as it is after a decision. It moves Ratio towards the measured ratio: stage i's
// arrival rate divided by the sum of the rates of the stages before it. Ratio does not change while
// stage i or a stage before it cannot serve all its arrivals, because the rate behind an overloaded
// stage only shows how much that stage lets through.
func (l Learned) update(m *model, i int, at time.Time) Learned {
	dt := 0.0
	if !l.At.IsZero() {
		dt = clamp(at.Sub(l.At).Seconds(), 0, longestStep.Seconds())
	}
	g, sum := &m.stages[i], 0.0
	steady := len(g.before) > 0 && g.steady()
	for _, j := range g.before {
		steady = steady && m.stages[j].steady()
		sum += m.stages[j].measured
	}
	if l.At = at; !steady {
		return l
	}
	ratio := clamp(g.measured/sum, 1.0/mostRatio, mostRatio)
	l.Ratio = cmp.Or(l.Ratio, ratio)
	l.Ratio += (ratio - l.Ratio) * (1 - math.Exp(-dt/ratioTime.Seconds()))
	return l
}

// steady reports whether the arrival rate is known, and the ready replicas can serve it.
func (g *stage) steady() bool {
	ready, starting := g.f.Current()
	return g.known && g.measured > 0 && starting == 0 && g.measured <= saturated*float64(g.servers(ready))*g.mu
}

// connect fills in stage.before and model.order. stage.before lists the stages whose answers arrive
// at the stage, in pipelines with an objective. The list stays empty for the entry stage of such a
// pipeline, because requests from outside arrive there too. It also stays empty for a lane of
// several, because the routing table decides which part of the answers comes to it. In model.order,
// each stage comes after the stages before it.
func (m *model) connect() {
	named := 0
	m.order = make([]int, 0, len(m.stages))
	places := make([]int, len(m.stages)) // memory for before: most stages have one stage before them
	for i := range m.stages {
		m.stages[i].before = places[i : i : i+1]
	}
	for k := range m.pipes {
		p := &m.pipes[k]
		if p.name == "" {
			continue
		}
		named++
		for _, e := range p.edges {
			from, to := p.steps[e.From].at, p.steps[e.To].at
			if from >= 0 && to >= 0 && from != to && !m.stages[to].laned && !slices.Contains(m.stages[to].before, from) {
				m.stages[to].before = append(m.stages[to].before, from)
			}
		}
		m.order = m.order[:0]
		for _, st := range p.steps {
			if st.at >= 0 && !slices.Contains(m.order, st.at) { // a pipeline may call a function twice
				m.order = append(m.order, st.at)
			}
		}
	}
	if named > 1 { // the steps of a single pipeline are sorted already
		m.order = m.sorted()
	}
	for k := range m.pipes {
		p := &m.pipes[k]
		for _, st := range p.steps {
			if st.at >= 0 && !st.inner && p.name != "" {
				m.stages[st.at].before = nil
			}
		}
	}
}

// sorted returns the stages in topological order. Stages on cycles, and the stages behind them,
// come last. Pipelines that call two stages in opposite orders make a cycle.
func (m *model) sorted() []int {
	before, after := make([]int, len(m.stages)), make([][]int, len(m.stages))
	order := make([]int, 0, len(m.stages))
	for to := range m.stages {
		if before[to] = len(m.stages[to].before); before[to] == 0 {
			order = append(order, to)
		}
		for _, from := range m.stages[to].before {
			after[from] = append(after[from], to)
		}
	}
	for k := 0; k < len(order); k++ {
		for _, to := range after[order[k]] {
			if before[to]--; before[to] == 0 {
				order = append(order, to)
			}
		}
	}
	for i := range m.stages {
		if before[i] > 0 {
			order = append(order, i)
		}
	}
	return order
}

// follow raises each stage's rate to the rate that the stages before it are about to send: the sum
// of their rates, times the learned ratio. So all stages react as soon as the entry stage's rate
// changes. Without follow, each stage would react only when its own measured rate has clearly
// changed. follow skips stages behind an overloaded stage: see [model.ahead].
func (m *model) follow(past Memory) {
	for _, i := range m.order {
		g, arriving, served := &m.stages[i], 0.0, true
		for _, j := range g.before {
			b := &m.stages[j]
			ready, _ := b.f.Current()
			served = served && b.lambda <= float64(b.servers(ready))*b.mu
			arriving += b.lambda
		}
		if is := past[g.f.Name]; served && is != nil {
			g.lambda = max(g.lambda, arriving*is.Learned.Ratio)
		}
	}
}

// ahead returns how many replicas to start now for each stage behind an overloaded stage. More
// calls will reach the stage once the overloaded stage has its replicas, so the replicas of both
// start at the same time. With the returned count, the stage's waits will be within its share of
// the budget. within is the time, in seconds, in which a waiting line should be gone.
//
// The result is 0 for a stage that sleeps, has an unknown service time, or has no overloaded stage
// before it. For any other stage, the result rises with the stage's own rate.
func (m *model) ahead(needs []need, within float64) []int {
	out, rate, late := make([]int, len(m.stages)), make([]float64, len(m.stages)), make([]bool, len(m.stages))
	for i := range m.stages {
		rate[i] = m.stages[i].lambda
	}
	for _, i := range m.order {
		g, count, arriving := &m.stages[i], needs[i].count, 0.0
		for _, j := range g.before {
			arriving += rate[j]
			late[i] = late[i] || late[j]
		}
		if late[i] {
			// a join, if nothing is learned yet
			ratio := cmp.Or(needs[i].past.Learned.Ratio, 1/float64(len(g.before)))
			rate[i] = max(rate[i], arriving*ratio)
			if !needs[i].idle {
				out[i] = g.alone(rate[i], m, needs[i].most)
				count = max(count, out[i])
			}
		}
		if !g.known {
			continue
		}
		// The waiting line arrives here as well, but not faster than the stage's replicas let it
		// through.
		ready, _ := g.f.Current()
		asked := rate[i] + float64(g.waiting)/within
		if late[i] = late[i] || asked > float64(g.servers(ready))*g.mu; late[i] {
			rate[i] = min(asked, float64(g.servers(count))*g.mu)
		}
	}
	return out
}

// alone returns the smallest count with which g serves lambda tasks per second, mean waits are
// within g's share of each pipeline's budget, and waits for bursts are within g's patience. The
// count is at most limit.
func (g *stage) alone(lambda float64, m *model, limit int) int {
	wait := math.Inf(1)
	for _, at := range g.in {
		p := &m.pipes[at.pipe]
		wait = min(wait, p.steps[at.step].share*(1-p.patience/p.budget))
	}
	h := *g
	h.lambda, h.ca2 = lambda, g.chance()
	return min(max(h.least(toDuration(g.latency+wait), limit), h.forBursts(limit)), limit)
}
