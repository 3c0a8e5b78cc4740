package placement

import (
	"slices"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// fewest is the smallest number of further replicas for which a function's parameters are kept, if
// memory is plentiful. A burst asks for several replicas at once.
const fewest = 4

// ahead extends the list l by nodes that keep a function's parameters for its later replicas. These
// replicas then fork there, or start in a parked child. ahead plans for as many further replicas as
// the function has now, up to its maximum. [cluster.next] chooses the nodes. ahead reserves room
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
	c.settle()
	for _, key := range []bool{true, false} {
		turns := c.growing(wants, key)
		for len(turns) > 0 {
			turns = slices.DeleteFunc(turns, func(f *function) bool {
				n := c.next(f, key)
				if n == nil {
					return true
				}
				if !c.on(f, n).zygote {
					n.loading = true
				}
				l.add(f, n, key)
				c.take(f, n)
				c.byLoad.carry(n, 1)
				f.ahead++
				return f.ahead >= f.more
			})
		}
	}
}

// settle marks the nodes that read parameters from their disks.
func (c *cluster) settle() {
	for i := range c.functions {
		on := c.functions[i].on
		for k := range on {
			on[k].node.loading = on[k].node.loading || on[k].warm == coming
		}
	}
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

// next returns the node for a further replica of f, or nil. It assumes that every node that may
// load parameters and has plenty of memory has f's parameters, because the plan can load them
// there, and chooses as [Dispersed] would. A node that already runs all replicas of f comes last,
// so that f gets a second node. If no node with the parameters has room and key is true, next
// returns any node where the parameters may be loaded and a replica fits.
func (c *cluster) next(f *function, key bool) *node {
	has, load := f.first(func(n *node, is *share) bool { return !is.hasAll(f) && n.hasRoomWhereLoaded(f, is) }), anyLoad
	if has != nil {
		load = has.load
	}
	if given := c.best(f, &disperse, load, func(n *node, is *share) bool { return n.takes(f, is) && n.calm(f, is) }); given != nil {
		return given
	}
	if has != nil {
		return has
	}
	has = f.first(func(n *node, is *share) bool { return n.hasRoomWhereLoaded(f, is) })
	if has == nil && key {
		return c.best(f, &disperse, anyLoad, func(n *node, is *share) bool { return n.takes(f, is) })
	}
	return has
}

// first returns the first of the allowed nodes with f's parameters in the order of [Dispersed].
func (f *function) first(may func(*node, *share) bool) *node {
	most := &nothing
	for k := range f.on {
		if is := &f.on[k]; is.zygote && (most.node == nil || disperse.any(f, is, most) < 0) && may(is.node, is) {
			most = is
		}
	}
	return most.node
}

// hasRoomWhereLoaded reports whether n, which has f's parameters, has room for a replica of f. If
// the plan does not keep the parameters warm yet, the replica must fit without evictions.
func (n *node) hasRoomWhereLoaded(f *function, is *share) bool {
	return n.fits(f, is) && (is.listed || n.hasRoomToLoad(f, is))
}

// takes reports whether f's parameters can be loaded for a replica that fits.
func (n *node) takes(f *function, is *share) bool {
	return !n.loading && n.hasRoomToLoad(f, is) && n.fits(f, is)
}

// hasRoomToLoad reports whether f's parameters, if they are missing, and a replica have room
// without evictions.
func (n *node) hasRoomToLoad(f *function, is *share) bool {
	return n.free-n.reserve >= max(f.cost(is), 1)
}

// calm reports whether, with f's parameters and a replica, at most half of the memory below the
// threshold is used.
func (n *node) calm(f *function, is *share) bool {
	return n.Memory-n.free+f.cost(is) <= (n.Memory-n.reserve)/2
}
