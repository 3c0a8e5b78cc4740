package placement

import (
	"cmp"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// stay keeps replicas on nodes that are being drained, for the lines that no other node has room
// for. The wants' Short says what such a replica waits for. All other replicas of these nodes get
// a slot elsewhere.
func (p *placing) stay() {
	for i := range p.wants {
		w := &p.wants[i]
		if w.Short == "" || len(w.Slots) >= p.alloc[i].Count {
			continue
		}
		stuck := p.moving(p.lines[i])
		for _, r := range stuck[:min(len(stuck), p.alloc[i].Count-len(w.Slots))] {
			w.Slots = append(w.Slots, plan.Slot{Replica: r.Name, Node: r.Node, Device: r.Device})
		}
	}
}

// moving returns the replicas of f that could be kept if nobody drained their nodes: ready ones
// first, then the oldest.
func (c *cluster) moving(f *function) (out []*plan.Replica) {
	for i := range f.Replicas {
		r := &f.Replicas[i]
		n := c.byName[r.Node]
		if n == nil || !n.Moving || n.Leaving || r.State == plan.Draining || r.Revision != f.Revision {
			continue
		}
		still := *n.Node
		still.Moving = false
		if still.Unfit(r.Device) == "" && f.Barred(r.Node, r.Device) == "" {
			out = append(out, r)
		}
	}
	slices.SortFunc(out, func(x, y *plan.Replica) int {
		return cmp.Or(prefer(x.State == plan.Ready, y.State == plan.Ready), x.Since.Compare(y.Since), cmp.Compare(x.Name, y.Name))
	})
	return out
}

// closedTold is how many nodes a shortage lists by name.
const closedTold = 3

// closed returns the first nodes that take no replicas, and why they do not.
func (c *cluster) closed() string {
	var why []string
	for _, n := range c.nodes {
		if n.Unavailable != "" && len(why) < closedTold {
			why = append(why, n.Name+": "+n.Unavailable)
		}
	}
	slices.Sort(why)
	return "; " + strings.Join(why, "; ")
}
