package placement

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// Dispersed is a plan.Placer after QUART, section 6, figure 5, and section 6.2. It spreads the
// replicas of key stages over the nodes, so that each node keeps room for one of them to grow. It
// packs all other replicas. Existing replicas stay where they are.
//
// Key stages go first in each round, beginning with those that fit on the fewest nodes. A new
// replica goes to the node with room that has the fewest replicas of key stages. Ties go to a node
// that has the function's parameters. At the end, new replicas move to nodes with fewer replicas of
// key stages. Each move reduces the sum, over the nodes, of the squared number of these replicas.
//
// If a key stage grows while tasks wait or run, its next replica is urgent. This replica goes to a
// node that has the stage's parameters, else to a node that is loading them, else to any other.
// Ties go to a node that does not already run every replica of the function, so that losing one
// node never takes the whole function down. After that, the rules for other replicas of key stages
// decide. [KeyStages] loads parameters where Dispersed would place replicas, so the two rules
// rarely conflict.
//
// Any replica of another function goes where its function has the fewest, as with [Spread], because
// a lost node should not take all of a function. Ties go to a node that has its parameters, then to
// the fullest node with room.
//
// QUART's Eq. 8 to 10 use gradient descent on KL(P, uniform) instead. Its minimum is simply P =
// uniform. But the descent does not keep the sum of P at 1: it goes towards uniform/e. It also
// ignores capacity. [KL] returns this divergence for a finished placement.
type Dispersed struct{}

// Place implements plan.Placer.
func (Dispersed) Place(s plan.Snapshot, a plan.Alloc) ([]plan.Want, error) {
	p, err := begin(&s, a)
	if err != nil {
		return nil, err
	}
	key := make([]bool, len(a))
	for i, l := range a {
		key[i] = l.Key || l.Count > max(p.lines[i].Min, 1)
		for _, slot := range p.wants[i].Slots {
			if key[i] {
				p.byLoad.carry(p.byName[slot.Node], 1)
			}
		}
	}
	p.rounds(func(round int) {
		for _, i := range p.order(round, key) {
			if !key[i] {
				p.add(i, &pack)
				continue
			}
			p.lines[i].urgent = pressing(p.lines[i].Function, len(p.wants[i].Slots))
			if n := p.add(i, &disperse); n != nil {
				p.byLoad.carry(n, 1)
			}
		}
	})
	p.level(key)
	p.stay()
	return p.wants, nil
}

// warmer orders nodes for the next replica of f, if f is urgent: first the nodes that have f's
// parameters, then those that are loading them. Of equal nodes, one that has all of f's replicas
// comes last.
func warmer(f *function, x, y *share) int {
	if !f.urgent {
		return 0
	}
	return cmp.Or(cmp.Compare(y.warm, x.warm), prefer(!x.hasAll(f), !y.hasAll(f)))
}

// hasAll reports whether f has replicas and all of them are here, so that the loss of this node
// would take all of f.
func (is *share) hasAll(f *function) bool { return f.replicas > 0 && is.replicas == f.replicas }

// pressing reports whether f's next replica is urgent, so that it should start where f's parameters
// are. has is the number of f's replicas. The replica is urgent if all of these hold:
//
//   - Tasks wait or run. Running tasks count because no task waits yet when a sudden load begins.
//   - A start from parameters in memory saves more time than one task takes, or the saving is
//     unknown.
//   - f has no replica, or at least its minimum. Up to a minimum of two or more, replicas stay
//     apart, because that is the purpose of such a minimum.
func pressing(f *plan.Function, has int) bool {
	if f.Waiting+f.Running == 0 || has > 0 && has < f.Min {
		return false
	}
	saved, known := saving(f)
	return !known || saved > f.Service.Mean
}

// saving returns how much shorter a start from parameters in memory is on average than one that
// loads them. It is unknown until both have happened.
func saving(f *plan.Function) (saved time.Duration, known bool) {
	var cold, warm time.Duration
	for _, s := range f.Starts {
		if s.Path == "cold" {
			cold = s.Mean
		} else {
			warm = max(warm, s.Mean)
		}
	}
	return cold - warm, cold > 0 && warm > 0
}

// order returns the lines that want one more replica in this round: key stages first, and of these
// the ones that fit on the fewest nodes.
func (p *placing) order(round int, key []bool) []int {
	lines := p.wanting(round)
	if p.fit == nil {
		p.fit = make([]int, len(p.lines))
	}
	for _, i := range lines {
		if key[i] {
			p.fit[i] = p.fitting(p.lines[i])
		}
	}
	slices.SortStableFunc(lines, func(x, y int) int { return cmp.Or(prefer(key[x], key[y]), cmp.Compare(p.fit[x], p.fit[y])) })
	return lines
}

// fitting returns on how many nodes one more replica of f fits.
func (c *cluster) fitting(f *function) (count int) {
	c.turn(f)
	for i, has := range c.at {
		if has == 0 && c.nodes[i].fits(f, &nothing) {
			count++
		}
	}
	for k := range f.on {
		if is := &f.on[k]; is.node.fits(f, is) {
			count++
		}
	}
	return count
}

// level moves new replicas of key stages to nodes with at least two fewer replicas of key stages,
// until no such move is left. The room that a moved replica leaves is not used for other replicas.
// Each move makes the sum of squares smaller, so the loop ends.
func (p *placing) level(key []bool) {
	for moved := true; moved; {
		moved = false
		for i := range p.wants {
			for k := 0; key[i] && k < len(p.wants[i].Slots); k++ {
				from := p.wants[i].Slots[k]
				if from.Replica != "" {
					continue
				}
				f, left := p.lines[i], p.byName[from.Node]
				f.urgent = pressing(f.Function, k)
				warm := p.on(f, left).warm
				to := p.best(f, &disperse, left.load-1, func(n *node, is *share) bool {
					together := f.replicas > 1 && is.replicas+1 == f.replicas
					return (!f.urgent || !together && is.warm >= warm) && n.fits(f, is)
				})
				if to == nil {
					continue
				}
				slot := p.take(f, to)
				p.give(f, left).replicas--
				f.replicas--
				p.byLoad.carry(left, -1)
				p.byLoad.carry(to, 1)
				p.wants[i].Slots[k], moved = slot, true
			}
		}
	}
}

// Key reports whether f is a key stage: the corrector marks f, or f has or gets more replicas than
// its minimum. Draining replicas count too.
func Key(f *plan.Function, w plan.Want) bool {
	return w.Key || max(len(w.Slots), len(f.Replicas)) > max(f.Min, 1)
}

// KL returns how unevenly the replicas of key stages are distributed over the nodes. It is the
// Kullback-Leibler divergence, in nats, of their distribution from an even one. Nodes that take no
// new replicas count only if they have replicas of key stages. KL is 0 for an even distribution or
// without replicas. If all replicas are on one node, it is the logarithm of the number of nodes.
func KL(s plan.Snapshot, wants []plan.Want) float64 {
	load, total := map[string]int{}, 0
	for _, w := range wants {
		f, ok := s.Function(w.Function)
		if !ok || !Key(f, w) {
			continue
		}
		for _, slot := range w.Slots {
			load[slot.Node]++
			total++
		}
	}
	nodes := 0
	for _, n := range s.Nodes {
		if n.Unavailable == "" || load[n.Name] > 0 {
			nodes++
		}
	}
	sum := 0.0
	for _, n := range s.Nodes { // in order: sums of floats depend on it
		if share := float64(load[n.Name]) / float64(total); share > 0 {
			sum += share * math.Log(share*float64(nodes))
		}
	}
	return max(sum, 0)
}
