package placement

import (
	"cmp"
	"slices"

	"github.com/stagecoach-serving/stagecoach/plan"
)

// ahead lists the nodes beside those of its replicas on which a key stage's parameters are kept, so that what it grows by next forks
// there, or in a child that is parked: as many as have room, with those that are warm already, for as many more replicas as it has, or as
// it may still have. One that has the parameters goes first, then the one with the most room. They are loaded where they and a replica fit
// below the threshold, so that nothing gives way to them, and are ordinary zygotes again where memory has become too short for that.
//
// Key stages take turns, so that none has all of its copies before another has one.
func ahead(s *plan.Snapshot, wants []plan.Want, all map[string]*node, sizes map[string]int64, has map[string]map[string]bool) []plan.Warm {
	var warm []plan.Warm
	var turns []*plan.Function
	replicas := map[string]int{}
	finder := s.Finder()
	for _, w := range wants {
		if f, ok := finder.Function(w.Function); ok && w.Key && sizes[f.Name] > 0 {
			turns, replicas[f.Name] = append(turns, f), len(w.Slots)
		}
	}
	for len(turns) > 0 {
		turns = slices.DeleteFunc(turns, func(f *plan.Function) bool {
			n := next(s, f, replicas[f.Name], all, sizes[f.Name], has[f.Name])
			if n == nil {
				return true
			}
			if !n.zygotes[f.Name] {
				n.free -= sizes[f.Name]
				n.zygotes[f.Name] = true
			}
			has[f.Name][n.Name] = true
			warm = append(warm, plan.Warm{Function: f.Name, Node: n.Name, Warmth: plan.Host, Key: true})
			return false
		})
	}
	return warm
}

// next is the node on which f, with so many replicas, is warmed next; nil: it needs none, or there is none.
func next(s *plan.Snapshot, f *plan.Function, replicas int, all map[string]*node, zygote int64, has map[string]bool) *node {
	var best *node
	need, most := min(replicas, f.Max-replicas), 0
	for name := range has { // a sum, whatever the order
		if n := all[name]; n != nil && need > 0 {
			need -= n.spare(f, zygote, need)
		}
	}
	if need <= 0 {
		return nil
	}
	for i := range s.Nodes {
		n := all[s.Nodes[i].Name]
		if has[n.Name] || !n.cradles(f, zygote) {
			continue
		}
		spare := n.spare(f, zygote, need)
		if spare > 0 && (best == nil || cmp.Or(
			prefer(n.zygotes[f.Name], best.zygotes[f.Name]), cmp.Compare(most, spare), cmp.Compare(best.free, n.free), cmp.Compare(n.Name, best.Name)) < 0) {
			best, most = n, spare
		}
	}
	return best
}

// cradles says whether f's parameters, if they are not there, and a replica have room without anything giving way.
func (n *node) cradles(f *plan.Function, zygote int64) bool {
	return n.free-n.reserve >= max(n.cost(f, zygote), 1)
}

// spare is how many more replicas of f fit, up to most.
func (n *node) spare(f *plan.Function, zygote int64, most int) int {
	bytes := n.room(f, zygote) - n.cost(f, zygote)
	if n.Unavailable != "" || bytes < 0 || f.Memory == 0 && bytes == 0 {
		return 0
	}
	if f.GPU > 0 {
		most = min(most, len(n.able(f, most*f.GPU))/f.GPU)
	}
	if f.CPUMilli > 0 {
		most = min(most, n.cpu/f.CPUMilli)
	}
	if f.Memory > 0 {
		most = int(min(int64(most), bytes/f.Memory+1))
	}
	return max(most, 0)
}
