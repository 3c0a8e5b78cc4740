package placement

import (
	"slices"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// KeyStages is a plan.Warmer after QUART, section 6.1. It keeps parameters warm in host memory:
//
//   - for each function, on every node where it has or gets replicas
//   - for the corrector's key stages, also on the nodes where they would grow next, and for other
//     functions too if memory is plentiful: see [cluster.ahead]
//   - for each function that sleeps, on one node if there is memory, so that waking is a fork
//
// It marks the zygotes of key stages, which are evicted last: see [Key].
type KeyStages struct{}

// Warm implements plan.Warmer.
func (KeyStages) Warm(s plan.Snapshot, wants []plan.Want) ([]plan.Warm, error) {
	c := look(&s)
	l := c.list(wants)
	for _, w := range wants { // memory for new replicas is not available for sleeping functions
		f, ok := c.function(w.Function)
		if !ok {
			continue
		}
		key := Key(f.Function, w)
		for _, slot := range w.Slots {
			n := c.byName[slot.Node]
			if n == nil {
				continue
			}
			if slot.Replica == "" {
				c.occupy(f, n, slot)
			} else {
				c.keeps(f, n)
			}
			c.byLoad.carry(n, 1)
			l.add(f, n, key)
		}
		for i := range f.Replicas {
			if n := c.byName[f.Replicas[i].Node]; n != nil {
				l.add(f, n, key)
			}
		}
	}
	for _, w := range wants {
		f, ok := c.function(w.Function)
		if !ok || !f.Zero || len(w.Slots) > 0 || len(f.Replicas) > 0 {
			continue
		}
		if n := c.sleepNode(f); n != nil {
			if is := c.on(f, n); !is.zygote {
				n.free -= f.cost(is)
			}
			l.add(f, n, w.Key)
		}
	}
	c.ahead(wants, l)
	return l.warm(), nil
}

// list is the list of parameters to keep warm: for each entry the positions of its function and
// node in the plan's order, and whether it is a key stage's.
type list struct {
	*cluster
	ranked  []*node // by name
	entries []uint64
}

// list returns an empty list with room for the given wants.
func (c *cluster) list(wants []plan.Want) *list {
	l := &list{cluster: c, ranked: make([]*node, len(c.nodes))}
	for i := range c.nodes {
		l.ranked[c.nodes[i].rank] = &c.nodes[i]
	}
	slots := 0
	for i := range wants {
		slots += len(wants[i].Slots)
	}
	l.entries = make([]uint64, 0, 2*slots)
	return l
}

// add adds an entry unless the list has it.
func (l *list) add(f *function, n *node, key bool) {
	is := l.give(f, n)
	if is.listed || n.Moving { // a drained node keeps nothing
		return
	}
	is.listed = true
	e := uint64(f.i)<<32 | uint64(n.rank)<<1
	if key {
		e |= 1
	}
	l.entries = append(l.entries, e)
}

// warm returns the list in the form of a plan.
func (l *list) warm() []plan.Warm {
	slices.Sort(l.entries)
	warm := make([]plan.Warm, len(l.entries))
	for i, e := range l.entries {
		warm[i] = plan.Warm{Function: l.functions[e>>32].Name, Node: l.ranked[uint32(e)>>1].Name, Warmth: plan.Host, Key: e&1 != 0}
	}
	return warm
}

// sleepNode returns the node that keeps the zygote of the sleeping function f, or nil if no node
// can. It prefers a node that already has the zygote. Any other node must have room for the zygote
// and a replica without evictions. Among equals, it takes the node with the most free memory.
func (c *cluster) sleepNode(f *function) *node {
	return c.best(f, &roomy, anyLoad, func(n *node, is *share) bool { return !n.closed && (is.zygote || n.hasRoomToLoad(f, is)) })
}
