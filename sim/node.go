package sim

import (
	"cmp"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// Shares of a node's memory, from package keysmanager. If more than threshold is in use, idle
// zygotes are evicted until calmBelow is in use.
const (
	threshold = 0.85
	calmBelow = 0.80
)

// node is a machine, and what its KeysManager keeps.
type node struct {
	spec    *plan.Node
	used    int64         // by replicas and zygotes
	devices []plan.Device // with what is reserved of them
	zygotes []*zygote     // by stage; nil: none
	disk    int64         // when it has finished all its reads
	view    []plan.Zygote // scratch memory for a snapshot, like the next
	seen    []plan.Device
}

// zygote holds a stage's parameters.
type zygote struct {
	line    *line
	loaded  bool
	at      int64 // when it is loaded, or was
	users   int   // replicas forked from it
	last    int64 // when it was last used
	key     bool  // its stage is a key stage
	was     bool  // key in the previous plan
	parking int64 // when its next child is parked; only key stages have parked children
}

func newNode(spec *plan.Node, stages int) *node {
	return &node{spec: spec, devices: slices.Clone(spec.Devices), zygotes: make([]*zygote, stages)}
}

// start returns the path of a new replica's start, and how long the start takes.
func (n *node) start(w *world, l *line, atOnce bool) (path string, took time.Duration) {
	is := l.spec.Start
	if l.spec.Parameters == 0 {
		return "cold", is.Cold
	}
	z := n.zygotes[l.i]
	if z == nil {
		n.fit(w, int64(l.spec.Parameters))
		z = n.load(w, l, atOnce)
	}
	z.last = w.now
	switch {
	case !z.loaded:
		return "cold", time.Duration(z.at-w.now) + is.Fork
	case is.Parked > 0 && z.key && z.parking <= w.now:
		z.parking = w.now + int64(is.Fork) // another child is forked and parked meanwhile
		return "parked", is.Parked
	}
	return "fork", is.Fork
}

// load begins to load a stage's parameters. A disk reads them for one stage after another: together
// they would take as long.
func (n *node) load(w *world, l *line, atOnce bool) *zygote {
	z := &zygote{line: l, at: w.now, last: w.now, loaded: atOnce}
	if !atOnce {
		z.at = max(w.now, n.disk) + int64(l.spec.Start.Cold-l.spec.Start.Fork)
		n.disk = z.at
		w.events.push(z.at, loaded, l.i, z)
	}
	n.zygotes[l.i] = z
	n.used += int64(l.spec.Parameters)
	return z
}

// warm keeps a stage's parameters. It loads them ahead of need if they have room. For a key stage
// it also evicts idle parameters of other stages.
func (n *node) warm(w *world, l *line, key, atOnce bool) {
	if l.spec.Parameters == 0 {
		return
	}
	bytes := int64(l.spec.Parameters)
	if n.zygotes[l.i] == nil {
		if n.used+bytes > n.spec.Threshold && key {
			n.fit(w, bytes)
		}
		if n.used+bytes > n.spec.Threshold {
			return
		}
		n.load(w, l, atOnce)
	}
	z := n.zygotes[l.i]
	if z.key = key; key && !z.was {
		z.parking = max(w.now, z.at) + int64(l.spec.Start.Fork)
	}
}

func (n *node) unkey() {
	for _, z := range n.zygotes {
		if z != nil {
			z.key, z.was = false, z.key
		}
	}
}

// take adds a replica's resources to those in use, with sign 1, or gives them back, with sign -1.
func (n *node) take(r *replica, sign int64) {
	n.used += sign * int64(r.line.spec.Memory)
	for i := range n.devices {
		if d := &n.devices[i]; (plan.Slot{Device: r.device}).On(d.ID) {
			d.MemoryUsed += sign * plan.DeviceNeed(int64(r.line.spec.GPUMemory), d.Memory)
		}
	}
	if z := n.zygotes[r.line.i]; z != nil {
		z.users += int(sign)
	}
}

// fit evicts idle zygotes to make room for bytes below the threshold.
func (n *node) fit(w *world, bytes int64) { n.shrink(w, n.spec.Threshold-bytes) }

// evict ends idle zygotes if more than the threshold is in use.
func (n *node) evict(w *world) {
	if n.used > n.spec.Threshold {
		n.shrink(w, int64(float64(n.spec.Memory)*calmBelow))
	}
}

// shrink ends idle zygotes until at most bytes are in use. The least recently used ones go first,
// and key stages last.
func (n *node) shrink(w *world, bytes int64) {
	if n.used <= bytes {
		return
	}
	var idle []*zygote
	for _, z := range n.zygotes {
		if z != nil && z.users == 0 && z.loaded {
			idle = append(idle, z)
		}
	}
	slices.SortFunc(idle, func(a, b *zygote) int {
		return cmp.Or(compareBool(a.key, b.key), cmp.Compare(a.last, b.last), cmp.Compare(a.line.i, b.line.i))
	})
	for _, z := range idle {
		if n.used <= bytes {
			return
		}
		n.zygotes[z.line.i] = nil
		n.used -= int64(z.line.spec.Parameters)
		w.rec.stages[z.line.i].evicted(w)
	}
}

func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}

// observe returns the node as a snapshot shows it.
func (n *node) observe() plan.Node {
	out := *n.spec
	out.MemoryUsed = n.used
	n.seen = append(n.seen[:0], n.devices...)
	out.Devices = n.seen
	n.view = n.view[:0]
	for _, z := range n.zygotes {
		if z != nil {
			n.view = append(n.view, plan.Zygote{Function: z.line.key, Digest: z.line.key, Bytes: int64(z.line.spec.Parameters), Idle: z.users == 0 && z.loaded})
		}
	}
	out.Zygotes = n.view
	return out
}
