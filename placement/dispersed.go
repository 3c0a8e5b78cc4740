package placement

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/plan"
)

// Dispersed is a plan.Placer that starts key stages where their parameters are while that is urgent, else spreads them over the nodes, so
// that each node keeps room for one of them to grow, and packs the rest (QUART, section 6, figure 5, and section 6.2). It makes the sum over the nodes of the squared number of key stages' replicas as small as it can
// within memory, processors and devices; ties go to a node that has the function's parameters. Replicas that exist stay where they are.
//
// QUART's Eq. 8 to 10 descend the gradient of KL(P, uniform) instead. Its minimum is P = uniform at once; the unconstrained descent
// leaves the simplex (towards 1/e of it), and no capacity is in it. [KL] has that divergence of a finished placement.
//
// A key stage that grows while tasks wait or run goes to a node on which its parameters are, before one on which they are being loaded,
// before the others; of those alike to one that has not all of the function's replicas, for who loses a node should not lose all of a
// function. Then the even distribution decides, as it does about what is not urgent. [KeyStages] loads parameters where it would, so that
// there seldom is a choice to make between the two.
//
// New replicas of key stages go first in each round, those that fit on the fewest nodes before the others, each to the node
// with the fewest; afterwards new ones move while that makes the sum smaller. A replica of the rest goes where its function has the
// fewest, as with [Spread], because a lost node should not take all of a function; among those to a node that has its parameters, else
// to the fullest that has room.
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
				p.byName[slot.Node].load++
			}
		}
	}
	pack := func(f *function, x, y *node) int {
		return cmp.Or(
			cmp.Compare(x.of[f.i].replicas, y.of[f.i].replicas),
			prefer(x.of[f.i].zygote, y.of[f.i].zygote),
			cmp.Compare(x.free, y.free),
			cmp.Compare(x.Name, y.Name),
		)
	}
	p.rounds(func(round int) {
		for _, i := range p.order(round, key) {
			if !key[i] {
				p.add(i, pack)
				continue
			}
			p.lines[i].urgent = pressing(p.lines[i].Function, len(p.wants[i].Slots))
			if slot, ok := p.add(i, disperse); ok {
				p.byName[slot.Node].load++
			}
		}
	})
	p.level(key)
	return p.wants, nil
}

// disperse orders nodes for the next replica of a key stage.
func disperse(f *function, x, y *node) int {
	return cmp.Or(
		warmer(f, x, y),
		cmp.Compare(x.load, y.load),
		prefer(x.of[f.i].zygote, y.of[f.i].zygote),
		cmp.Compare(x.of[f.i].replicas, y.of[f.i].replicas),
		cmp.Compare(y.free, x.free),
		cmp.Compare(x.Name, y.Name),
	)
}

// warmer orders nodes by how warm f is there, if that is urgent; of those alike one that has all of its replicas comes last.
func warmer(f *function, x, y *node) int {
	if !f.urgent {
		return 0
	}
	return cmp.Or(cmp.Compare(y.of[f.i].warm, x.of[f.i].warm), prefer(!x.hasAll(f), !y.hasAll(f)))
}

// hasAll says whether f has replicas, and all of them here: with the node all of f would be lost.
func (n *node) hasAll(f *function) bool { return f.replicas > 0 && n.of[f.i].replicas == f.replicas }

// pressing says whether f's next replica, when it has so many, should come up where its parameters are: there are tasks (at the start of
// a step none waits yet), and such a start saves more than one of them takes, or it is not known what it saves. Up to its minimum a
// function's replicas stay apart, because that is what a minimum of two is for.
func pressing(f *plan.Function, has int) bool {
	if f.Waiting+f.Running == 0 || has > 0 && has < f.Min {
		return false
	}
	saved, known := saving(f)
	return !known || saved > f.Service.Mean
}

// saving is by how much a start from parameters in memory is shorter than one that loads them, on average; not known: until there were
// both.
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

// order returns the lines that want one more in this round: those of key stages first, and of these the ones that fit on the fewest
// nodes.
func (p *placing) order(round int, key []bool) []int {
	lines := p.wanting(round)
	fits := make(map[int]int, len(lines))
	for _, i := range lines {
		for _, n := range p.nodes {
			if key[i] && n.fits(p.lines[i]) {
				fits[i]++
			}
		}
	}
	slices.SortStableFunc(lines, func(x, y int) int { return cmp.Or(prefer(key[x], key[y]), cmp.Compare(fits[x], fits[y])) })
	return lines
}

// level moves new replicas of key stages to nodes with at least two fewer, while there are any. What a moved one leaves is not given
// to others: room is not what they move for. Each move makes the sum of squares smaller, so that it ends.
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
				to, ok := p.take(f, disperse, func(n *node) bool {
					together := f.replicas > 1 && n.of[f.i].replicas+1 == f.replicas
					return n.load+1 < left.load && (!f.urgent || !together && n.of[f.i].warm >= left.of[f.i].warm)
				})
				if !ok {
					continue
				}
				left.of[f.i].replicas--
				f.replicas--
				left.load--
				p.byName[to.Node].load++
				p.wants[i].Slots[k], moved = to, true
			}
		}
	}
}

// Key says whether f is a key stage: the corrector said so, or it has more than its minimum, or had and still drains.
func Key(f *plan.Function, w plan.Want) bool {
	return w.Key || max(len(w.Slots), len(f.Replicas)) > max(f.Min, 1)
}

// KL is the Kullback-Leibler divergence, in nats, of how key stages' replicas lie over the nodes that take new ones from an even
// distribution: 0 when they lie evenly, the logarithm of the number of nodes when all are on one. 0 where there is none.
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
