package cluster

import (
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// Cordon keeps new replicas off a node.
type Cordon struct {
	Cause  string // why, as plan.Node.Unavailable
	Moving bool   // the node's replicas go elsewhere: see plan.Node.Moving
}

// Cordons are the cordons of nodes, by name. Nodes need not be known. The zero value has none. Its
// methods are safe for concurrent use.
type Cordons struct {
	// Machines returns a cordon that a node has because of its machine; nil: no node has one. It is
	// set before the first use, and must not block.
	Machines func(node string) (Cordon, bool)

	mu sync.Mutex
	by map[string]Cordon
}

// Set puts a cordon on a node, or changes the one that it has. After Set returns, no plan that was
// made earlier starts a replica there.
func (c *Cordons) Set(node string, is Cordon) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.by == nil {
		c.by = map[string]Cordon{}
	}
	c.by[node] = is
}

// Lift removes the cordon of a node, if it has one.
func (c *Cordons) Lift(node string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.by, node)
}

// of returns the cordon of a node. If the node's machine has one, too, the one that moves replicas
// holds. A nil *Cordons has none.
func (c *Cordons) of(node string) (Cordon, bool) {
	if c == nil {
		return Cordon{}, false
	}
	c.mu.Lock()
	is, ok := c.by[node]
	c.mu.Unlock()
	if c.Machines == nil || ok && is.Moving {
		return is, ok
	}
	if also, closed := c.Machines(node); closed {
		return also, true
	}
	return is, ok
}

// apply adds the cordon of a node to what policies know about it.
func (c *Cordons) apply(n *plan.Node) {
	is, ok := c.of(n.Name)
	if !ok || n.Leaving {
		return
	}
	if n.Unavailable == "" {
		n.Unavailable = is.Cause
	}
	n.Moving = is.Moving
}

// overlap returns how many replicas on nodes that are being drained must stay for now: as many as w
// has slots without a ready replica.
func overlap(w plan.Want, keep kept, have []*replica) int {
	left := len(w.Slots)
	for _, r := range have {
		if r.state == plan.Ready && !r.released && keep.has(r.name) {
			left--
		}
	}
	return left
}

// stays reports whether a replica may be one of those that overlap counts. The caller holds l.mu.
func stays(l *Local, r *replica) bool {
	if r.state != plan.Ready {
		return false
	}
	if n := l.known[r.node]; n.Leaving { // its cordon counts no more
		return n.Moving
	}
	is, ok := l.cfg.Cordons.of(r.node)
	return ok && is.Moving
}

// open reports whether a member takes new replicas. The caller holds Local.mu.
func (c *Cordons) open(n *member) bool {
	if n == nil || n.presence != here {
		return false
	}
	_, closed := c.of(n.name)
	return !closed
}

// refusal returns why a node took no replica.
func (c *Cordons) refusal(node string) error {
	if is, closed := c.of(node); closed {
		return fmt.Errorf("node %q takes no new replicas: %s", node, is.Cause)
	}
	return fmt.Errorf("node %q is away", node)
}

// deviceRoom returns an open node, and the devices of it that have room for a replica of f. It
// returns false if there is none. The caller holds l.mu.
func deviceRoom(l *Local, f *former) (plan.Slot, bool) {
	need := &f.spec.Function
	var names []string
	for name := range l.known {
		if l.cfg.Cordons.open(l.nodes[name]) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		var ids []string
		for _, d := range l.known[name].Devices {
			free := d.Memory - d.MemoryUsed
			if d.Unavailable == "" && len(ids) < need.GPU && free >= plan.DeviceNeed(need.DeviceMemory, d.Memory) {
				ids = append(ids, d.ID)
			}
		}
		if len(ids) == need.GPU {
			slices.Sort(ids)
			return plan.Slot{Node: name, Device: strings.Join(ids, ",")}, true
		}
	}
	return plan.Slot{}, false
}
