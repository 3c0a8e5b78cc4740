package sim

import (
	"math"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/keysmanager/cache"
)

// node is a machine. Its cache, the production code of the KeysManager, decides which parameters it
// keeps. The node models the rest: how long loads take, and how much memory is in use.
type node struct {
	spec    *plan.Node
	used    int64            // by replicas and zygotes
	loading int64            // of used, by zygotes that load
	devices []plan.Device    // with what is reserved
	cache   *cache.Core[int] // entries are stages, by index
	zygotes []*zygote        // by stage; nil: none
	disk    int64            // when it has read all that it has to read
	// Scratch: the key stages of a plan, the bounds of memory, parts of a snapshot.
	keys   []int
	bounds [1]cache.Bound
	view   []plan.Zygote
	seen   []plan.Device
}

// zygote holds a stage's parameters.
type zygote struct {
	line    *line
	node    *node
	at      int64 // when it is loaded, or was
	users   int   // replicas that come from it
	parking int64 // when its child is parked; never: it has none. Only key stages have one
}

// never is the time at which a child is parked if there is no such child.
const never = math.MaxInt64

func newNode(spec *plan.Node, stages int) *node {
	return &node{spec: spec, devices: slices.Clone(spec.Devices), cache: cache.New[int](), zygotes: make([]*zygote, stages)}
}

// start returns the path and the duration of a new replica's start. ok is false if there is no room
// for its parameters.
func (n *node) start(w *world, l *line, atOnce bool) (path string, took time.Duration, ok bool) {
	is := l.spec.Start
	if l.spec.Parameters == 0 {
		return "cold", is.Cold, true
	}
	n.step(w, cache.Hold[int]{Key: l.i})
	defer n.step(w, cache.Release[int]{Key: l.i})
	l.known = true
	if n.zygotes[l.i] == nil && !n.load(w, l, atOnce) {
		return "", 0, false
	}
	z := n.zygotes[l.i]
	switch {
	case !z.ready():
		return "cold", time.Duration(z.at-w.now) + is.Fork, true
	case z.parked(w):
		z.park(w) // another is forked and parked meanwhile
		return "parked", is.Parked, true
	}
	return "fork", is.Fork, true
}

// step steps the cache and carries out its effects. again is true if the cache unparked children
// first, so that the load has to be requested again.
func (n *node) step(w *world, ev cache.Event) (again bool) {
	for _, e := range n.cache.Step(w.clock, ev) {
		switch e := e.(type) {
		case cache.Evict[int]:
			n.used -= int64(n.zygotes[e.Key].line.spec.Parameters)
			n.zygotes[e.Key] = nil
			w.rec.stages[e.Key].evicted(w)
		case cache.Unpark:
			again = true
			for _, z := range n.zygotes {
				if z != nil && z.parked(w) {
					z.parking = never
				}
			}
		}
	}
	return again
}

// load begins to load a stage's parameters. It returns false if there is no room for them. A disk
// reads for one stage after another, because reading for several at once would not be faster.
func (n *node) load(w *world, l *line, atOnce bool) bool {
	bytes := int64(l.spec.Parameters)
	want := cache.Want[int]{Key: l.i, Bytes: bytes, Bounds: n.weigh(w)}
	if n.step(w, want) {
		n.step(w, want) // parked children take no memory here
	}
	if e, _ := n.cache.Get(l.i); !e.Loading {
		return false
	}
	z := &zygote{line: l, node: n, at: w.now, parking: never}
	n.zygotes[l.i] = z
	n.used += bytes
	n.loading += bytes
	z.using(w)
	if atOnce {
		z.arrive(w)
		return true
	}
	z.at = max(w.now, n.disk) + int64(l.spec.Start.Cold-l.spec.Start.Fork)
	n.disk = z.at
	w.events.push(z.at, loaded, l.i, z)
	return true
}

