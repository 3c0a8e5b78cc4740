package plan

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// ErrStale is the error for a plan that is older than an applied one, or that another owner made.
var ErrStale = errors.New("plan: made from a stale snapshot")

// Validate returns all faults of p as a decision on s, joined. A plan with a fault is not applied.
// Validate checks what s allows, not what would be wise.
func (p Plan) Validate(s Snapshot) error {
	v := validator{s: &s, finder: s.Finder(), nodes: make(map[string]*Node, len(s.Nodes)), used: map[place]int64{}, on: map[place]bool{}, seen: make([]bool, len(s.Functions))}
	for i := range s.Nodes {
		v.nodes[s.Nodes[i].Name] = &s.Nodes[i]
	}
	if p.Epoch != s.Epoch {
		v.add("plan: epoch %d, want the snapshot's %d", p.Epoch, s.Epoch)
	}
	if p.Rev != s.Rev || !p.At.Equal(s.At) {
		v.add("plan: made from snapshot %d at %v, want %d at %v", p.Rev, p.At, s.Rev, s.At)
	}
	for i, w := range p.Wants {
		if i > 0 && p.Wants[i-1].Function >= w.Function {
			v.add("plan: function %q after %q, want each once, sorted", w.Function, p.Wants[i-1].Function)
		}
		v.want(w)
	}
	for i := range v.seen {
		if !v.seen[i] {
			v.add("function %q: no want, want one a function", s.Functions[i].Name)
		}
	}
	v.capacity()
	if lanes := s.Lanes(); len(lanes) > 0 || len(p.Tables) > 0 || len(p.Excluded) > 0 {
		if err := s.routeFaults(lanes, s.pipelineNames(), p.Tables, p.Excluded); err != nil {
			v.add("plan: %w", err)
		}
	}
	for i, w := range p.Warm {
		if i > 0 && cmp.Or(cmp.Compare(p.Warm[i-1].Function, w.Function), cmp.Compare(p.Warm[i-1].Node, w.Node)) >= 0 {
			v.add("plan: warm %q on %q after %q on %q, want each once, sorted", w.Function, w.Node, p.Warm[i-1].Function, p.Warm[i-1].Node)
		}
		if _, ok := v.finder.Function(w.Function); !ok {
			v.add("plan: warm %q, want a function of the snapshot", w.Function)
		}
		if v.node(w.Node) == nil {
			v.add("plan: warm %q on node %q, want a node of the snapshot", w.Function, w.Node)
		}
		if w.Warmth > Parked {
			v.add("plan: warm %q on node %q: %v, want at most %v", w.Function, w.Node, w.Warmth, Parked)
		}
	}
	return errors.Join(v.errs...)
}

// LeastCPU is the smallest CPU limit of a replica in thousandths of a core. The kernel's shortest
// quota is 1 ms per period of 100 ms.
const LeastCPU = 10

type validator struct {
	s      *Snapshot
	finder Finder
	nodes  map[string]*Node
	errs   []error
	used   map[place]int64 // bytes of new replicas
	on     map[place]bool  // devices of the function
	kept   []bool          // which of the function's replicas were listed
	seen   []bool          // which of the snapshot's functions have a want
}

// place is a device of a node or, without a device, the node.
type place struct{ node, device string }

func (v *validator) add(format string, args ...any) {
	v.errs = append(v.errs, fmt.Errorf(format, args...))
}

func (v *validator) node(name string) *Node { return v.nodes[name] }

func (v *validator) want(w Want) {
	f, ok := v.finder.Function(w.Function)
	if !ok {
		v.add("function %q: unknown, want a function of the snapshot", w.Function)
		return
	}
	v.seen[v.finder.at] = true
	if w.Revision != f.Revision {
		v.add("function %q: revision %d, want %d", f.Name, w.Revision, f.Revision)
	}
	least, most := f.Bounds()
	if len(w.Slots) > most {
		v.add("function %q: %d slots, want at most %d", f.Name, len(w.Slots), most)
	}
	if len(w.Slots) < least && w.Short == "" {
		v.add("function %q: %d slots, want at least %d or why it is short", f.Name, len(w.Slots), least)
	}
	if w.CPUMilli < 0 || w.Batch < 0 {
		v.add("function %q: cpu %dm, batch %d, want neither negative", f.Name, w.CPUMilli, w.Batch)
	}
	if w.CPUMilli > 0 && w.CPUMilli < LeastCPU {
		v.add("function %q: cpu %dm, want 0, as declared, or at least %dm", f.Name, w.CPUMilli, LeastCPU)
	}
	if w.Rank != "" && !slices.Contains(Ranks, w.Rank) {
		v.add("function %q: rank %q, want one of %s", f.Name, w.Rank, strings.Join(Ranks, ", "))
	}
	clear(v.on)
	v.kept = append(v.kept[:0], make([]bool, len(f.Replicas))...)
	for _, slot := range w.Slots {
		v.slot(f, slot)
		if w.CPUMilli <= 0 {
			continue
		}
		if n := v.node(slot.Node); n != nil && n.CPUMilli > 0 && w.CPUMilli > n.CPUMilli {
			v.add("function %q: cpu %dm a replica, want at most what node %q has, %dm", f.Name, w.CPUMilli, n.Name, n.CPUMilli)
		}
	}
}

