package accuracy

import "math"

// Solution is a plan for a problem.
type Solution struct {
	Served   float64 // part of all requests that is served in time
	Accuracy float64 // mean of the answers to them; 0 if none is served
	Price    float64 // of all replicas
	Changes  int     // replicas more or fewer than in the plan in force
	Counts   [][]Count
	Flows    []Flow
	// Gaps says by how much each goal may be missed, because its search ended early; 0: proved.
	// They are in the order of Served, Accuracy, Price and Changes.
	Gaps      [4]float64
	Dominated []Dominated
	Chains    int // chains of variants and batches that fit
	Visited   int // nodes of the searches
}

// Count is the replicas of a variant.
type Count struct {
	Replicas int
	Batch    int // index of its batch
}

// Flow is the part of a pipeline's requests that goes along a chain to one of its leaves. All
// leaves get all requests that are served.
type Flow struct {
	Pipeline int
	Stages   []int // from the root to a leaf
	Variants []int // of these stages
	Share    float64
	Accuracy float64
}

// Proved reports whether the plan is the best.
func (s *Solution) Proved() bool { return s.Gaps == [4]float64{} }

// Tolerances: plans that differ less are equal.
const (
	tolerance = 1e-7 // of the served part, and of accuracy
	slackness = 1e-9 // by which a later goal may spoil an earlier one
)

// Solve returns the best plan. The order of the goals is: most requests, best accuracy, lowest
// price, fewest changes. An error is that of [Problem.Check], a *[FaultError], or says that the
// problem is too large.
func (p *Problem) Solve() (*Solution, error) {
	if err := p.Check(); err != nil {
		return nil, err
	}
	c, err := newChoices(p)
	if err != nil {
		return nil, err
	}
	out := &Solution{Dominated: c.dominated, Chains: c.full}
	if out.Chains == 0 {
		out.idle(p)
		return out, nil
	}
	m := newModel(c)
	work := p.Work
	if work <= 0 {
		work = DefaultWork
	}
	x := m.least()
	for g := served; g < goals; g++ {
		if g == steady && !p.CountChanges {
			break
		}
		s := m.run(g, x, p.stepOf(g), work)
		x = s.x
		out.Visited += s.visited
		out.Gaps[g] = math.Max(s.best-s.bound, 0)
		if g < steady {
			m.keep(g, s.best+slackness*math.Max(1, math.Abs(s.best)))
		}
	}
	out.read(m, x)
	return out, out.settle(p)
}

// stepOf returns the smallest amount by which one plan can be better than another.
func (p *Problem) stepOf(g goal) float64 {
	if g < cheap {
		return tolerance
	}
	if g == cheap {
		for i := range p.Stages {
			for k := range p.Stages[i].Variants {
				if v := p.Stages[i].Variants[k].price(); v != math.Trunc(v) {
					return tolerance
				}
			}
		}
	}
	return 1 - 1e-5
}

// idle is the plan without demand: the least replicas.
func (s *Solution) idle(p *Problem) {
	s.Served = 1
	for i := range p.Stages {
		counts := make([]Count, len(p.Stages[i].Variants))
		for k := range counts {
			v := &p.Stages[i].Variants[k]
			counts[k].Replicas = v.Least
			s.Price += float64(v.Least) * v.price()
			s.Changes += max(v.Least-v.Running, v.Running-v.Least)
		}
		s.Counts = append(s.Counts, counts)
	}
}

// least returns the values of the plan that serves nothing.
func (m *model) least() []float64 {
	x := make([]float64, m.columns()+m.rows)
	p := m.c.p
	change := 0
	var columns []int
	if p.CountChanges {
		columns = m.changed
	}
	for i := range p.Stages {
		for k := range p.Stages[i].Variants {
			col := m.variants[i][k]
			if col < 0 {
				continue
			}
			v := &p.Stages[i].Variants[k]
			x[col] = float64(v.Least)
			x[m.stages[i]] += x[col]
			for _, o := range m.c.of[i] {
				if m.c.options[o].variant == k && m.replicas[o] >= 0 {
					x[m.replicas[o]] = x[col]
					break
				}
			}
			if columns != nil {
				x[columns[change]] = max(x[col]-float64(v.Running), 0)
				x[columns[change+1]] = max(float64(v.Running)-x[col], 0)
				change += 2
			}
		}
	}
	return x
}

// read sets a solution from values.
func (s *Solution) read(m *model, x []float64) {
	p := m.c.p
	for i := range p.Stages {
		counts := make([]Count, len(p.Stages[i].Variants))
		most := make([]float64, len(counts))
		for _, o := range m.c.of[i] {
			opt := &m.c.options[o]
			j := m.replicas[o]
			if j < 0 {
				continue
			}
			counts[opt.variant].Replicas += int(math.Round(x[j]))
			if x[j] > most[opt.variant] {
				most[opt.variant], counts[opt.variant].Batch = x[j], opt.batch
			}
		}
		for k, c := range counts {
			v := &p.Stages[i].Variants[k]
			s.Price += float64(c.Replicas) * v.price()
			s.Changes += max(c.Replicas-v.Running, v.Running-c.Replicas)
		}
		s.Counts = append(s.Counts, counts)
	}
	for i := range m.c.trees {
		t := &m.c.trees[i]
		for k := range t.nodes {
			j := m.nodes[i][k]
			if !t.nodes[k].leaf || !(x[j] > flowTol) {
				continue
			}
			f := Flow{Pipeline: i, Share: x[j], Accuracy: t.nodes[k].accuracy}
			for _, at := range t.path(k) {
				o := &m.c.options[t.nodes[at].option]
				f.Stages, f.Variants = append(f.Stages, o.stage), append(f.Variants, o.variant)
			}
			s.Flows = append(s.Flows, f)
		}
	}
}

// flowTol is a part of requests that is none.
const flowTol = 1e-9
