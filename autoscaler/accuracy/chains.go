package accuracy

import (
	"fmt"
	"math"
	"slices"
)

// option is a variant with one of its batches, at a stage.
type option struct {
	stage, variant, batch int
	time, rate            float64
}

// node is a place in the tree of a pipeline's choices: an option at a stage, behind options at the
// stages before it. Only nodes are kept through which a request can pass in time.
type node struct {
	parent   int // index of a node; -1: the stage is the root
	option   int
	items    float64 // items per request that come to the stage
	depth    int     // stages from the root
	accuracy float64 // of the chain, at a leaf
	leaf     bool
	splits   bool // the pipeline goes on to several stages from here
	top      bool // no node before it splits
	segment  int  // the last node before it that splits; -1: top
	branch   int  // which of the next stages of segment leads here
}

// tree is the choices of one pipeline.
type tree struct {
	nodes  []node
	next   [][]Step // by stage
	leaves int      // stages without a next one
	chains int      // nodes that are leaves
}

// choices has what a problem's plans can be made of.
type choices struct {
	p         *Problem
	options   []option
	of        [][]int // options by stage
	trees     []tree
	dominated []Dominated
	full      int // chains that fit, with all batches
	grown     int // nodes that were made, in all rounds
}

// errTooMany says that a problem is too large.
var errTooMany = fmt.Errorf("accuracy: more than %d chains of variants and batches fit, or %d places in them are listed, want fewer batches", mostChains, mostNodes)

// Dominated is a variant that is never used, because another one of its stage is better.
type Dominated struct{ Stage, Variant, By int }

// newChoices returns the choices of a problem without faults. An error is a *FaultError, or says
// that the problem is too large.
func newChoices(p *Problem) (*choices, error) {
	c := &choices{p: p, of: make([][]int, len(p.Stages)), trees: make([]tree, len(p.Pipelines))}
	c.dominated = p.Dominated()
	for i := range p.Stages {
		for k := range p.Stages[i].Variants {
			if slices.ContainsFunc(c.dominated, func(d Dominated) bool { return d.Stage == i && d.Variant == k }) {
				continue
			}
			v := &p.Stages[i].Variants[k]
			for b := range v.Batches {
				if !v.useless(b) {
					c.of[i] = append(c.of[i], len(c.options))
					c.options = append(c.options, option{i, k, b, v.Batches[b].Time, v.Batches[b].rate()})
				}
			}
		}
	}
	for {
		chains := 0
		for i := range p.Pipelines {
			c.trees[i] = tree{}
			if err := c.grow(i); err != nil {
				return nil, err
			}
			if chains += c.trees[i].chains; chains > mostChains {
				return nil, errTooMany
			}
		}
		if c.full = max(c.full, chains); !c.prune() {
			return c, nil
		}
	}
}

// prune takes out batches that a larger one of the same variant can replace in every chain that
// fits. It reports whether there were any. Without them, no more chains are replaced than before,
// so all of them may be taken out at once.
func (c *choices) prune() bool {
	slack := make([]float64, len(c.options)) // of the slowest chain with the option, in seconds
	for o := range slack {
		slack[o] = math.Inf(1)
	}
	for i := range c.trees {
		t, p := &c.trees[i], &c.p.Pipelines[i]
		for k := range t.nodes {
			if !t.nodes[k].leaf {
				continue
			}
			left := (p.Objective - p.Hop*float64(t.nodes[k].depth+1)) * (1 - p.Queueing)
			for at := k; at >= 0; at = t.nodes[at].parent {
				left -= c.options[t.nodes[at].option].time
			}
			for at := k; at >= 0; at = t.nodes[at].parent {
				slack[t.nodes[at].option] = min(slack[t.nodes[at].option], left)
			}
		}
	}
	any := false
	for i, of := range c.of {
		kept := of[:0:0]
		for _, o := range of {
			x := &c.options[o]
			if slices.ContainsFunc(of, func(other int) bool {
				y := &c.options[other]
				return y.variant == x.variant && y.rate >= x.rate && y.time > x.time && y.time-x.time <= slack[o]
			}) {
				any = true
				continue
			}
			kept = append(kept, o)
		}
		c.of[i] = kept
	}
	return any
}

