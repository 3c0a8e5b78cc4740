package accuracy

import "slices"

// goal is one of the objectives, in their order.
type goal int

const (
	served goal = iota
	accurate
	cheap
	steady
	goals
)

// model is a problem as a linear program, in which some columns must have integer values, and of
// each variant's options only one may have replicas.
type model struct {
	c *choices
	simplex
	// Columns: of nodes by tree (-1: none), of options (-1: never used), of variants and stages. A
	// variant with one option has its column.
	nodes    [][]int
	replicas []int
	variants [][]int
	stages   []int
	integers []int // columns, in the order in which they are branched on
	several  []several
	goalRows [steady]int // rows that keep what earlier goals have reached
	costs    [goals][]float64
	changed  []int // columns: of each variant with a column, replicas more, and fewer, than before
	building [][]entry
	root     *basis    // at the root of the latest search
	top      []float64 // by row: the largest slack
}

// several is a variant of which several options have columns.
type several struct{ options []int }

type entry struct {
	row   int
	value float64
}

// newModel returns the linear program of a problem. Rows keep no goal yet.
func newModel(c *choices) *model {
	m := &model{c: c, replicas: make([]int, len(c.options)), stages: make([]int, len(c.p.Stages))}
	m.addFlows()
	m.addReplicas()
	m.addBudgets()
	m.addGoals()
	m.finish()
	return m
}

// row adds a row: entries and a slack from 0 to top are right.
func (m *model) row(right, top float64) int {
	m.right, m.top = append(m.right, right), append(m.top, top)
	m.rows++
	return m.rows - 1
}

// add adds a column.
func (m *model) add(low, high float64, entries ...entry) int {
	m.building = append(m.building, entries)
	m.low, m.high = append(m.low, low), append(m.high, high)
	return len(m.building) - 1
}

// put adds an entry to a column.
func (m *model) put(col, row int, value float64) {
	m.building[col] = append(m.building[col], entry{row, value})
}

// addFlows adds columns for the parts of requests at the ends of segments of chains, and rows by
// which all next stages of a place get what comes there.
func (m *model) addFlows() {
	for i := range m.c.trees {
		t := &m.c.trees[i]
		cols := make([]int, len(t.nodes))
		all := m.row(1, 1)
		type way struct{ node, branch int }
		split := map[way]int{}
		for k := range t.nodes {
			n := &t.nodes[k]
			if cols[k] = -1; !n.leaf && !n.splits {
				continue
			}
			cols[k] = m.add(0, 1)
			if n.top {
				m.put(cols[k], all, 1)
			} else {
				m.put(cols[k], split[way{n.segment, n.branch}], 1)
			}
			if n.splits {
				for b := range t.next[m.c.options[n.option].stage] {
					row := m.row(0, 0)
					split[way{k, b}] = row
					m.put(cols[k], row, -1)
				}
			}
		}
		m.nodes = append(m.nodes, cols)
	}
}

// load is what a part of the requests that ends at a node needs: replicas of options.
func (m *model) load(tree, at int, each func(option int, replicas float64)) {
	t := &m.c.trees[tree]
	segment := t.nodes[at].segment
	for k := at; k >= 0 && k != segment; k = t.nodes[k].parent {
		n := &t.nodes[k]
		each(n.option, m.c.p.Pipelines[tree].Demand*n.items/m.c.options[n.option].rate)
	}
}

// addReplicas adds columns for replicas, and rows that bound flows by them.
func (m *model) addReplicas() {
	p := m.c.p
	used := make([]bool, len(m.c.options))
	for i := range m.c.trees {
		for k := range m.c.trees[i].nodes {
			used[m.c.trees[i].nodes[k].option] = true
		}
	}
	rows := make([]int, len(m.c.options))
	for o := range rows {
		m.replicas[o], rows[o] = -1, -1
	}
	total := p.replicas()
	all := m.row(float64(total), float64(total))
	for i := range p.Stages {
		st := &p.Stages[i]
		cols := make([]int, len(st.Variants))
		var options [][]int
		for k := range st.Variants {
			var of []int
			for _, o := range m.c.of[i] {
				if m.c.options[o].variant == k && (used[o] || st.Variants[k].Least > 0) {
					of = append(of, o)
				}
			}
			options = append(options, of)
		}
		stage := m.row(0, 0)
		m.stages[i] = m.add(0, float64(total), entry{stage, -1}, entry{all, 1})
		for k, of := range options {
			v := &st.Variants[k]
			least, most := float64(v.Least), float64(p.most(v))
			if cols[k] = -1; len(of) == 0 {
				continue
			}
			low, sum := least, stage
			if len(of) > 1 {
				sum, low = m.row(0, 0), 0
				cols[k] = m.add(least, most, entry{sum, -1}, entry{stage, 1})
				m.several = append(m.several, several{of})
			}
			for _, o := range of {
				rows[o] = m.row(0, most)
				m.replicas[o] = m.add(low, most, entry{rows[o], -1}, entry{sum, 1})
				if len(of) == 1 {
					cols[k] = m.replicas[o]
				}
			}
		}
		m.variants = append(m.variants, cols)
	}
	for i := range m.c.trees {
		for k, col := range m.nodes[i] {
			if col >= 0 {
				m.load(i, k, func(o int, n float64) { m.put(col, rows[o], n) })
			}
		}
	}
	m.integers = slices.Clone(m.stages)
	for i := range m.variants {
		for _, col := range m.variants[i] {
			if col >= 0 {
				m.integers = append(m.integers, col)
			}
		}
	}
}

