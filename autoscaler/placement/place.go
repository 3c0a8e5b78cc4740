package placement

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// Spread is a plan.Placer that puts a new replica on the node with the fewest replicas of its
// function, so that a lost node costs little. Ties go to a node that already has the function's
// zygote, then to the node with the most free memory.
type Spread struct{}

// Place implements plan.Placer.
func (Spread) Place(s plan.Snapshot, a plan.Alloc) ([]plan.Want, error) {
	return place(s, a, &spread)
}

// FirstFit is a plan.Placer that puts a new replica on the first node, by name, with room. Nodes
// with the function's zygote go first.
type FirstFit struct{}

// Place implements plan.Placer.
func (FirstFit) Place(s plan.Snapshot, a plan.Alloc) ([]plan.Want, error) {
	return place(s, a, &named)
}

// placing is the state while the replicas of an allocation are placed. Kept replicas have their
// places from the start. New replicas are added in rounds, so that every function gets its first
// replica before any function gets its second.
type placing struct {
	*cluster
	alloc plan.Alloc
	lines []*function // of the allocation
	wants []plan.Want
	open  []int // lines that may want more
	ahead []int // lines of replicas that start ahead of need, which are placed last
	round []int // scratch
	fit   []int // scratch
}

// begin keeps what can be kept.
func begin(s *plan.Snapshot, a plan.Alloc) (*placing, error) {
	p := &placing{cluster: look(s), alloc: a, wants: make([]plan.Want, len(a)), lines: make([]*function, len(a))}
	for i, l := range a {
		f, ok := p.function(l.Function)
		if !ok {
			return nil, fmt.Errorf("function %q of the allocation: not in snapshot %d, want an allocation of the same snapshot", l.Function, s.Rev)
		}
		p.lines[i] = f
		p.wants[i] = plan.Want{Function: l.Function, Revision: f.Revision, CPUMilli: l.CPUMilli, Batch: l.Batch, Key: l.Key, Why: l.Why, Short: l.Denied, Denied: l.Denied != ""}
		p.wants[i].Slots = p.keep(f, l.Count)
		if f.Ahead() {
			p.ahead = append(p.ahead, i)
		} else {
			p.open = append(p.open, i)
		}
	}
	return p, nil
}

// rounds calls round with 0, 1, … until no line is open. It does so first for the lines that are
// needed now, and then for those that start ahead of need.
func (p *placing) rounds(round func(int)) {
	for _, p.open = range [][]int{p.open, p.ahead} {
		for n := 0; len(p.open) > 0; n++ {
			round(n)
		}
	}
}

// wanting returns the lines that want one more replica in this round. The next call overwrites the
// result. Placing ends when no line is
// open, because counts may be far larger than the room.
func (p *placing) wanting(round int) []int {
	p.open = slices.DeleteFunc(p.open, func(i int) bool { return len(p.wants[i].Slots) >= p.alloc[i].Count || p.wants[i].Short != "" })
	lines := p.round[:0]
	for _, i := range p.open {
		if len(p.wants[i].Slots) <= round {
			lines = append(lines, i)
		}
	}
	p.round = lines
	return lines
}

// add places one more replica of a line and returns its node. If it cannot, it records why, and
// returns nil.
func (p *placing) add(i int, by *order) *node {
	f, w := p.lines[i], &p.wants[i]
	n := p.best(f, by, anyLoad, func(n *node, is *share) bool { return n.fits(f, is) })
	if n == nil {
		w.Short = p.shortage(f, p.alloc[i].Count, len(w.Slots))
		return nil
	}
	w.Slots = append(w.Slots, p.take(f, n))
	return n
}

// place makes the wants of a. by orders the nodes with room.
func place(s plan.Snapshot, a plan.Alloc, by *order) ([]plan.Want, error) {
	p, err := begin(&s, a)
	if err != nil {
		return nil, err
	}
	p.rounds(func(round int) {
		for _, i := range p.wanting(round) {
			p.add(i, by)
		}
	})
	p.stay()
	return p.wants, nil
}

// kept is a replica that may be kept, and its node.
type kept struct {
	*plan.Replica
	on *node
}

