package autoscaler

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// Learned is what the past has taught of one function's rate. It is updated once per decision, and
// takes effect in the next.
type Learned struct {
	At    time.Time `json:",omitzero"` // of the last update
	Ratio float64   `json:",omitzero"` // arrivals here per arrival at the stages before it; 0: unknown
}

const (
	// ratioTime is the time constant with which a measured ratio of rates moves the learned one.
	ratioTime = time.Minute
	// mostRatio bounds the ratio, both ways.
	mostRatio = 64
)

// update learns from stage i's rate and the rates of the stages before it, while each of them
// serves what arrives. Behind a stage that does not, rates only tell how much gets through.
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

// steady reports whether what arrives is known, and served by replicas that are ready.
func (g *stage) steady() bool {
	ready, starting := g.f.Current()
	return g.known && g.measured > 0 && starting == 0 && g.measured <= saturated*float64(g.servers(ready))*g.mu
}

// connect tells each stage which stages' answers arrive at it in pipelines with an objective, and
// sorts the stages so that those come first. A stage at which requests enter is told of none,
// because what arrives there is not only their answers.
func (m *model) connect() {
	named := 0
	m.order = make([]int, 0, len(m.stages))
	places := make([]int, len(m.stages)) // most stages have one before them
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
			if from >= 0 && to >= 0 && from != to && !slices.Contains(m.stages[to].before, from) {
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
	if named > 1 { // of one pipeline, the steps are in order
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

// sorted returns the stages in topological order. Stages on cycles, which pipelines in opposite
// directions make, and the stages behind them come last.
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

// follow raises the rate of each stage to what the stages before it are about to ask of it, by the
// learned ratio of their rates. So a change that shows where requests enter shows at all stages at
// once, and not when it stands out from chance at each. Behind a stage that does not serve what
// arrives, see ahead.
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

// ahead returns, for each stage behind one that does not serve what arrives at it, how many
// replicas the stage needs once the other does: as many as keep it within its own share of the
// budget at the rate that it will have. So its replicas start at the same time, and not after those
// before it. 0 means that there is no such stage before it. What a stage needs rises with its own
// rate, and whether it is asked for does not depend on that rate.
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
			ratio := cmp.Or(needs[i].past.Learned.Ratio, 1/float64(len(g.before))) // a join, if nothing is learned yet
			rate[i] = max(rate[i], arriving*ratio)
			if !needs[i].idle {
				out[i] = g.alone(rate[i], m, needs[i].most)
				count = max(count, out[i])
			}
		}
		if !g.known {
			continue
		}
		// The line arrives as well, and no more than the stage's replicas will let through.
		ready, _ := g.f.Current()
		asked := rate[i] + float64(g.waiting)/within
		if late[i] = late[i] || asked > float64(g.servers(ready))*g.mu; late[i] {
			rate[i] = min(asked, float64(g.servers(count))*g.mu)
		}
	}
	return out
}

// alone returns the least count, up to limit, that keeps the waits of so many tasks per second
// within g's share of each pipeline, and bursts within their patience.
func (g *stage) alone(lambda float64, m *model, limit int) int {
	wait := math.Inf(1)
	for _, at := range g.in {
		p := &m.pipes[at.pipe]
		wait = min(wait, p.steps[at.step].share*(1-p.patience/p.budget))
	}
	h := *g
	h.lambda, h.ca2 = lambda, min(g.ca2, 1)
	return min(max(h.least(toDuration(g.service+wait), limit), h.forBursts()), limit)
}