func (v *validator) slot(f *Function, slot Slot) {
	n := v.node(slot.Node)
	if n == nil {
		v.add("function %q: slot on node %q, want a node of the snapshot", f.Name, slot.Node)
		return
	}
	devices := slot.Devices()
	for _, id := range devices {
		if v.on[place{n.Name, id}] {
			v.add("function %q: two slots on device %q of node %q, want one", f.Name, id, n.Name)
		}
		v.on[place{n.Name, id}] = true
	}
	if slot.Replica != "" {
		v.keep(f, slot)
		return
	}
	if n.Unavailable != "" {
		v.add("function %q: new replica on node %q, which takes none: %s", f.Name, n.Name, n.Unavailable)
	}
	v.used[place{n.Name, ""}] += f.Memory
	if len(devices) != f.GPU {
		v.add("function %q: devices %q on node %q, want %d", f.Name, slot.Device, n.Name, f.GPU)
	}
	for _, id := range devices {
		i := slices.IndexFunc(n.Devices, func(d Device) bool { return d.ID == id })
		switch {
		case i < 0:
			v.add("function %q: device %q, want one of node %q", f.Name, id, n.Name)
			continue
		case n.Devices[i].Unavailable != "":
			v.add("function %q: device %q of node %q takes nothing new: %s", f.Name, id, n.Name, n.Devices[i].Unavailable)
		}
		if why := f.Barred(n.Name, id); why != "" {
			v.add("function %q: new replica where %s", f.Name, why)
		}
		v.used[place{n.Name, id}] += DeviceNeed(f.DeviceMemory, n.Devices[i].Memory)
	}
}

func (v *validator) keep(f *Function, slot Slot) {
	i := slices.IndexFunc(f.Replicas, func(r Replica) bool { return r.Name == slot.Replica })
	if i < 0 {
		v.add("function %q: keeps replica %q, want one of its own", f.Name, slot.Replica)
		return
	}
	r := &f.Replicas[i]
	switch {
	case v.kept[i]:
		v.add("function %q: keeps replica %q twice", f.Name, r.Name)
	case r.State == Draining:
		v.add("function %q: keeps replica %q, which drains and does not come back", f.Name, r.Name)
	case r.Revision != f.Revision:
		v.add("function %q: keeps replica %q of revision %d, want %d", f.Name, r.Name, r.Revision, f.Revision)
	case r.Node != slot.Node || r.Device != slot.Device:
		v.add("function %q: keeps replica %q on node %q device %q, want where it is, node %q device %q",
			f.Name, r.Name, slot.Node, slot.Device, r.Node, r.Device)
	}
	v.kept[i] = true
}

// capacity adds an error for each node or device with too little free memory for its new replicas.
// The memory of replicas that the plan stops is not free until they have ended. The memory of idle
// zygotes is free, because they are evicted at once.
func (v *validator) capacity() {
	for _, n := range v.s.Nodes {
		free := n.Memory - n.MemoryUsed
		for _, z := range n.Zygotes {
			if z.Idle {
				free += z.Bytes
			}
		}
		if need := v.used[place{n.Name, ""}]; need > 0 && need > free {
			v.add("node %q: %s in new replicas, want at most %s", n.Name, Size(need), Size(free))
		}
		for _, d := range n.Devices {
			if need := v.used[place{n.Name, d.ID}]; need > 0 && d.MemoryUsed+need > d.Memory {
				v.add("device %q of node %q: %s in new replicas, want at most %s", d.ID, n.Name, Size(need), Size(d.Memory-d.MemoryUsed))
			}
		}
	}
}

// Size formats a number of bytes in B, MiB or GiB, with at most one decimal.
func Size(bytes int64) string {
	unit, shift := "B", 0
	switch {
	case bytes >= 1<<30:
		unit, shift = "GiB", 30
	case bytes >= 1<<20:
		unit, shift = "MiB", 20
	}
	return strings.TrimSuffix(fmt.Sprintf("%.1f", float64(bytes)/float64(int64(1)<<shift)), ".0") + " " + unit
}