// keep returns the slots of the existing replicas that f keeps, up to the given count. It prefers
// replicas on available nodes, then ready replicas, then the oldest replicas. It does not keep a
// replica whose device is unhealthy or barred to f.
func (c *cluster) keep(f *function, count int) []plan.Slot {
	have := c.have[:0]
	for i := range f.Replicas {
		r := &f.Replicas[i]
		n := c.byName[r.Node]
		if r.State != plan.Draining && r.Revision == f.Revision && n != nil && n.Unfit(r.Device) == "" && f.Barred(r.Node, r.Device) == "" {
			have = append(have, kept{r, n})
		}
	}
	c.have = have
	slices.SortFunc(have, func(x, y kept) int {
		return cmp.Or(
			prefer(x.on.Unavailable == "", y.on.Unavailable == ""),
			prefer(x.State == plan.Ready, y.State == plan.Ready),
			x.Since.Compare(y.Since),
			cmp.Compare(x.Name, y.Name),
		)
	})
	have = have[:min(len(have), count)]
	if len(have) == 0 {
		return nil
	}
	if len(c.slots) < len(have) {
		c.slots = make([]plan.Slot, max(len(have), slotsAtATime))
	}
	var slots []plan.Slot
	slots, c.slots = c.slots[:0:len(have)], c.slots[len(have):]
	for _, r := range have {
		slots = append(slots, plan.Slot{Replica: r.Name, Node: r.Node, Device: r.Device})
		c.keeps(f, r.on)
	}
	return slots
}

// slotsAtATime is for how many slots memory is made at a time.
const slotsAtATime = 128

// take takes a node for one more replica of f.
func (c *cluster) take(f *function, n *node) plan.Slot {
	slot := plan.Slot{Node: n.Name, Device: strings.Join(n.pick(f, c.on(f, n)), ",")}
	c.occupy(f, n, slot)
	return slot
}

// shortage returns why a replica of f has no place, with sizes.
func (c *cluster) shortage(f *function, want, placed int) string {
	fit, most, name := 0, int64(0), ""
	for i := range c.nodes {
		n := &c.nodes[i]
		if n.closed {
			continue
		}
		fit++
		if free := n.room(f, c.on(f, n)); name == "" || free > most || free == most && n.Name < name {
			most, name = free, n.Name
		}
	}
	if len(c.nodes) == 0 {
		return fmt.Sprintf("%d of %d placed: there is no node; start `stagecoach keysmanager`", placed, want)
	}
	if fit == 0 {
		return fmt.Sprintf("%d of %d placed: none of %d nodes takes a replica%s", placed, want, len(c.nodes), c.closed())
	}
	need := plan.Size(f.cost(c.on(f, c.byName[name])))
	if f.CPUMilli > 0 {
		most, of := 0, 0
		for i := range c.nodes {
			if n := &c.nodes[i]; !n.closed && (n.cpu > most || n.cpu == most && n.CPUMilli > of) {
				most, of = n.cpu, n.CPUMilli
			}
		}
		need += fmt.Sprintf(" and %dm of a processor, of which at most %dm of %dm are not promised to others", f.CPUMilli, max(most, 0), of)
	}
	if f.GPU > 0 {
		need += fmt.Sprintf(" and %d devices with %s free each", f.GPU, plan.Size(f.DeviceMemory))
		if f.DeviceMemory == 0 {
			need = strings.TrimSuffix(need, " with 0 B free each") + " of its own"
		}
		devices, well := 0, 0
		for i := range c.nodes {
			n := &c.nodes[i]
			devices, well = devices+len(n.Devices), well+n.usableDevices()
		}
		need += fmt.Sprintf(", of %d that are there, %d of them well", devices, well)
	}
	barred := ""
	for i := range f.Bars {
		barred += "; " + f.Barred(f.Bars[i].Node, f.Bars[i].Device)
	}
	return fmt.Sprintf("%d of %d placed: one more needs %s; of %d nodes, %s has the most free memory, %s%s",
		placed, want, need, fit, name, plan.Size(max(most, 0)), barred)
}
