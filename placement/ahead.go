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
func (c *cluster) ahead(wants []plan.Want, has map[*function][]bool) []plan.Warm {
	var warm []plan.Warm
	var turns []*function
	replicas := make([]int, len(c.functions))
	for _, w := range wants {
		if f, ok := c.function(w.Function); ok && w.Key && f.zygote > 0 {
			turns, replicas[f.i] = append(turns, f), len(w.Slots)
		}
	}
	for len(turns) > 0 {
		turns = slices.DeleteFunc(turns, func(f *function) bool {
			i := c.next(f, replicas[f.i], has[f])
			if i < 0 {
				return true
			}
			n := c.nodes[i]
			if !n.of[f.i].zygote {
				n.free -= f.zygote
				n.of[f.i].zygote = true
			}
			has[f][i] = true
			warm = append(warm, plan.Warm{Function: f.Name, Node: n.Name, Warmth: plan.Host, Key: true})
			return false
		})
	}
	return warm
}

// next is the index of the node on which f, with so many replicas, is warmed next; below 0: it needs none, or there is none.
func (c *cluster) next(f *function, replicas int, has []bool) int {
	best, need, most := -1, min(replicas, f.Max-replicas), 0
	for i, n := range c.nodes {
		if has[i] && need > 0 {
			need -= n.spare(f, need)
		}
	}
	if need <= 0 {
		return -1
	}
	for i, n := range c.nodes {
		if has[i] || !n.cradles(f) {
			continue
		}
		spare := n.spare(f, need)
		if spare > 0 && (best < 0 || n.precedes(c.nodes[best], f, spare, most)) {
			best, most = i, spare
		}
	}
	return best
}

// precedes says whether f, of which so many more fit on n and on the other, is warmed on n first.
func (n *node) precedes(other *node, f *function, spare, others int) bool {
	return cmp.Or(prefer(n.of[f.i].zygote, other.of[f.i].zygote), cmp.Compare(others, spare), cmp.Compare(other.free, n.free), cmp.Compare(n.Name, other.Name)) < 0
}

// cradles says whether f's parameters, if they are not there, and a replica have room without anything giving way.
func (n *node) cradles(f *function) bool {
	return n.free-n.reserve >= max(n.cost(f), 1)
}

// spare is how many more replicas of f fit, up to most.
func (n *node) spare(f *function, most int) int {
	bytes := n.room(f) - n.cost(f)
	if n.Unavailable != "" || bytes < 0 || f.Memory == 0 && bytes == 0 {
		return 0
	}
	if f.GPU > 0 {
		most = min(most, len(n.find(f, most*f.GPU))/f.GPU)
	}
	if f.CPUMilli > 0 {
		most = min(most, n.cpu/f.CPUMilli)
	}
	if f.Memory > 0 {
		most = int(min(int64(most), bytes/f.Memory+1))
	}
	return max(most, 0)
}
