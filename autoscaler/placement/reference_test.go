package placement_test

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// The reference is the plain form of this package: a table of all nodes and functions, and a scan
// of all nodes for each replica. TestPlacementIsThatOfTheReference compares the two.

type cluster struct {
	nodes     []*node // in the snapshot's order
	byName    map[string]*node
	functions []function // in the snapshot's order
	finder    plan.Finder
	have      []kept      // scratch
	slots     []plan.Slot // memory that is not used yet
}

type function struct {
	*plan.Function
	i        int     // its index there
	zygote   int64   // bytes of its parameters; 0: unknown
	homes    []*node // nodes that have one or get one
	replicas int32   // with a node, without draining ones
	more     int     // number of further replicas for which its parameters are kept
	ahead    int     // of them, those that have a node
	urgent   bool    // its next replica should start where its parameters are
}

type node struct {
	*plan.Node
	free    int64    // bytes; if negative, so many must be evicted
	idle    int64    // bytes of zygotes that may be evicted
	reserve int64    // bytes that must stay free of zygotes
	cpu     int      // thousandths of a core that no replica is promised
	load    int      // replicas of key stages
	loading bool     // it reads parameters from its disk, or will in this plan
	of      []share  // by function
	idles   []int64  // bytes of idle, by function; nil: none
	devices []device // in the snapshot's order
	rank    int      // by name; set for a list
	// By function and device, because two replicas of a function on one device count as one server.
	taken []bool
	able  []int // scratch
}

type share struct {
	replicas int32 // draining ones not counted
	zygote   bool  // it has one, or will
	listed   bool  // it is among what the plan keeps warm
	warm     warmth
}

type device struct {
	*plan.Device
	free     int64 // bytes
	occupied bool  // a replica has it, or will
}

type warmth uint8

const (
	coming warmth = iota + 1 // or there: what starts from them may be waiting for them
	there
)

func look(s *plan.Snapshot) *cluster {
	c := &cluster{
		nodes: make([]*node, len(s.Nodes)), byName: make(map[string]*node, len(s.Nodes)), functions: make([]function, len(s.Functions)), finder: s.Finder(),
	}
	for i := range s.Functions {
		c.functions[i] = function{Function: &s.Functions[i], i: i, zygote: s.Functions[i].Parameters}
	}
	all := make([]node, len(s.Nodes))
	shares := make([]share, len(s.Nodes)*len(s.Functions))
	for i := range s.Nodes {
		n := &all[i]
		n.of, shares = shares[:len(s.Functions):len(s.Functions)], shares[len(s.Functions):]
		c.add(n, &s.Nodes[i])
		c.nodes[i], c.byName[n.Name] = n, n
	}
	for i := range c.functions {
		f := &c.functions[i]
		for k := range f.Replicas {
			r := &f.Replicas[k]
			if n := c.byName[r.Node]; n != nil {
				n.has(f, r)
			}
		}
	}
	return c
}

func (c *cluster) function(name string) (*function, bool) {
	i, ok := c.finder.Index(name)
	if !ok {
		return nil, false
	}
	return &c.functions[i], true
}

func (c *cluster) add(n *node, p *plan.Node) {
	*n = node{Node: p, free: p.Memory - p.MemoryUsed, cpu: p.CPUMilli, of: n.of}
	if p.Threshold > 0 {
		n.reserve = p.Memory - p.Threshold
	}
	if len(p.Devices) > 0 {
		n.devices, n.taken = make([]device, len(p.Devices)), make([]bool, len(c.functions)*len(p.Devices))
	}
	for k := range p.Devices {
		d := &p.Devices[k]
		n.devices[k] = device{Device: d, free: d.Memory - d.MemoryUsed}
	}
	for _, z := range p.Zygotes {
		f, ok := c.function(z.Function)
		if z.Idle {
			n.idle += z.Bytes
		}
		if !ok {
			continue
		}
		f.zygote = max(f.zygote, z.Bytes)
		is := &n.of[f.i]
		is.zygote, is.warm = true, max(is.warm, coming)
		if z.Idle {
			is.warm = there
			if n.idles == nil {
				n.idles = make([]int64, len(c.functions))
			}
			n.idles[f.i] += z.Bytes
		}
	}
}

