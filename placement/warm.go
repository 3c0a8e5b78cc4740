package placement

import (
	"cmp"
	"slices"

	"github.com/stagecoach-serving/stagecoach/plan"
)

// KeyStages is a plan.Warmer. A function stays warm in host memory wherever it has replicas or gets them; a key stage's zygote
// is evicted last (QUART, section 6.1; see [Key]), and what the corrector calls a key stage is loaded ahead of need on further nodes
// that it may grow on. A function that may sleep keeps one zygote while it does, if there is memory, so that
// waking is a fork.
type KeyStages struct{}

// Warm implements plan.Warmer.
func (KeyStages) Warm(s plan.Snapshot, wants []plan.Want) ([]plan.Warm, error) {
	c := look(&s)
	slots := 0
	for i := range wants {
		slots += len(wants[i].Slots)
	}
	warm := slices.Grow([]plan.Warm(nil), slots)
	has := map[*function][]bool{} // by function that ahead asks for, and node: that it is in warm
	var on []string               // nodes
	for _, w := range wants {     // memory that new replicas will take is not there for sleepers
		f, ok := c.function(w.Function)
		if !ok {
			continue
		}
		on = on[:0]
		for _, slot := range w.Slots {
			on = append(on, slot.Node)
			if n := c.byName[slot.Node]; n != nil && slot.Replica == "" {
				n.occupy(f, slot)
			}
		}
		for i := range f.Replicas {
			if node := f.Replicas[i].Node; c.byName[node] != nil {
				on = append(on, node)
			}
		}
		key := Key(f.Function, w)
		slices.Sort(on)
		on = slices.Compact(on)
		if w.Key {
			has[f] = c.among(on)
		}
		for _, name := range on {
			warm = append(warm, plan.Warm{Function: f.Name, Node: name, Warmth: plan.Host, Key: key})
		}
	}
	for _, w := range wants {
		f, ok := c.function(w.Function)
		if !ok || !f.Zero || len(w.Slots) > 0 || len(f.Replicas) > 0 {
			continue
		}
		if n := c.bed(f); n != nil {
			if !n.of[f.i].zygote {
				n.free -= n.cost(f)
			}
			warm = append(warm, plan.Warm{Function: f.Name, Node: n.Name, Warmth: plan.Host, Key: w.Key})
		}
	}
	warm = append(warm, c.ahead(wants, has)...)
	slices.SortFunc(warm, func(x, y plan.Warm) int {
		return cmp.Or(cmp.Compare(x.Function, y.Function), cmp.Compare(x.Node, y.Node))
	})
	return warm, nil
}

// bed returns the node that keeps a sleeping function's zygote: one that has it, else the one with the most free memory
// that has room for it and a replica without anything giving way; nil: none has.
func (c *cluster) bed(f *function) *node {
	var best *node
	for _, n := range c.nodes {
		if n.Unavailable != "" || !n.of[f.i].zygote && !n.cradles(f) {
			continue
		}
		if best == nil || cmp.Or(prefer(n.of[f.i].zygote, best.of[f.i].zygote), cmp.Compare(best.free, n.free), cmp.Compare(n.Name, best.Name)) < 0 {
			best = n
		}
	}
	return best
}

// among says of each node whether it is one of those.
func (c *cluster) among(names []string) []bool {
	out := make([]bool, len(c.nodes))
	for i, n := range c.nodes {
		out[i] = slices.Contains(names, n.Name)
	}
	return out
}
