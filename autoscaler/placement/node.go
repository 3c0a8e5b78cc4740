package placement

import (
	"cmp"
	"slices"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// cluster is the working state for a snapshot while a plan is made. What functions have on nodes is
// stored per function, because most functions are on few nodes. A table of all functions and nodes
// would be the largest part of a plan's memory.
type cluster struct {
	nodes     []node // in the snapshot's order
	byName    map[string]*node
	functions []function // in the snapshot's order
	finder    plan.Finder
	have      []kept      // scratch
	slots     []plan.Slot // memory that is not used yet
	// By node, for the function in focus: 1 + the index in function.on; 0: it has nothing there.
	at     []int32
	focus  *function
	byLoad loads // changes the nodes' loads
}

// function is one of the snapshot.
type function struct {
	*plan.Function
	i        int     // its index there
	zygote   int64   // bytes of its parameters; 0: unknown
	on       []share // one per node where it has or gets something
	replicas int32   // with a node, without draining ones
	more     int     // number of further replicas for which its parameters are kept
	ahead    int     // of them, those that have a node
	urgent   bool    // its next replica should start where its parameters are
}

// node is a node while a plan is made.
type node struct {
	*plan.Node
	i       int      // its index in the snapshot
	rank    int      // by name
	load    int      // replicas of key stages; changed by loads.carry
	free    int64    // bytes; if negative, so many must be evicted
	idle    int64    // bytes of zygotes that may be evicted
	reserve int64    // bytes that must stay free of zygotes
	cpu     int      // thousandths of a core that no replica is promised
	closed  bool     // it takes no new replicas
	loading bool     // it reads parameters from its disk, or will in this plan
	devices []device // in the snapshot's order

	next, previous *node // of the same load
}

// share is what a function has on a node.
type share struct {
	node     *node
	replicas int32 // draining ones not counted
	zygote   bool  // it has one, or will
	listed   bool  // it is among what the plan keeps warm
	warm     warmth
	idle     int64 // bytes of its idle zygotes
	// Indices of the devices that its replicas use. Two replicas of a function on one device count as
	// one server.
	taken []int
}

// nothing is the share of a function on a node where it has nothing.
var nothing share

// device is one of a node.
type device struct {
	*plan.Device
	free     int64 // bytes
	occupied bool  // a replica has it, or will
}

// warmth is how far a function's parameters are loaded on a node, apart from what the plan adds.
type warmth uint8

// The zero value: they are not.
const (
	coming warmth = iota + 1 // or there: what starts from them may be waiting for them
	there
)

// look prepares a snapshot.
func look(s *plan.Snapshot) *cluster {
	c := &cluster{
		nodes: make([]node, len(s.Nodes)), byName: make(map[string]*node, len(s.Nodes)), functions: make([]function, len(s.Functions)),
		finder: s.Finder(), at: make([]int32, len(s.Nodes)),
	}
	for i := range s.Functions {
		c.functions[i] = function{Function: &s.Functions[i], i: i, zygote: s.Functions[i].Parameters}
	}
	c.reserve(s)
	for i := range s.Nodes {
		n := &c.nodes[i]
		c.add(n, &s.Nodes[i])
		n.i, c.byName[n.Name] = i, n
	}
	c.sort()
	c.byLoad = index(c.nodes)
	for i := range c.functions {
		f := &c.functions[i]
		for k := range f.Replicas {
			r := &f.Replicas[k]
			if n := c.byName[r.Node]; n != nil {
				c.has(f, n, r)
			}
		}
	}
	return c
}

// spareShares is for how many new replicas of a function look makes room.
const spareShares = 4

// reserve makes room for what the functions have and may get.
func (c *cluster) reserve(s *plan.Snapshot) {
	sizes, all := make([]int, len(c.functions)), 0
	for i := range s.Nodes {
		for k := range s.Nodes[i].Zygotes {
			if f, ok := c.function(s.Nodes[i].Zygotes[k].Function); ok {
				sizes[f.i]++
			}
		}
	}
	for i := range sizes {
		sizes[i] = min(sizes[i]+max(len(s.Functions[i].Replicas), spareShares), len(s.Nodes))
		all += sizes[i]
	}
	shares := make([]share, all)
	for i, size := range sizes {
		c.functions[i].on, shares = shares[:0:size], shares[size:]
	}
}

// sort ranks the nodes by name. Nodes of one name keep their order.
func (c *cluster) sort() {
	order := make([]*node, len(c.nodes))
	for i := range c.nodes {
		order[i] = &c.nodes[i]
	}
	byName := func(x, y *node) int { return cmp.Compare(x.Name, y.Name) }
	if !slices.IsSortedFunc(order, byName) {
		slices.SortStableFunc(order, byName)
	}
	for i, n := range order {
		n.rank = i
	}
}

func (c *cluster) function(name string) (*function, bool) {
	i, ok := c.finder.Index(name)
	if !ok {
		return nil, false
	}
	return &c.functions[i], true
}

// add fills in a node and its zygotes. Nodes are added in order.
func (c *cluster) add(n *node, p *plan.Node) {
	*n = node{Node: p, free: p.Memory - p.MemoryUsed, cpu: p.CPUMilli, closed: p.Unavailable != ""}
	if p.Threshold > 0 {
		n.reserve = p.Memory - p.Threshold
	}
	if len(p.Devices) > 0 {
		n.devices = make([]device, len(p.Devices))
	}
	for k := range p.Devices {
		d := &p.Devices[k]
		n.devices[k] = device{Device: d, free: d.Memory - d.MemoryUsed}
	}
	for k := range p.Zygotes {
		z := &p.Zygotes[k]
		f, ok := c.function(z.Function)
		if z.Idle {
			n.idle += z.Bytes
		}
		if !ok {
			continue
		}
		f.zygote = max(f.zygote, z.Bytes)
		if len(f.on) == 0 || f.on[len(f.on)-1].node != n {
			f.on = append(f.on, share{node: n})
		}
		is := &f.on[len(f.on)-1]
		is.zygote, is.warm = true, max(is.warm, coming)
		if z.Idle {
			is.warm = there
			is.idle += z.Bytes
		}
	}
}

// turn makes f the function that c.at is about.
func (c *cluster) turn(f *function) {
	if c.focus == f {
		return
	}
	if c.focus != nil {
		for k := range c.focus.on {
			c.at[c.focus.on[k].node.i] = 0
		}
	}
	for k := range f.on {
		c.at[f.on[k].node.i] = int32(k + 1)
	}
	c.focus = f
}

// on returns what f has on n. The caller must not change it.
func (c *cluster) on(f *function, n *node) *share {
	c.turn(f)
	if k := c.at[n.i]; k > 0 {
		return &f.on[k-1]
	}
	return &nothing
}

// give returns what f has on n, to change it. The pointer is valid until the next call.
func (c *cluster) give(f *function, n *node) *share {
	c.turn(f)
	if c.at[n.i] == 0 {
		f.on = append(f.on, share{node: n})
		c.at[n.i] = int32(len(f.on))
	}
	return &f.on[c.at[n.i]-1]
}

// has counts an existing replica.
func (c *cluster) has(f *function, n *node, r *plan.Replica) {
	if is := c.on(f, n); is.zygote && r.State != plan.Starting { // it came from it
		is.warm = there
	}
	if r.Revision == f.Revision && r.State != plan.Draining { // others make room
		n.cpu -= f.CPUMilli
	}
	if r.Device == "" {
		return
	}
	for k := range n.devices {
		if (plan.Slot{Device: r.Device}).On(n.devices[k].ID) {
			c.use(f, n, k)
		}
	}
}

// use marks a device, by its index, as used by a replica of f.
func (c *cluster) use(f *function, n *node, k int) {
	is := c.give(f, n)
	is.taken, n.devices[k].occupied = append(is.taken, k), true
}

// occupy takes the resources of one more replica of f, in a slot.
func (c *cluster) occupy(f *function, n *node, slot plan.Slot) {
	is := c.keeps(f, n)
	n.free -= f.cost(is)
	n.cpu -= f.CPUMilli
	n.idle -= is.idle
	is.idle, is.zygote = 0, true
	if slot.Device == "" {
		return
	}
	for k := range n.devices {
		if d := &n.devices[k]; slot.On(d.ID) {
			c.use(f, n, k)
			d.free -= f.DeviceMemory
			if f.DeviceMemory == 0 {
				d.free = 0
			}
		}
	}
}

// keeps counts a replica of f.
func (c *cluster) keeps(f *function, n *node) *share {
	is := c.give(f, n)
	is.replicas++
	f.replicas++
	return is
}

// cost returns the memory of one more replica of f on a node where it has a share: its own, and the
// zygote's if there is none yet.
func (f *function) cost(is *share) int64 {
	if is.zygote {
		return f.Memory
	}
	return f.Memory + f.zygote
}

// room returns the memory for one more replica of f if idle zygotes of others are evicted. If f's
// zygote must be loaded first, memory above the threshold does not count.
func (n *node) room(f *function, is *share) int64 {
	bytes := n.free + n.idle - is.idle
	if f.zygote > 0 && !is.zygote {
		bytes -= n.reserve
	}
	return bytes
}

// fits reports whether n has room for one more replica of f. A replica of unknown size needs only
// some free memory. A replica without a CPU request needs no processors. If n's processors are
// unknown, n cannot satisfy a CPU request.
func (n *node) fits(f *function, is *share) bool {
	return !n.closed && n.room(f, is) >= max(f.cost(is), 1) && (f.CPUMilli == 0 || f.CPUMilli <= n.cpu) &&
		(f.GPU == 0 || n.able(f, is))
}

// able reports whether n has enough devices for one more replica of f.
func (n *node) able(f *function, is *share) bool {
	count := 0
	for k := 0; k < len(n.devices) && count < f.GPU; k++ {
		if n.lends(f, is, k) {
			count++
		}
	}
	return count == f.GPU
}

// lends reports whether f can have a device, by its index.
func (n *node) lends(f *function, is *share, k int) bool {
	d := &n.devices[k]
	return d.free >= max(plan.DeviceNeed(f.DeviceMemory, d.Memory), 1) && (f.DeviceMemory != 0 || !d.occupied) && d.Unavailable == "" &&
		!slices.Contains(is.taken, k) && f.Barred(n.Name, d.ID) == ""
}

// pick returns the names of devices for one replica of f: of the devices that f can have, those
// with the most free memory. It returns fewer names than f.GPU if there are not enough such
// devices.
func (n *node) pick(f *function, is *share) []string {
	if f.GPU <= 0 {
		return nil
	}
	var able []int
	for k := range n.devices {
		if n.lends(f, is, k) {
			able = append(able, k)
		}
	}
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

// usableDevices returns how many devices take new replicas.
func (n *node) usableDevices() (count int) {
	for k := range n.devices {
		if n.devices[k].Unavailable == "" {
			count++
		}
	}
	return count
}
