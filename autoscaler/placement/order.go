package placement

import (
	"cmp"
	"math"
)

// order says which of two nodes goes first for the next replica of a function. It is total.
type order struct {
	// blank reports whether x goes before y, if the function has nothing on either.
	blank func(x, y *node) bool
	// any compares two nodes by what the function has on them.
	any func(f *function, x, y *share) int
}

// anyLoad is a bound on a node's load that all nodes keep.
const anyLoad = math.MaxInt

// best returns the first of the nodes that may have a replica of f, and whose load is below a
// bound. It returns nil if there is none. A function has something on few nodes, so most
// comparisons are the short ones.
func (c *cluster) best(f *function, by *order, load int, may func(*node, *share) bool) *node {
	c.turn(f)
	var best *node
	if by == &disperse && c.byLoad != nil {
		best = c.leastLoaded(load, may)
	} else {
		for i, has := range c.at {
			n := &c.nodes[i]
			if has == 0 && n.load < load && (best == nil || by.blank(n, best)) && may(n, &nothing) {
				best = n
			}
		}
	}
	most := &share{node: best}
	for k := range f.on {
		if is := &f.on[k]; is.node.load < load && (most.node == nil || by.any(f, is, most) < 0) && may(is.node, is) {
			most = is
		}
	}
	return most.node
}

// manyNodes is how many nodes are worth an index.
const manyNodes = 32

// loads is an index of nodes by their load: for each load, the first of the nodes that have it.
// Nil: the nodes are too few for an index.
type loads []*node

// index returns an index of nodes.
func index(nodes []node) (l loads) {
	if len(nodes) <= manyNodes {
		return nil
	}
	l = make(loads, 1)
	for i := range nodes {
		l.link(&nodes[i])
	}
	return l
}

// carry changes a node's load.
func (l *loads) carry(n *node, by int) {
	if *l == nil {
		n.load += by
		return
	}
	if n.previous != nil {
		n.previous.next = n.next
	} else {
		(*l)[n.load] = n.next
	}
	if n.next != nil {
		n.next.previous = n.previous
	}
	n.load += by
	l.link(n)
}

// link adds a node to the list of its load.
func (l *loads) link(n *node) {
	for n.load >= len(*l) {
		*l = append(*l, nil)
	}
	n.previous, n.next = nil, (*l)[n.load]
	if n.next != nil {
		n.next.previous = n
	}
	(*l)[n.load] = n
}

// leastLoaded returns the first node in the order disperse of those where the function in focus has
// nothing: see best.
func (c *cluster) leastLoaded(load int, may func(*node, *share) bool) (best *node) {
	for at := 0; at < min(load, len(c.byLoad)) && best == nil; at++ {
		for n := c.byLoad[at]; n != nil; n = n.next {
			if c.at[n.i] == 0 && (best == nil || moreFree(n, best)) && may(n, &nothing) {
				best = n
			}
		}
	}
	return best
}

// spread prefers nodes with few replicas of the function.
var spread = order{
	blank: moreFree,
	any: func(_ *function, x, y *share) int {
		return cmp.Or(
			cmp.Compare(x.replicas, y.replicas),
			prefer(x.zygote, y.zygote),
			cmp.Compare(y.node.free, x.node.free),
			cmp.Compare(x.node.rank, y.node.rank),
		)
	},
}

// pack prefers nodes with few replicas of the function, and of these the fullest.
var pack = order{
	blank: func(x, y *node) bool {
		if x.free != y.free {
			return x.free < y.free
		}
		return x.rank < y.rank
	},
	any: func(_ *function, x, y *share) int {
		return cmp.Or(
			cmp.Compare(x.replicas, y.replicas),
			prefer(x.zygote, y.zygote),
			cmp.Compare(x.node.free, y.node.free),
			cmp.Compare(x.node.rank, y.node.rank),
		)
	},
}

// disperse prefers nodes with few replicas of key stages.
var disperse = order{
	blank: func(x, y *node) bool {
		if x.load != y.load {
			return x.load < y.load
		}
		return moreFree(x, y)
	},
	any: func(f *function, x, y *share) int {
		return cmp.Or(
			warmer(f, x, y),
			cmp.Compare(x.node.load, y.node.load),
			prefer(x.zygote, y.zygote),
			cmp.Compare(x.replicas, y.replicas),
			cmp.Compare(y.node.free, x.node.free),
			cmp.Compare(x.node.rank, y.node.rank),
		)
	},
}

// named prefers the first nodes by name.
var named = order{
	blank: func(x, y *node) bool { return x.rank < y.rank },
	any: func(_ *function, x, y *share) int {
		return cmp.Or(prefer(x.zygote, y.zygote), cmp.Compare(x.node.rank, y.node.rank))
	},
}

// roomy prefers nodes with the function's parameters, and then those with the most free memory.
var roomy = order{
	blank: moreFree,
	any: func(_ *function, x, y *share) int {
		return cmp.Or(prefer(x.zygote, y.zygote), cmp.Compare(y.node.free, x.node.free), cmp.Compare(x.node.rank, y.node.rank))
	},
}

func moreFree(x, y *node) bool {
	if x.free != y.free {
		return x.free > y.free
	}
	return x.rank < y.rank
}

// prefer compares two conditions. The true one goes first.
func prefer(x, y bool) int {
	switch {
	case x == y:
		return 0
	case x:
		return -1
	}
	return 1
}
