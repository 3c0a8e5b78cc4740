package placement

import (
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/plan"
)

// fewest is for how many further replicas of a function its parameters are kept ahead, where memory is plentiful, if it has fewer: a burst
// asks for several at once.
const fewest = 4

// ahead adds the nodes beside those of its replicas on which a function's parameters are kept, so that what it grows by next forks there,
// or in a child that is parked: as many further replicas as it has, or as it may still have. See [cluster.next] for where they go. What the
// next replicas of one take, those of others do not find, so that all can grow at once.
//
// What the corrector calls a key stage goes first, then any function with a replica, on nodes with plenty of memory and for [fewest] at
// least. Parameters are loaded where they and a replica fit below the threshold, so that nothing gives way to them, and are ordinary
// zygotes again where memory has become too short for that. A node that reads parameters from its disk gets no more to read: a replica may
// be waiting for them.
//
// Functions take turns, so that none has all of its copies before another has one.
func (c *cluster) ahead(wants []plan.Want, l *list) {
	quiet := c.settle()
	for _, key := range []bool{true, false} {
		turns := c.growing(wants, key)
		for len(turns) > 0 {
			turns = slices.DeleteFunc(turns, func(f *function) bool {
				n := f.next(quiet, key)
				if n == nil {
					return true
				}
				if !n.of[f.i].zygote {
					n.loading = true
					f.homes = append(f.homes, n)
				}
				l.add(f, n, key)
				n.occupy(f, plan.Slot{Node: n.Name, Device: strings.Join(n.pick(f), ",")})
				n.load++
				f.ahead++
				return f.ahead >= f.more
			})
		}
	}
}

// settle notes which nodes have which zygotes, and returns those that may be given something to load.
func (c *cluster) settle() (quiet []*node) {
	for _, n := range c.nodes {
		for i := range n.of {
			if n.of[i].zygote {
				c.functions[i].homes = append(c.functions[i].homes, n)
			}
			n.loading = n.loading || n.of[i].warm == coming
		}
		if !n.loading && n.Unavailable == "" {
			quiet = append(quiet, n)
		}
	}
	return quiet
}

// growing returns the functions whose parameters are kept ahead: those that the corrector calls key stages, or all.
func (c *cluster) growing(wants []plan.Want, key bool) (turns []*function) {
	for _, w := range wants {
		f, ok := c.function(w.Function)
		if !ok || f.zygote == 0 || len(w.Slots) == 0 || key && !w.Key || !key && !f.gains() {
			continue
		}
		f.more = len(w.Slots)
		if !key {
			f.more = max(f.more, fewest)
		}
		if f.more = min(f.more, f.Max-len(w.Slots)); f.ahead < f.more {
			turns = append(turns, f)
		}
	}
	return turns
}

// gains says whether f starts, and sooner from parameters in memory by more than a call takes: if it is known.
func (f *function) gains() bool {
	saved, known := saving(f.Function)
	return f.Failing.Count == 0 && (!known || saved > f.Service.Mean)
}

// next is the node that a further replica of f goes to: the one that [Dispersed] would choose if every node with plenty of memory had f's
// parameters, because it is given them. But where all of its replicas are it grows only if it cannot elsewhere, so that it has two nodes
// to be on. Where memory is short, parameters of key stages are loaded if none of the nodes that have them has room. Nil: none has.
func (f *function) next(quiet []*node, key bool) *node {
	has := first(f, f.homes, func(n *node) bool { return !n.hasAll(f) && n.houses(f) })
	given := first(f, quiet, func(n *node) bool { return (has == nil || n.load < has.load) && n.takes(f) && n.calm(f) })
	if given != nil {
		return given
	}
	if has != nil {
		return has
	}
	has = first(f, f.homes, func(n *node) bool { return n.houses(f) })
	if has == nil && key {
		return first(f, quiet, func(n *node) bool { return n.takes(f) })
	}
	return has
}

// first is the first of some nodes, as [Dispersed] orders those that may be.
func first(f *function, nodes []*node, may func(*node) bool) (most *node) {
	for _, n := range nodes {
		if may(n) && (most == nil || disperse(f, n, most) < 0) {
			most = n
		}
	}
	return most
}

// houses says whether a replica of f has room where its parameters are. For a copy that none of its replicas uses nothing gives way.
func (n *node) houses(f *function) bool {
	return n.fits(f) && (n.of[f.i].listed || n.cradles(f))
}

// takes says whether f's parameters can be loaded for a replica that fits.
func (n *node) takes(f *function) bool { return !n.loading && n.cradles(f) && n.fits(f) }

// cradles says whether f's parameters, if they are not there, and a replica have room without anything giving way.
func (n *node) cradles(f *function) bool {
	return n.free-n.reserve >= max(n.cost(f), 1)
}

// calm says whether no more than half of the memory below the threshold is used with f's parameters and a replica.
func (n *node) calm(f *function) bool {
	return n.Memory-n.free+n.cost(f) <= (n.Memory-n.reserve)/2
}
