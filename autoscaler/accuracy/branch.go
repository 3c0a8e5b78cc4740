package accuracy

import (
	"container/heap"
	"math"
	"slices"
)

// search is a branch and bound for one goal.
type search struct {
	m    *model
	goal goal
	best float64 // cost of the best plan so far; never: none
	step float64 // a better plan is better by at least this
	x    []float64
	open nodeHeap
	// rootLow and rootHigh are the bounds at the root; set are the columns changed since. Those from
	// before the search are low and high.
	low, high         []float64
	rootLow, rootHigh []float64
	set               []int
	rootCosts         []float64 // reduced, where the root has no plan
	rootBound         float64
	limit             float64
	visited           int
	bound             float64 // no plan costs less
	ended             bool    // the work was used up
	counts            []int   // of options, while a plan is rounded
	fractions         []fraction
}

// bounds is a change of a column's bounds.
type bounds struct {
	col       int
	low, high float64
}

// branch is an open node: the parent's changes, and its own.
type branch struct {
	parent  *branch
	changes []bounds
	bound   float64
	depth   int
	at      int // order of creation
	basis   *basis
}

type nodeHeap []*branch

func (h nodeHeap) Len() int { return len(h) }
func (h nodeHeap) Less(i, j int) bool {
	if h[i].bound != h[j].bound {
		return h[i].bound < h[j].bound
	}
	return h[i].at > h[j].at
}
func (h nodeHeap) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *nodeHeap) Push(x any)   { *h = append(*h, x.(*branch)) }
func (h *nodeHeap) Pop() any {
	old := *h
	n := old[len(old)-1]
	*h = old[:len(old)-1]
	return n
}

// integral is how far a value may be from an integer.
const integral = 1e-6

// run searches. had is a plan that is known, or nil.
func (m *model) run(g goal, had []float64, step, work float64) *search {
	m.aim(g)
	s := &search{m: m, goal: g, best: never, step: step, limit: m.work + work, bound: -never}
	s.rootLow, s.rootHigh = slices.Clone(m.low), slices.Clone(m.high)
	s.low, s.high = slices.Clone(m.low), slices.Clone(m.high)
	if had != nil {
		s.x, s.best = slices.Clone(had), m.value0(g, had)
	}
	s.begin()
	s.explore(&branch{})
	for len(s.open) > 0 && !s.ended {
		b := heap.Pop(&s.open).(*branch)
		if b.bound > s.cutoff() {
			s.open = nil
			break
		}
		s.explore(b)
	}
	copy(m.low, s.low)
	copy(m.high, s.high)
	s.bound = s.best
	for _, b := range s.open {
		s.bound = min(s.bound, b.bound)
	}
	if s.best > s.bound && s.best-s.bound < step {
		s.bound = s.best
	}
	return s
}

// basis is a basis of the simplex, to begin with.
type basis struct {
	head  []int32
	state []int8
}

func (m *model) basis() *basis {
	return &basis{slices.Clone(m.head), slices.Clone(m.state)}
}

// from sets the basis. It reports whether the numbers are good.
func (m *model) from(b *basis) bool {
	copy(m.head, b.head)
	copy(m.state, b.state)
	return m.renew()
}

// begin makes a basis for the root: from that of the goal before, with the primal method.
func (s *search) begin() {
	m := s.m
	if m.root == nil || m.from(m.root) {
		m.improve(4 * m.rows)
	}
}

// value0 returns a goal's cost of x.
func (m *model) value0(g goal, x []float64) float64 {
	sum := 0.0
	for j, c := range m.costs[g] {
		sum += c * x[j]
	}
	return sum
}

func (s *search) cutoff() float64 {
	if s.best >= never {
		return never
	}
	return s.best - s.step
}

