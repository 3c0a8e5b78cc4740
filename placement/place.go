package placement

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/plan"
)

// Spread is a plan.Placer that puts a new replica where its function has the fewest, so that a lost node costs little. Ties
// go to a node that already has the function's zygote, then to the one with the most free memory.
type Spread struct{}

// Place implements plan.Placer.
func (Spread) Place(s plan.Snapshot, a plan.Alloc) ([]plan.Want, error) {
	return place(s, a, func(f *plan.Function, x, y *node) int {
		return cmp.Or(
			cmp.Compare(x.replicas[f.Name], y.replicas[f.Name]),
			prefer(x.zygotes[f.Name], y.zygotes[f.Name]),
			cmp.Compare(y.free, x.free),
			cmp.Compare(x.Name, y.Name),
		)
	})
}

// FirstFit is a plan.Placer that puts a new replica on the first node, by name, that has room; nodes with the function's
// zygote go before the others.
type FirstFit struct{}

// Place implements plan.Placer.
func (FirstFit) Place(s plan.Snapshot, a plan.Alloc) ([]plan.Want, error) {
	return place(s, a, func(f *plan.Function, x, y *node) int {
		return cmp.Or(prefer(x.zygotes[f.Name], y.zygotes[f.Name]), cmp.Compare(x.Name, y.Name))
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

// node is a node while a plan is made.
type node struct {
	*plan.Node
	free     int64             // bytes; negative: so many have to give way
	idle     map[string]int64  // bytes of zygotes that give way to others, by function
	reserve  int64             // bytes that no zygote is loaded into
	cpu      int               // thousandths of a core that no replica is promised
	device   map[string]int64  // free bytes, of those that are well
	size     map[string]int64  // bytes, of all
	occupied map[string]bool   // devices that replicas have, or will
	replicas map[string]int    // by function, draining ones not counted
	zygotes  map[string]bool   // functions that have one, or will
	warm     map[string]warmth // by function
	taken    map[string]bool   // function/device: two replicas of a function on a device are not two servers
}

// warmth is how far a function's parameters are on a node, whatever the plan adds.
type warmth uint8

// The zero value: they are not.
const (
	coming warmth = iota + 1 // or there: what starts from them may be waiting for them
	there
)

func nodes(s *plan.Snapshot) map[string]*node {
	all := make(map[string]*node, len(s.Nodes))
	for i := range s.Nodes {
		p := &s.Nodes[i]
		n := &node{
			Node: p, free: p.Memory - p.MemoryUsed, idle: map[string]int64{}, cpu: p.CPUMilli,
			device: map[string]int64{}, size: map[string]int64{}, occupied: map[string]bool{}, replicas: map[string]int{}, zygotes: map[string]bool{}, warm: map[string]warmth{}, taken: map[string]bool{},
		}
		if p.Threshold > 0 {
			n.reserve = p.Memory - p.Threshold
		}
		for _, d := range p.Devices {
			n.size[d.ID] = d.Memory
			if d.Unavailable == "" {
				n.device[d.ID] = d.Memory - d.MemoryUsed
			}
		}
		for _, z := range p.Zygotes {
			n.zygotes[z.Function] = true
			n.warm[z.Function] = max(n.warm[z.Function], coming)
			if z.Idle {
				n.warm[z.Function] = there
				n.idle[z.Function] += z.Bytes
			}
		}
		all[p.Name] = n
	}
	for i := range s.Functions {
		for _, r := range s.Functions[i].Replicas {
			if n := all[r.Node]; n != nil {
				f := &s.Functions[i]
				if n.zygotes[f.Name] && r.State != plan.Starting { // it came from it
					n.warm[f.Name] = there
				}
				if r.Revision == f.Revision && r.State != plan.Draining { // others make room
					n.cpu -= f.CPUMilli
				}
				for _, id := range (plan.Slot{Device: r.Device}).Devices() {
					n.taken[f.Name+"/"+id] = true
					n.occupied[id] = true
				}
			}
		}
	}
	return all
}

// placing is an allocation while its replicas get their places: what is kept has its own from the start, new ones are added round by
// round, so that every function gets its first replica before any gets its second.
type placing struct {
	alloc     plan.Alloc
	functions []*plan.Function // of its lines
	wants     []plan.Want
	nodes     map[string]*node
	list      []*node          // the same
	sizes     map[string]int64 // of zygotes, by function
	open      []int            // lines that may want more
}

// begin keeps what can be kept.
func begin(s *plan.Snapshot, a plan.Alloc) (*placing, error) {
	p := &placing{alloc: a, nodes: nodes(s), sizes: zygoteSizes(s), wants: make([]plan.Want, len(a)), functions: make([]*plan.Function, len(a))}
	replicas := 0
	for i := range s.Functions {
		replicas += len(s.Functions[i].Replicas)
	}
	for i := range s.Nodes {
		n := p.nodes[s.Nodes[i].Name]
		n.replicas = make(map[string]int, replicas/len(s.Nodes)) // need not grow
		p.list = append(p.list, n)
	}
	finder := s.Finder()
	for i, l := range a {
		f, ok := finder.Function(l.Function)
		if !ok {
			return nil, fmt.Errorf("function %q of the allocation: not in snapshot %d, want an allocation of the same snapshot", l.Function, s.Rev)
		}
		p.functions[i] = f
		p.wants[i] = plan.Want{Function: l.Function, Revision: f.Revision, CPUMilli: l.CPUMilli, Batch: l.Batch, Key: l.Key, Why: l.Why, Short: l.Denied, Denied: l.Denied != ""}
		p.wants[i].Slots = keep(f, l.Count, p.nodes)
		p.open = append(p.open, i)
	}
	return p, nil
}

// wanting returns the lines that want one more in this round. They are asked for until none is open: counts may be far more than there is
// room for.
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

// add gives a line one more replica, or says why it has none.
func (p *placing) add(i int, better func(*plan.Function, *node, *node) int) (plan.Slot, bool) {
	f, w := p.functions[i], &p.wants[i]
	slot, ok := take(f, p.sizes[f.Name], p.list, better, func(*node) bool { return true })
	if !ok {
		w.Short = shortage(f, p.sizes[f.Name], p.alloc[i].Count, len(w.Slots), p.nodes)
		return slot, false
	}
	w.Slots = append(w.Slots, slot)
	return slot, true
}

// place makes the wants of a; better orders the nodes that have room.
func place(s plan.Snapshot, a plan.Alloc, better func(*plan.Function, *node, *node) int) ([]plan.Want, error) {
	p, err := begin(&s, a)
	if err != nil {
		return nil, err
	}
	for round := 0; len(p.open) > 0; round++ {
		for _, i := range p.wanting(round) {
			p.add(i, better)
		}
	}
	return p.wants, nil
}

// keep returns up to count slots for replicas that exist: ones on nodes that are fit first, then ready before starting,
// then the oldest. One whose device is not well, or barred to f, is let go.
func keep(f *plan.Function, count int, all map[string]*node) []plan.Slot {
	type kept struct {
		*plan.Replica
		on *node
	}
	have := make([]kept, 0, len(f.Replicas))
	for i := range f.Replicas {
		r := &f.Replicas[i]
		n := all[r.Node]
		if r.State != plan.Draining && r.Revision == f.Revision && n != nil && n.Unfit(r.Device) == "" && f.Barred(r.Node, r.Device) == "" {
			have = append(have, kept{r, n})
		}
	}
	slices.SortFunc(have, func(x, y kept) int {
		return cmp.Or(
			prefer(x.on.Unavailable == "", y.on.Unavailable == ""),
			prefer(x.State == plan.Ready, y.State == plan.Ready),
			x.Since.Compare(y.Since),
			cmp.Compare(x.Name, y.Name),
		)
	})
	have = have[:min(len(have), count)]
	slots := slices.Grow([]plan.Slot(nil), len(have)) // nil for none
	for _, r := range have {
		slots = append(slots, plan.Slot{Replica: r.Name, Node: r.Node, Device: r.Device})
		r.on.replicas[f.Name]++
	}
	return slots
}

// take finds the best place for one more replica of f, of those that may be, and takes it.
func take(f *plan.Function, zygote int64, all []*node, better func(*plan.Function, *node, *node) int, may func(*node) bool) (plan.Slot, bool) {
	var best *node
	for _, n := range all { // in any order: that of better is total
		if may(n) && n.fits(f, zygote) && (best == nil || better(f, n, best) < 0) {
			best = n
		}
	}
	if best == nil {
		return plan.Slot{}, false
	}
	ids := best.devices(f)
	best.occupy(f, zygote, ids)
	return plan.Slot{Node: best.Name, Device: strings.Join(ids, ",")}, true
}

// occupy takes what one more replica of f has of the node.
func (n *node) occupy(f *plan.Function, zygote int64, ids []string) {
	n.free -= n.cost(f, zygote)
	n.cpu -= f.CPUMilli
	n.zygotes[f.Name] = true
	delete(n.idle, f.Name)
	n.replicas[f.Name]++
	for _, id := range ids {
		n.device[id] -= f.DeviceMemory
		if f.DeviceMemory == 0 {
			n.device[id] = 0
		}
		n.taken[f.Name+"/"+id], n.occupied[id] = true, true
	}
}

// cost is the memory that one more replica of f takes: its own, and the zygote's where there is none yet.
func (n *node) cost(f *plan.Function, zygote int64) int64 {
	if n.zygotes[f.Name] {
		return f.Memory
	}
	return f.Memory + zygote
}

// room is the memory that one more replica of f finds, when idle zygotes of others give way. A zygote that is loaded for it finds less.
func (n *node) room(f *plan.Function, zygote int64) int64 {
	bytes := n.free
	for name, idle := range n.idle {
		if name != f.Name {
			bytes += idle
		}
	}
	if zygote > 0 && !n.zygotes[f.Name] {
		bytes -= n.reserve
	}
	return bytes
}

// fits says whether one more replica of f has room. One of unknown size needs a node that is not full; one that is promised nothing
// of the processor gets what is left over, and a node of unknown processors promises nothing.
func (n *node) fits(f *plan.Function, zygote int64) bool {
	return n.Unavailable == "" && n.room(f, zygote) >= max(n.cost(f, zygote), 1) && len(n.devices(f)) == f.GPU &&
		(f.CPUMilli == 0 || f.CPUMilli <= n.cpu)
}

// devices returns the f.GPU devices with the most free memory that f can have, by name; fewer when there are not as many.
func (n *node) devices(f *plan.Function) []string {
	ids := n.able(f, len(n.device))
	slices.SortFunc(ids, func(x, y string) int { return cmp.Or(cmp.Compare(n.device[y], n.device[x]), cmp.Compare(x, y)) })
	ids = ids[:min(len(ids), f.GPU)]
	slices.Sort(ids)
	return ids
}

// able returns the devices that f can have, in no order, and no more than so many.
func (n *node) able(f *plan.Function, most int) []string {
	var ids []string
	if f.GPU == 0 {
		return nil
	}
	for id, free := range n.device {
		whole := f.DeviceMemory == 0
		if len(ids) < most && free >= max(plan.DeviceNeed(f.DeviceMemory, n.size[id]), 1) && (!whole || !n.occupied[id]) &&
			!n.taken[f.Name+"/"+id] && f.Barred(n.Name, id) == "" {
			ids = append(ids, id)
		}
	}
	return ids
}

// zygoteSizes returns the largest zygote seen of each function.
func zygoteSizes(s *plan.Snapshot) map[string]int64 {
	sizes := map[string]int64{}
	for i := range s.Nodes {
		for _, z := range s.Nodes[i].Zygotes {
			sizes[z.Function] = max(sizes[z.Function], z.Bytes)
		}
	}
	return sizes
}

// shortage says why a replica of f has no place, with sizes.
func shortage(f *plan.Function, zygote int64, want, placed int, all map[string]*node) string {
	fit, most, name := 0, int64(0), ""
	for _, n := range all {
		if n.Unavailable != "" {
			continue
		}
		fit++
		if free := n.room(f, zygote); name == "" || free > most || free == most && n.Name < name {
			most, name = free, n.Name
		}
	}
	if len(all) == 0 {
		return fmt.Sprintf("%d of %d placed: there is no node; start `stagecoach keysmanager`", placed, want)
	}
	if fit == 0 {
		return fmt.Sprintf("%d of %d placed: none of %d nodes takes a replica", placed, want, len(all))
	}
	need := plan.Size(all[name].cost(f, zygote))
	if f.CPUMilli > 0 {
		most, of := 0, 0
		for _, n := range all {
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
		for _, n := range all {
			devices, well = devices+len(n.Devices), well+len(n.device)
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