func (n *node) has(f *function, r *plan.Replica) {
	if is := &n.of[f.i]; is.zygote && r.State != plan.Starting { // it came from it
		is.warm = there
	}
	if r.Revision == f.Revision && r.State != plan.Draining { // others make room
		n.cpu -= f.CPUMilli
	}
	for k := range n.devices {
		if (plan.Slot{Device: r.Device}).On(n.devices[k].ID) {
			n.use(f, k)
		}
	}
}

func (n *node) use(f *function, k int) {
	n.taken[f.i*len(n.devices)+k], n.devices[k].occupied = true, true
}

func (n *node) occupy(f *function, slot plan.Slot) {
	n.free -= n.cost(f)
	n.cpu -= f.CPUMilli
	if n.idles != nil {
		n.idle -= n.idles[f.i]
		n.idles[f.i] = 0
	}
	n.of[f.i].zygote = true
	n.keeps(f)
	for k := range n.devices {
		if d := &n.devices[k]; slot.On(d.ID) {
			n.use(f, k)
			d.free -= f.DeviceMemory
			if f.DeviceMemory == 0 {
				d.free = 0
			}
		}
	}
}

func (n *node) keeps(f *function) {
	n.of[f.i].replicas++
	f.replicas++
}

func (n *node) cost(f *function) int64 {
	if n.of[f.i].zygote {
		return f.Memory
	}
	return f.Memory + f.zygote
}

func (n *node) room(f *function) int64 {
	bytes := n.free + n.idle
	if n.idles != nil {
		bytes -= n.idles[f.i]
	}
	if f.zygote > 0 && !n.of[f.i].zygote {
		bytes -= n.reserve
	}
	return bytes
}

func (n *node) fits(f *function) bool {
	return n.Unavailable == "" && n.room(f) >= max(n.cost(f), 1) && len(n.find(f, f.GPU)) == f.GPU &&
		(f.CPUMilli == 0 || f.CPUMilli <= n.cpu)
}

func (n *node) pick(f *function) []string {
	able := n.find(f, len(n.devices))
	slices.SortFunc(able, func(x, y int) int {
		return cmp.Or(cmp.Compare(n.devices[y].free, n.devices[x].free), cmp.Compare(n.devices[x].ID, n.devices[y].ID))
	})
	var ids []string
	for _, k := range able[:min(len(able), f.GPU)] {
		ids = append(ids, n.devices[k].ID)
	}
	slices.Sort(ids)
	return ids
}

func (n *node) find(f *function, most int) []int {
	n.able = n.able[:0]
	whole := f.DeviceMemory == 0
	for k := range n.devices {
		if f.GPU == 0 || len(n.able) >= most {
			break
		}
		d := &n.devices[k]
		if d.Unavailable == "" && d.free >= max(plan.DeviceNeed(f.DeviceMemory, d.Memory), 1) && (!whole || !d.occupied) &&
			!n.taken[f.i*len(n.devices)+k] && f.Barred(n.Name, d.ID) == "" {
			n.able = append(n.able, k)
		}
	}
	return n.able
}

func (n *node) usableDevices() (count int) {
	for k := range n.devices {
		if n.devices[k].Unavailable == "" {
			count++
		}
	}
	return count
}

type Spread struct{}

func (Spread) Place(s plan.Snapshot, a plan.Alloc) ([]plan.Want, error) {
	return place(s, a, func(f *function, x, y *node) int {
		return cmp.Or(
			cmp.Compare(x.of[f.i].replicas, y.of[f.i].replicas),
			prefer(x.of[f.i].zygote, y.of[f.i].zygote),
			cmp.Compare(y.free, x.free),
			cmp.Compare(x.Name, y.Name),
		)
	})
}

