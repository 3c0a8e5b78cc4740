package sim

import (
	"cmp"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// The shares of a node's memory above which idle zygotes are evicted, and down to which; those of package keysmanager.
const (
	threshold = 0.85
	calmBelow = 0.80
)

// node is a machine and what its KeysManager keeps.
type node struct {
	spec    *plan.Node
	used    int64         // by replicas and zygotes
	devices []plan.Device // what of them is reserved
	zygotes []*zygote     // by stage; nil: none
	disk    int64         // when it has read all that it is to read
	view    []plan.Zygote // scratch of a snapshot, as is the next
	seen    []plan.Device
}

// zygote holds a stage's parameters.
type zygote struct {
	line    *line
	loaded  bool
	at      int64 // when it is, or was
	users   int   // replicas that come from it
	last    int64 // when it was used
	key     bool  // of a key stage
	was     bool  // key, in the plan before
	parking int64 // when its next child is parked, if it is of a key stage: others have none
}

func newNode(spec *plan.Node, stages int) *node {
	return &node{spec: spec, devices: slices.Clone(spec.Devices), zygotes: make([]*zygote, stages)}
}

// start returns how a new replica comes up, and how long that takes.
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
		z.parking = w.now + int64(is.Fork) // another is forked and parked meanwhile
		return "parked", is.Parked
	}
	return "fork", is.Fork
}

// load begins to load a stage's parameters. A disk reads one stage's after another's: together they would take as long.
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

// warm keeps a stage's parameters, and loads them ahead of need where they have room: a key stage's also in the place of idle ones of
// other stages.
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

// take counts what a replica has of the node, or gives it back.
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

// fit makes room for so many bytes below the threshold, as far as idle zygotes go.
func (n *node) fit(w *world, bytes int64) { n.shrink(w, n.spec.Threshold-bytes) }

// evict ends idle zygotes when more than the threshold is in use.
func (n *node) evict(w *world) {
	if n.used > n.spec.Threshold {
		n.shrink(w, int64(float64(n.spec.Memory)*calmBelow))
	}
}

// shrink ends idle zygotes, least recently used first and key stages last, until no more than so many bytes are in use.
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

// observe fills in what a snapshot has of the node.
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