// useless reports whether another batch of v is as fast, and serves as much.
func (v *Variant) useless(b int) bool {
	for k := range v.Batches {
		x, y := v.Batches[k], v.Batches[b]
		if k != b && x.Time <= y.Time && x.rate() >= y.rate() && (k < b || x.Time < y.Time || x.rate() > y.rate()) {
			return true
		}
	}
	return false
}

// Dominated returns the variants that are slower, and no more accurate, than another one of their
// stage. A variant that returns fewer items than the other one, or costs less, is not dominated.
// Nor is any variant if accuracies of chains through its stage are measured.
func (p *Problem) Dominated() (out []Dominated) {
	measured := make([]bool, len(p.Stages))
	for i := range p.Pipelines {
		for _, c := range p.Pipelines[i].Chains {
			for _, s := range c.Stages {
				if s >= 0 && s < len(measured) {
					measured[s] = true
				}
			}
		}
	}
	for i := range p.Stages {
		vs := p.Stages[i].Variants
		for k := range vs {
			by := slices.IndexFunc(vs, func(w Variant) bool { return p.dominates(&w, &vs[k]) })
			if by >= 0 && vs[k].Least == 0 && !measured[i] {
				out = append(out, Dominated{i, k, by})
			}
		}
	}
	return out
}

// dominates reports whether w is at least as good as v in all respects, and better in one. No
// variant dominates itself, and no two dominate each other.
func (p *Problem) dominates(w, v *Variant) bool {
	if w.Accuracy < v.Accuracy || w.factor() > v.factor() || w.price() > v.price() || w.Most > 0 && w.Most < p.replicas() {
		return false
	}
	for k := range p.Budgets {
		if w.uses(k) > v.uses(k) {
			return false
		}
	}
	return w.asFast(v) && (w.Accuracy > v.Accuracy || !v.asFast(w))
}

// asFast reports whether w has, for each batch of v, one that takes no longer and serves as much.
func (w *Variant) asFast(v *Variant) bool {
	for _, x := range v.Batches {
		if !slices.ContainsFunc(w.Batches, func(y Batch) bool { return y.Time <= x.Time && y.rate() >= x.rate() }) {
			return false
		}
	}
	return true
}

// grow makes the tree of a pipeline.
func (c *choices) grow(at int) error {
	p, t := &c.p.Pipelines[at], &c.trees[at]
	t.next = make([][]Step, len(c.p.Stages))
	for _, s := range p.Steps {
		t.next[s.From] = append(t.next[s.From], s)
	}
	t.leaves = t.count(p.Root)
	if p.Demand <= 0 {
		return nil
	}
	for _, path := range t.paths(p.Root) {
		if need := c.fastest(p, path); need > p.Objective*(1+roundOff) {
			return &FaultError{
				Pipeline: p.Name, Fastest: need,
				Reason: fmt.Sprintf("objective %.4g s is below that of the fastest chain of variants, want at least %.4g s", p.Objective, need),
			}
		}
	}
	g := growing{c: c, p: p, t: t, behind: make([]float64, len(t.next))}
	g.measure(p.Root)
	if g.add(p.Root, -1, 1, 0, 0, -1, 0); g.over {
		return errTooMany
	}
	// A tree may have no way on which all leaves are in time, although each leaf has one.
	if len(t.nodes) == 0 {
		return &FaultError{Pipeline: p.Name, Reason: "no choice of variants is in time on the ways to all of its last stages"}
	}
	return nil
}

// roundOff is a relative error of sums of times that does not matter.
const roundOff = 1e-12

// count returns the number of leaves behind a stage.
func (t *tree) count(stage int) int {
	if len(t.next[stage]) == 0 {
		return 1
	}
	n := 0
	for _, s := range t.next[stage] {
		n += t.count(s.To)
	}
	return n
}

