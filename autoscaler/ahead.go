package autoscaler

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// Learned is what the past has taught of one function. It is updated once a decision and takes effect in the next.
type Learned struct {
	At    time.Time `json:",omitzero"` // of the last update
	Ratio float64   `json:",omitzero"` // arrivals here for each at the stages before it; 0: not known
}

const (
	// ratioTime is the time constant with which a measured ratio of rates moves the one that is known.
	ratioTime = time.Minute
	// mostRatio bounds it, both ways.
	mostRatio = 64
)

// update learns from stage i's rate and those before it, while each of them serves what arrives: behind one that does not,
// rates say how much gets through.
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

// steady says that what arrives is known and served, by replicas that are ready.
func (g *stage) steady() bool {
	ready, starting := g.f.Current()
	return g.known && g.measured > 0 && starting == 0 && g.measured <= saturated*float64(g.servers(ready))*g.mu
}

// connect tells each stage which stages' answers arrive at it, in pipelines with an objective, and sorts the stages so that those come
// first. One at which requests enter is told of none: what arrives there is not theirs alone.
func (m *model) connect() {
	named := 0
	m.order = make([]int, 0, len(m.stages))
	entry := make([]bool, len(m.stages))
	for k := range m.pipes {
		p := &m.pipes[k]
		if p.name == "" {
			continue
		}
		named++
		inner := make([]bool, len(p.steps))
		for _, e := range p.edges {
			inner[e.To] = true
			from, to := p.steps[e.From].at, p.steps[e.To].at
			if from >= 0 && to >= 0 && from != to && !slices.Contains(m.stages[to].before, from) {
				m.stages[to].before = append(m.stages[to].before, from)
			}
		}
		m.order = m.order[:0]
		for i, st := range p.steps {
			if st.at >= 0 {
				entry[st.at] = entry[st.at] || !inner[i]
				if !slices.Contains(m.order, st.at) { // a pipeline may call a function twice
					m.order = append(m.order, st.at)
				}
			}
		}
	}
	if named > 1 { // of one, the steps are in order
		net := Network{Stations: make([]Station, len(m.stages))}
		for to := range m.stages {
			for _, from := range m.stages[to].before {
				net.Links = append(net.Links, Link{from, to})
			}
		}
		m.order, _ = net.order()
	}
	for i, is := range entry {
		if is {
			m.stages[i].before = nil
		}
	}
}

// follow has no stage behind others be asked for less than these are about to ask of it, by the ratio of their rates that was learned: a
// change that shows where requests enter shows there at once, and not when it is no chance any more in what a stage makes of it. Behind
// one that does not serve what arrives, see ahead.
func (m *model) follow(past Memory) {
	for _, i := range m.order {
		g, arriving, served := &m.stages[i], 0.0, true
		for _, j := range g.before {
			b := &m.stages[j]
			ready, _ := b.f.Current()
			served = served && b.lambda <= float64(b.servers(ready))*b.mu
			arriving += b.lambda
		}
		if served {
			g.lambda = max(g.lambda, arriving*past[g.f.Name].Learned.Ratio)
		}
	}
}

// ahead says for each stage behind one that does not serve what arrives at it how many replicas it needs once that one does: as
// many as keep it within its own share of the budget at the rate that it will have. It then starts them at the same time, and not after
// those before it. 0: there is none such. What a stage needs rises with its own rate, and whether it is asked for does not depend on that.
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
			ratio := cmp.Or(needs[i].past.Learned.Ratio, 1/float64(len(g.before))) // a join, as long as nothing else is known
			rate[i] = max(rate[i], arriving*ratio)
			if !needs[i].idle {
				out[i] = g.alone(rate[i], m, needs[i].most)
				count = max(count, out[i])
			}
		}
		if !g.known {
			continue
		}
		// What waits arrives as well, and no more than the replicas that it will have let through.
		ready, _ := g.f.Current()
		asked := rate[i] + float64(g.waiting)/within
		if late[i] = late[i] || asked > float64(g.servers(ready))*g.mu; late[i] {
			rate[i] = min(asked, float64(g.servers(count))*g.mu)
		}
	}
	return out
}

// alone is the least count, up to limit, that keeps the waits of so many tasks a second within g's share of each pipeline, and bursts
// as they may.
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
