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
	all := nodes(&s)
	sizes := zygoteSizes(&s)
	slots := 0
	for i := range wants {
		slots += len(wants[i].Slots)
	}
	warm := slices.Grow([]plan.Warm(nil), slots)
	has := map[string]map[string]bool{} // nodes of warm, by function, of those that ahead asks for
	var on []string                     // nodes
	finder := s.Finder()
	for _, w := range wants { // memory that new replicas will take is not there for sleepers
		f, ok := finder.Function(w.Function)
		if !ok {
			continue
		}
		on = on[:0]
		for _, slot := range w.Slots {
			on = append(on, slot.Node)
			if n := all[slot.Node]; n != nil && slot.Replica == "" {
				n.occupy(f, sizes[f.Name], slot.Devices())
			}
		}
		for i := range f.Replicas {
			if node := f.Replicas[i].Node; all[node] != nil {
				on = append(on, node)
			}
		}
		key := Key(f, w)
		slices.Sort(on)
		on = slices.Compact(on)
		if w.Key {
			has[f.Name] = make(map[string]bool, len(on))
		}
		for _, name := range on {
			if w.Key {
				has[f.Name][name] = true
			}
			warm = append(warm, plan.Warm{Function: f.Name, Node: name, Warmth: plan.Host, Key: key})
		}
	}
	for _, w := range wants {
		f, ok := finder.Function(w.Function)
		if !ok || !f.Zero || len(w.Slots) > 0 || len(f.Replicas) > 0 {
			continue
		}
		if n := bed(f, sizes[f.Name], all); n != nil {
			if !n.zygotes[f.Name] {
				n.free -= n.cost(f, sizes[f.Name])
			}
			warm = append(warm, plan.Warm{Function: f.Name, Node: n.Name, Warmth: plan.Host, Key: w.Key})
		}
	}
	warm = append(warm, ahead(&s, wants, all, sizes, has)...)
	slices.SortFunc(warm, func(x, y plan.Warm) int {
		return cmp.Or(cmp.Compare(x.Function, y.Function), cmp.Compare(x.Node, y.Node))
	})
	return warm, nil
}

// bed returns the node that keeps a sleeping function's zygote: one that has it, else the one with the most free memory
// that has room for it and a replica without anything giving way; nil: none has.
func bed(f *plan.Function, zygote int64, all map[string]*node) *node {
	var best *node
	for _, n := range all {
		if n.Unavailable != "" || !n.zygotes[f.Name] && !n.cradles(f, zygote) {
			continue
		}
		if best == nil || cmp.Or(prefer(n.zygotes[f.Name], best.zygotes[f.Name]), cmp.Compare(best.free, n.free), cmp.Compare(n.Name, best.Name)) < 0 {
			best = n
		}
	}
	return best
}