// paths returns the ways from a stage to all leaves behind it.
func (t *tree) paths(stage int) [][]int {
	if len(t.next[stage]) == 0 {
		return [][]int{{stage}}
	}
	var out [][]int
	for _, s := range t.next[stage] {
		for _, way := range t.paths(s.To) {
			out = append(out, append([]int{stage}, way...))
		}
	}
	return out
}

// fastest returns the least objective that a path can keep, in seconds.
func (c *choices) fastest(p *Pipeline, path []int) float64 {
	sum := 0.0
	for _, stage := range path {
		sum += c.least(stage)
	}
	return sum/(1-p.Queueing) + p.Hop*float64(len(path))
}

// least returns the time of a stage's fastest option.
func (c *choices) least(stage int) float64 {
	least := math.Inf(1)
	for _, o := range c.of[stage] {
		least = min(least, c.options[o].time)
	}
	return least
}

// growing adds nodes to a tree.
type growing struct {
	c *choices
	p *Pipeline
	t *tree
	// behind is the least part of the objective that the ways behind a stage need, in seconds.
	behind []float64
	over   bool // there are too many chains
}

// measure sets behind of a stage, and of those behind it.
func (g *growing) measure(stage int) {
	for _, s := range g.t.next[stage] {
		g.measure(s.To)
		need := g.c.least(s.To)/(1-g.p.Queueing) + g.p.Hop + g.behind[s.To]
		g.behind[stage] = max(g.behind[stage], need)
	}
}

// add adds the nodes at a stage behind a parent, and those behind them. used is the time so far.
// It reports whether any node fits.
func (g *growing) add(stage, parent int, items, used float64, depth, segment, branch int) bool {
	any := false
	steps := g.t.next[stage]
	for _, o := range g.c.of[stage] {
		opt := &g.c.options[o]
		time := used + opt.time
		if !g.fits(time, depth+1, g.behind[stage]) {
			continue
		}
		had, chains := len(g.t.nodes), g.t.chains
		if g.c.grown++; g.over || chains > mostChains || g.c.grown > mostNodes {
			g.over = true
			return false
		}
		g.t.nodes = append(g.t.nodes, node{
			parent: parent, option: o, items: items, depth: depth, leaf: len(steps) == 0, splits: len(steps) > 1,
			top: segment < 0, segment: segment, branch: branch,
		})
		ok := true
		if len(steps) == 0 {
			g.t.chains++
			g.t.nodes[had].accuracy = g.accuracy(had)
		}
		v := &g.c.p.Stages[stage].Variants[opt.variant]
		for k, s := range steps {
			seg, br := segment, branch
			if len(steps) > 1 {
				seg, br = had, k
			}
			if ok = g.add(s.To, had, items*s.items(v), time, depth+1, seg, br); !ok {
				break
			}
		}
		if !ok {
			g.t.nodes, g.t.chains = g.t.nodes[:had], chains
			continue
		}
		any = true
	}
	return any
}

// fits reports whether service of this time at so many stages leaves enough for hops and waits, and
// for what the stages behind need.
func (g *growing) fits(time float64, stages int, behind float64) bool {
	off := roundOff
	if behind > 0 {
		off *= 2 // the last stage is checked as sums are checked later
	}
	return time/(1-g.p.Queueing)+g.p.Hop*float64(stages)+behind <= g.p.Objective*(1+off)
}

// path returns the nodes from the root to a node.
func (t *tree) path(at int) []int {
	var out []int
	for ; at >= 0; at = t.nodes[at].parent {
		out = append(out, at)
	}
	slices.Reverse(out)
	return out
}

// accuracy returns the accuracy of the chain that ends at a node.
func (g *growing) accuracy(at int) float64 {
	var stages, variants []int
	product := 1.0
	for _, i := range g.t.path(at) {
		o := &g.c.options[g.t.nodes[i].option]
		stages, variants = append(stages, o.stage), append(variants, o.variant)
		product *= g.c.p.Stages[o.stage].Variants[o.variant].Accuracy
	}
	for _, m := range g.p.Chains {
		if slices.Equal(m.Stages, stages) && slices.Equal(m.Variants, variants) {
			return m.Accuracy
		}
	}
	return product
}
