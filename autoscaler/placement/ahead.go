package placement

import (
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// fewest is the smallest number of further replicas for which a function's parameters are kept, if
// memory is plentiful. A burst asks for several replicas at once.
const fewest = 4

// ahead extends the list l by nodes that keep a function's parameters for its later replicas. These
// replicas then fork there, or start in a parked child. ahead plans for as many further replicas as
// the function has now, up to its maximum. [function.next] chooses the nodes. ahead reserves room
// for the further replicas, so that all functions can grow at once.
//
// The functions are taken in this order:
//
//  1. the corrector's key stages
//  2. all functions that have replicas and gain from such starts, for at least [fewest] further
//     replicas, on nodes with plenty of memory
//
// In both groups, functions take turns, so that no function gets all of its copies before another
// has one. Loading disturbs nothing else:
//
//   - Parameters are loaded only if they and a replica fit below the threshold, so nothing is
//     evicted for them. If memory becomes short, they are evicted like any zygote.
//   - A node that is reading parameters from its disk gets no more to read, because a replica may
//     be waiting for them.
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

// settle records which nodes have which zygotes, and returns the nodes that may load something.
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

// growing returns the functions whose parameters are kept ahead, and sets the field more of each:
// how many further replicas to plan for. With key, these are the corrector's key stages. Otherwise
// they are all functions that gain from starts with parameters in memory.
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

// gains reports whether a start from parameters in memory saves f more time than a call takes. It
// returns true if that is unknown, and false if f's replicas fail to start.
func (f *function) gains() bool {
	saved, known := saving(f.Function)
	return f.Failing.Count == 0 && (!known || saved > f.Service.Mean)
}

// next returns the node for a further replica of f, or nil. quiet has the nodes that may load
// parameters. next assumes that every quiet node with plenty of memory has f's parameters, because
// the plan can load them there, and chooses as [Dispersed] would. A node that already runs all
// replicas of f comes last, so that f gets a second node. If no node with the parameters has room
// and key is true, next returns any quiet node where the parameters and a replica fit.
func (f *function) next(quiet []*node, key bool) *node {
	has := first(f, f.homes, func(n *node) bool { return !n.hasAll(f) && n.hasRoomWhereLoaded(f) })
	given := first(f, quiet, func(n *node) bool { return (has == nil || n.load < has.load) && n.takes(f) && n.calm(f) })
	if given != nil {
		return given
	}
	if has != nil {
		return has
	}
	has = first(f, f.homes, func(n *node) bool { return n.hasRoomWhereLoaded(f) })
	if has == nil && key {
		return first(f, quiet, func(n *node) bool { return n.takes(f) })
	}
	return has
}

// first returns the first of the allowed nodes in the order of [Dispersed].
func first(f *function, nodes []*node, may func(*node) bool) (most *node) {
	for _, n := range nodes {
		if may(n) && (most == nil || disperse(f, n, most) < 0) {
			most = n
		}
	}
	return most
}

// hasRoomWhereLoaded reports whether n, which has f's parameters, has room for a replica of f. If
// the plan does not keep the parameters warm yet, the replica must fit without evictions.
func (n *node) hasRoomWhereLoaded(f *function) bool {
	return n.fits(f) && (n.of[f.i].listed || n.hasRoomToLoad(f))
}

// takes reports whether f's parameters can be loaded for a replica that fits.
func (n *node) takes(f *function) bool { return !n.loading && n.hasRoomToLoad(f) && n.fits(f) }

// hasRoomToLoad reports whether f's parameters, if they are missing, and a replica have room
// without evictions.
func (n *node) hasRoomToLoad(f *function) bool {
	return n.free-n.reserve >= max(n.cost(f), 1)
}

// calm reports whether, with f's parameters and a replica, at most half of the memory below the
// threshold is used.
func (n *node) calm(f *function) bool {
	return n.Memory-n.free+n.cost(f) <= (n.Memory-n.reserve)/2
}