type FirstFit struct{}

func (FirstFit) Place(s plan.Snapshot, a plan.Alloc) ([]plan.Want, error) {
	return place(s, a, func(f *function, x, y *node) int {
		return cmp.Or(prefer(x.of[f.i].zygote, y.of[f.i].zygote), cmp.Compare(x.Name, y.Name))
	})
}

func prefer(x, y bool) int {
	switch {
	case x == y:
		return 0
	case x:
		return -1
	}
	return 1
}

type placing struct {
	*cluster
	alloc plan.Alloc
	lines []*function // of the allocation
	wants []plan.Want
	open  []int // lines that may want more
	ahead []int // lines of replicas that start ahead of need, which are placed last
}

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

func (p *placing) rounds(round func(int)) {
	for _, p.open = range [][]int{p.open, p.ahead} {
		for n := 0; len(p.open) > 0; n++ {
			round(n)
		}
	}
}

func (p *placing) wanting(round int) []int {
	p.open = slices.DeleteFunc(p.open, func(i int) bool { return len(p.wants[i].Slots) >= p.alloc[i].Count || p.wants[i].Short != "" })
	var lines []int
	for _, i := range p.open {
		if len(p.wants[i].Slots) <= round {
			lines = append(lines, i)
		}
	}
	return lines
}

func (p *placing) add(i int, better func(*function, *node, *node) int) (plan.Slot, bool) {
	f, w := p.lines[i], &p.wants[i]
	slot, ok := p.take(f, better, func(*node) bool { return true })
	if !ok {
		w.Short = p.shortage(f, p.alloc[i].Count, len(w.Slots))
		return slot, false
	}
	w.Slots = append(w.Slots, slot)
	return slot, true
}

func place(s plan.Snapshot, a plan.Alloc, better func(*function, *node, *node) int) ([]plan.Want, error) {
	p, err := begin(&s, a)
	if err != nil {
		return nil, err
	}
	p.rounds(func(round int) {
		for _, i := range p.wanting(round) {
			p.add(i, better)
		}
	})
	return p.wants, nil
}

type kept struct {
	*plan.Replica
	on *node
}

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
		r.on.keeps(f)
	}
	return slots
}

const slotsAtATime = 128

func (c *cluster) take(f *function, better func(*function, *node, *node) int, may func(*node) bool) (plan.Slot, bool) {
	var best *node
	for _, n := range c.nodes { // any order will do, because better is a total order
		if may(n) && n.fits(f) && (best == nil || better(f, n, best) < 0) {
			best = n
		}
	}
	if best == nil {
		return plan.Slot{}, false
	}
	slot := plan.Slot{Node: best.Name, Device: strings.Join(best.pick(f), ",")}
	best.occupy(f, slot)
	return slot, true
}

func (c *cluster) shortage(f *function, want, placed int) string {
	fit, most, name := 0, int64(0), ""
	var closed []string
	for _, n := range c.nodes {
		if n.Unavailable != "" && len(closed) < 3 {
			closed = append(closed, n.Name+": "+n.Unavailable)
		}
		if n.Unavailable != "" {
			continue
		}
		fit++
		if free := n.room(f); name == "" || free > most || free == most && n.Name < name {
			most, name = free, n.Name
		}
	}
	if len(c.nodes) == 0 {
		return fmt.Sprintf("%d of %d placed: there is no node; start `stagecoach keysmanager`", placed, want)
	}
	if fit == 0 {
		slices.Sort(closed)
		return fmt.Sprintf("%d of %d placed: none of %d nodes takes a replica; %s", placed, want, len(c.nodes), strings.Join(closed, "; "))
	}
	need := plan.Size(c.byName[name].cost(f))
	if f.CPUMilli > 0 {
		most, of := 0, 0
		for _, n := range c.nodes {
			if n.Unavailable == "" && (n.cpu > most || n.cpu == most && n.CPUMilli > of) {
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
		for _, n := range c.nodes {
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