// addBudgets adds rows for the problem's other budgets, and for the least accuracy of pipelines.
func (m *model) addBudgets() {
	p := m.c.p
	for b := range p.Budgets {
		budget := p.budget(b)
		row := m.row(1, 1) // in parts of the budget
		for i := range p.Stages {
			for k := range p.Stages[i].Variants {
				u := p.Stages[i].Variants[k].uses(b)
				if col := m.variants[i][k]; col >= 0 && u > 0 {
					if budget == 0 {
						m.high[col] = 0
						continue
					}
					m.put(col, row, u/budget)
				}
			}
		}
	}
	for i := range m.c.trees {
		least := p.Pipelines[i].MinAccuracy
		if least <= 0 {
			continue
		}
		row := m.row(0, 1)
		m.each(i, func(col int, top bool, accuracy float64) {
			if top {
				accuracy -= least
			}
			if accuracy != 0 {
				m.put(col, row, -accuracy)
			}
		})
	}
}

// each visits a pipeline's columns of flows: whether a column has a part of all requests, and its
// part in their accuracy.
func (m *model) each(tree int, visit func(col int, top bool, accuracy float64)) {
	t := &m.c.trees[tree]
	for k, col := range m.nodes[tree] {
		if col >= 0 {
			a := 0.0
			if t.nodes[k].leaf {
				a = t.nodes[k].accuracy / float64(t.leaves)
			}
			visit(col, t.nodes[k].top, a)
		}
	}
}

// addGoals adds the costs of the goals, and the rows that keep them.
func (m *model) addGoals() {
	p := m.c.p
	demand := 0.0
	for i := range p.Pipelines {
		demand += p.Pipelines[i].Demand
	}
	if p.CountChanges {
		m.addChanges()
	}
	for g := range m.costs {
		m.costs[g] = make([]float64, len(m.building))
	}
	for i := range m.c.trees {
		weight := p.Pipelines[i].Demand / demand
		m.each(i, func(col int, top bool, accuracy float64) {
			if top {
				m.costs[served][col] = -weight
			}
			m.costs[accurate][col] = -weight * accuracy
		})
	}
	price := 0.0
	for o, col := range m.replicas {
		if col >= 0 {
			v := &p.Stages[m.c.options[o].stage].Variants[m.c.options[o].variant]
			m.costs[cheap][col] = v.price()
			price += v.price() * m.high[col]
		}
	}
	for _, col := range m.changed {
		m.costs[steady][col] = 1
	}
	for g := served; g < steady; g++ {
		right, top := 0.0, 1.0 // the cost is from -1 to 0
		if g == cheap {
			right, top = price, price
		}
		m.goalRows[g] = m.row(right, top)
		for col, c := range m.costs[g] {
			if c != 0 {
				m.put(col, m.goalRows[g], c)
			}
		}
	}
}

// addChanges adds two columns per variant: replicas more and fewer than in the plan in force.
func (m *model) addChanges() {
	p := m.c.p
	for i := range p.Stages {
		for k := range p.Stages[i].Variants {
			v := &p.Stages[i].Variants[k]
			col := m.variants[i][k]
			if col < 0 {
				continue // it cannot have replicas
			}
			most := float64(p.most(v) + v.Running)
			row := m.row(float64(v.Running), 0)
			m.put(col, row, 1)
			m.changed = append(m.changed, m.add(0, most, entry{row, -1}), m.add(0, most, entry{row, 1}))
		}
	}
}

// finish makes the simplex of what was added.
func (m *model) finish() {
	for _, entries := range m.building {
		m.start = append(m.start, int32(len(m.index)))
		for _, e := range entries {
			m.index, m.value = append(m.index, int32(e.row)), append(m.value, e.value)
		}
	}
	m.start = append(m.start, int32(len(m.index)))
	for _, top := range m.top {
		m.low, m.high = append(m.low, 0), append(m.high, top)
	}
	m.cost = make([]float64, len(m.low))
	m.building = nil
	m.prepare()
}

// keep bounds the cost of a goal, for the goals after it.
func (m *model) keep(g goal, most float64) {
	row := m.goalRows[g]
	slack := m.columns() + row
	// cost + slack = right, so slack >= right - most.
	m.low[slack] = min(max(m.right[row]-most, 0), m.high[slack])
}

// aim makes g the cost. A little is added to the costs, so that few bases have the same cost, and
// so that there are no more replicas than flows need.
func (m *model) aim(g goal) {
	n := m.columns()
	copy(m.cost, m.costs[g])
	for j := n; j < len(m.cost); j++ {
		m.cost[j] = 0
	}
	total := 1 + float64(m.c.p.replicas())
	for j := range n {
		m.cost[j] += nudge * float64(1+(j*7919)%64) / 64
	}
	for _, j := range m.replicas {
		if j >= 0 {
			m.cost[j] += nudge / total * float64(1+(j*31)%16)
		}
	}
	for _, j := range m.stages {
		m.cost[j] = 0
	}
	for i := range m.variants {
		for _, j := range m.variants[i] {
			if j >= 0 && !slices.Contains(m.replicas, j) {
				m.cost[j] = 0
			}
		}
	}
}

// nudge is the largest cost that is added to that of a flow.
const nudge = 1e-10
