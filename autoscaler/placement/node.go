package placement

import (
	"cmp"
	"slices"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// cluster is the working state for a snapshot while a plan is made.
type cluster struct {
	nodes     []*node // in the snapshot's order
	byName    map[string]*node
	functions []function // in the snapshot's order
	finder    plan.Finder
	have      []kept      // scratch
	slots     []plan.Slot // memory that is not used yet
}

// function is one of the snapshot.
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

// node is a node while a plan is made.
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

// share is what a function has on a node.
type share struct {
	replicas int32 // draining ones not counted
	zygote   bool  // it has one, or will
	listed   bool  // it is among what the plan keeps warm
	warm     warmth
}

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

// add fills in a node and its zygotes.
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

// has counts an existing replica.
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

// use marks a device, by its index, as used by a replica of f.
func (n *node) use(f *function, k int) {
	n.taken[f.i*len(n.devices)+k], n.devices[k].occupied = true, true
}

// occupy takes the resources of one more replica of f, in a slot.
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

// keeps counts a replica of f.
func (n *node) keeps(f *function) {
	n.of[f.i].replicas++
	f.replicas++
}

// cost returns the memory of one more replica of f: its own, and the zygote's if there is none yet.
func (n *node) cost(f *function) int64 {
	if n.of[f.i].zygote {
		return f.Memory
	}
	return f.Memory + f.zygote
}

// room returns the memory for one more replica of f if idle zygotes of others are evicted. If f's
// zygote must be loaded first, memory above the threshold does not count.
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

// fits reports whether n has room for one more replica of f. A replica of unknown size needs only
// some free memory. A replica without a CPU request needs no processors. If n's processors are
// unknown, n cannot satisfy a CPU request.
func (n *node) fits(f *function) bool {
	return n.Unavailable == "" && n.room(f) >= max(n.cost(f), 1) && len(n.find(f, f.GPU)) == f.GPU &&
		(f.CPUMilli == 0 || f.CPUMilli <= n.cpu)
}

// pick returns the names of devices for one replica of f: of the devices that f can have, those
// with the most free memory. It returns fewer names than f.GPU if there are not enough such
// devices.
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

// find returns the indices of devices that f can have. The argument most bounds their number. The
// next call overwrites the result.
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

// usableDevices returns how many devices take new replicas.
func (n *node) usableDevices() (count int) {
	for k := range n.devices {
		if n.devices[k].Unavailable == "" {
			count++
		}
	}
	return count
}
