package node

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"
)

// Absence is a node that was heard and is away.
type Absence struct {
	Inventory           // its latest announcement
	Since     time.Time // when it was last heard, or reached if Heard is set
	Cause     string    // why it counts as away
	Ended     bool      // its daemon has said that it ends
	Heard     bool      // its daemon is heard, and cannot be reached
}

// Away returns the nodes that are away, by name. Nodes that never took part are left out, except
// those that are heard and cannot be reached.
func (d *Directory) Away() []Absence {
	d.mu.Lock()
	defer d.mu.Unlock()
	var out []Absence
	for _, m := range d.nodes {
		if m.away != nil && !m.joined {
			a := *m.away
			a.Inventory = m.client.Inventory()
			out = append(out, a)
		}
	}
	slices.SortFunc(out, func(a, b Absence) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// Remove forgets a node. If its daemon is heard, it is refused with the cause, and ends. The node
// may join again with a new daemon. If the node was silent, the same daemon may join again, too.
func (d *Directory) Remove(ctx context.Context, name, cause string) error {
	done := make(chan struct{})
	d.post(func() { d.remove(name, cause); close(done) })
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("node %q: remove: %w", name, context.Cause(ctx))
	case <-d.ctx.Done():
		return fmt.Errorf("node %q: remove: the directory is closed", name)
	}
}

func (d *Directory) remove(name, cause string) {
	m := d.nodes[name]
	if m == nil {
		return
	}
	if m.leave == nil {
		m.client.stop()
		d.mu.Lock()
		delete(d.nodes, name)
		delete(d.arrived, name)
		d.mu.Unlock()
		return
	}
	inv := m.client.Inventory()
	d.mu.Lock()
	m.removed, m.cause = inv.ID, cause
	d.mu.Unlock()
	refuse(d.cfg, inv.Identity, cause)
	d.left(name, m, Absence{Cause: cause})
	d.mu.Lock()
	m.away = nil
	d.mu.Unlock()
}