// restore sets the bounds of the root.
func (s *search) restore() {
	for _, j := range s.set {
		s.m.low[j], s.m.high[j] = s.rootLow[j], s.rootHigh[j]
	}
	for _, j := range s.m.integers { // tighten may have changed them
		s.m.low[j], s.m.high[j] = s.rootLow[j], s.rootHigh[j]
	}
	s.set = s.set[:0]
}

func (s *search) apply(b *branch) {
	for ; b != nil; b = b.parent {
		for _, c := range b.changes {
			s.m.low[c.col], s.m.high[c.col] = max(s.m.low[c.col], c.low), min(s.m.high[c.col], c.high)
			s.set = append(s.set, c.col)
		}
	}
}

// explore solves a node, then one of its children, and so on. Other children are left open.
func (s *search) explore(b *branch) {
	if b.basis != nil {
		s.m.from(b.basis)
	}
	for b != nil {
		s.restore()
		s.apply(b)
		s.visited++
		cutoff := s.cutoff()
		if b.depth == 0 {
			cutoff = never // the next goal begins from the root's basis
		}
		switch s.m.solve(cutoff, s.limit) {
		case infeasible, cutOff:
			return
		case stuck:
			s.ended = true // the node stays open, and so the gap is stated
			heap.Push(&s.open, b)
			return
		}
		bound := s.m.total()
		if b.depth == 0 {
			s.m.root = s.m.basis()
		}
		if bound > s.cutoff() {
			return
		}
		one, other := s.split()
		if one == nil {
			s.found()
			return
		}
		if b.depth == 0 {
			s.rootCosts, s.rootBound = slices.Clone(s.m.d), bound
			s.tighten()
		}
		now := s.m.basis()
		if s.visited <= 3 || s.visited%16 == 0 {
			s.round(b)
			s.m.from(now)
			if bound > s.cutoff() {
				return
			}
		}
		heap.Push(&s.open, &branch{parent: b, changes: other, bound: bound, depth: b.depth + 1, at: 2 * s.visited, basis: now})
		b = &branch{parent: b, changes: one, bound: bound, depth: b.depth + 1, at: 2*s.visited + 1}
	}
}

// found keeps the values of the simplex if they are a better plan than the best one so far.
func (s *search) found() {
	if v := s.m.value0(s.goal, s.m.x); v < s.best-1e-12 {
		s.best = v
		s.x = append(s.x[:0], s.m.x...)
		s.tighten()
	}
}

const (
	// upFrom is the part of a replica from which on more replicas are tried first. Fewer seldom serve
	// all requests.
	upFrom = 0.3
	// manyReplicas is a mean per variant. If there are more, batches are settled before replicas:
	// a replica more or less matters little.
	manyReplicas = 3
)

// split returns the changes of a node's two children, the first to be solved first. It returns nil
// if the present values are a plan.
func (s *search) split() (one, other []bounds) {
	col, far := -1, integral
	x := s.m.x
	many := s.m.c.p.replicas() > manyReplicas*(len(s.m.integers)-len(s.m.stages))
	for k, j := range s.m.integers {
		f := math.Abs(x[j] - math.Round(x[j]))
		if k == len(s.m.stages) {
			if col >= 0 {
				break // stages come first
			}
			if many {
				if one, other := s.splitBatches(); one != nil {
					return one, other
				}
			}
		}
		if f > far {
			col, far = j, f
		}
	}
	if col >= 0 {
		low := bounds{col, s.m.low[col], math.Floor(x[col])}
		high := bounds{col, math.Floor(x[col]) + 1, s.m.high[col]}
		if x[col]-math.Floor(x[col]) < upFrom {
			return []bounds{low}, []bounds{high}
		}
		return []bounds{high}, []bounds{low}
	}
	return s.splitBatches()
}