// arrive ends the load of a zygote.
func (z *zygote) arrive(w *world) {
	bytes := int64(z.line.spec.Parameters)
	z.node.loading -= bytes
	z.node.step(w, cache.Loaded[int]{Key: z.line.i, Bytes: bytes})
}

// ready reports whether the zygote has loaded.
func (z *zygote) ready() bool {
	e, _ := z.node.cache.Get(z.line.i)
	return e.Ready
}

// parked reports whether a child of the zygote waits on a device.
func (z *zygote) parked(w *world) bool { return z.line.spec.Start.Parked > 0 && z.parking <= w.now }

// park begins to park a child of the zygote, once it has loaded, unless memory is short.
func (z *zygote) park(w *world) {
	n := z.node
	if z.parking = never; n.cache.Ahead(w.clock, n.weigh(w)) >= cache.ParkedHost {
		z.parking = max(w.now, z.at) + int64(z.line.spec.Start.Fork)
	}
}

// using tells the cache what a zygote has.
func (z *zygote) using(w *world) {
	u := cache.Using[int]{Key: z.line.i, Replicas: z.users, Wanted: true}
	if z.parked(w) {
		u.Parked = 1
	}
	z.node.step(w, u)
}

// weigh returns the memory in use, and tells the cache which children are parked by now.
func (n *node) weigh(w *world) []cache.Bound {
	for _, z := range n.zygotes {
		if z != nil && z.parked(w) {
			z.using(w)
		}
	}
	n.bounds[0] = cache.Bound{Name: "memory", Total: n.spec.Memory, Used: n.used - n.loading}
	return n.bounds[:]
}

// mark tells the cache the key stages that a plan wants to be warm. Only they have parked children.
func (n *node) mark(w *world) {
	n.step(w, cache.Mark[int]{Keys: n.keys})
	for i, z := range n.zygotes {
		if z != nil && !slices.Contains(n.keys, i) {
			z.parking = never
		}
	}
}

// warm loads a stage's parameters ahead of need, and parks a child of a key stage, if there is
// room.
func (n *node) warm(w *world, l *line, key, atOnce bool) {
	if l.spec.Parameters == 0 {
		return
	}
	if n.zygotes[l.i] == nil {
		if !n.cache.Room(w.clock, n.weigh(w), int64(l.spec.Parameters), key) {
			return
		}
		n.step(w, cache.Hold[int]{Key: l.i})
		defer n.step(w, cache.Release[int]{Key: l.i})
		if !n.load(w, l, atOnce) {
			return
		}
	}
	if z := n.zygotes[l.i]; key && z.parking == never {
		z.park(w)
	}
}

// take adds a replica's use of the node's resources (sign 1), or subtracts it (sign -1).
func (n *node) take(w *world, r *replica, sign int64) {
	n.used += sign * int64(r.line.spec.Memory)
	for i := range n.devices {
		if d := &n.devices[i]; (plan.Slot{Device: r.device}).On(d.ID) {
			d.MemoryUsed += sign * plan.DeviceNeed(int64(r.line.spec.GPUMemory), d.Memory)
		}
	}
	if z := n.zygotes[r.line.i]; z != nil {
		z.users += int(sign)
		z.using(w)
	}
}

// tidy evicts idle zygotes if more memory is in use than the cache's threshold.
func (n *node) tidy(w *world) { n.step(w, cache.Weighed{Bounds: n.weigh(w)}) }

// observe returns the node as a snapshot shows it.
func (n *node) observe() plan.Node {
	out := *n.spec
	out.MemoryUsed = n.used
	n.seen = append(n.seen[:0], n.devices...)
	out.Devices = n.seen
	n.view = n.view[:0]
	for _, z := range n.zygotes {
		if z != nil {
			n.view = append(n.view, plan.Zygote{Function: z.line.key, Digest: z.line.key, Bytes: int64(z.line.spec.Parameters), Idle: z.users == 0 && z.ready()})
		}
	}
	out.Zygotes = n.view
	return out
}