// splitBatches splits the options of the variant whose replicas are most divided between batches.
func (s *search) splitBatches() (one, other []bounds) {
	var of []int
	most := integral
	for _, v := range s.m.several {
		sum, top := 0.0, 0.0
		for _, o := range v.options {
			n := s.m.x[s.m.replicas[o]]
			sum, top = sum+n, max(top, n)
		}
		if sum-top > most {
			of, most = v.options, sum-top
		}
	}
	if of == nil {
		return nil, nil
	}
	at, sum := 0.0, 0.0
	for k, o := range of {
		n := s.m.x[s.m.replicas[o]]
		at, sum = at+float64(k)*n, sum+n
	}
	cut := int(at / sum) // options up to it are one part
	parts := [2]float64{}
	for k, o := range of {
		side := 0
		if k > cut {
			side = 1
		}
		parts[side] += s.m.x[s.m.replicas[o]]
		change := bounds{s.m.replicas[o], 0, 0}
		if side == 0 {
			other = append(other, change) // without the first part
		} else {
			one = append(one, change)
		}
	}
	if parts[1] > parts[0] {
		one, other = other, one
	}
	return one, other
}

// tighten narrows the bounds of columns at the root: where a column is at a bound there, and
// leaving it costs more than the best plan, it need not.
func (s *search) tighten() {
	cutoff := s.cutoff()
	if cutoff >= never || s.rootCosts == nil {
		return
	}
	for _, j := range s.m.integers {
		d := s.rootCosts[j]
		room := math.Floor((cutoff-s.rootBound)/math.Max(math.Abs(d), 1e-300) + integral)
		switch {
		case s.m.root.state[j] == basic || !(room >= 0):
		case d > 0:
			s.rootHigh[j] = min(s.rootHigh[j], s.low[j]+room)
		case d < 0:
			s.rootLow[j] = max(s.rootLow[j], s.high[j]-room)
		}
	}
}

// fraction is the part of a replica that an option would like to have.
type fraction struct {
	option int
	part   float64
}

// round tries the plan that is nearest to the present values: one batch per variant, and whole
// replicas, of which the largest fractions get the last ones.
func (s *search) round(b *branch) {
	m, p := s.m, s.m.c.p
	if s.counts == nil {
		s.counts = make([]int, len(m.c.options))
	}
	s.fractions = s.fractions[:0]
	left := p.replicas()
	for o := range s.counts {
		s.counts[o] = 0
	}
	for i := range p.Stages {
		for k := range p.Stages[i].Variants {
			want, batch := s.wanted(i, k)
			if batch < 0 {
				continue
			}
			n := max(int(want+integral), p.Stages[i].Variants[k].Least)
			s.counts[batch] = n
			left -= n
			s.fractions = append(s.fractions, fraction{batch, want - float64(n)})
		}
	}
	slices.SortStableFunc(s.fractions, func(a, b fraction) int {
		switch {
		case a.part > b.part:
			return -1
		case a.part < b.part:
			return 1
		}
		return a.option - b.option
	})
	for _, f := range s.fractions {
		if left > 0 && f.part > integral {
			s.counts[f.option]++
			left--
		}
	}
	for o, n := range s.counts {
		if j := m.replicas[o]; j >= 0 {
			at := float64(n)
			if at < m.low[j] || at > m.high[j] {
				at = math.Min(math.Max(at, m.low[j]), m.high[j])
			}
			m.low[j], m.high[j] = at, at
			s.set = append(s.set, j)
		}
	}
	if m.solve(s.cutoff(), s.limit) == optimal {
		if one, _ := s.split(); one == nil {
			s.found()
		}
	}
	s.restore()
	s.apply(b)
}

// wanted returns how many replicas of a variant the present values have, and the option that has
// most of them; -1: none.
func (s *search) wanted(stage, variant int) (n float64, option int) {
	option = -1
	most := -1.0
	for _, o := range s.m.c.of[stage] {
		if s.m.c.options[o].variant != variant || s.m.replicas[o] < 0 {
			continue
		}
		x := s.m.x[s.m.replicas[o]]
		n += x
		if x > most {
			option, most = o, x
		}
	}
	return n, option
}
