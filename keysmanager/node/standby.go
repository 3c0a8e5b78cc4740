package node

import (
	"bytes"
	"context"
	"slices"
	"sync"
	"time"
)

// Listener keeps the latest announcements of nodes for a process that stands by. When it leads, it
// knows which nodes there are. Its methods are safe for concurrent use.
type Listener struct {
	stop  func()
	begun time.Time

	mu     sync.Mutex
	latest map[string]arrival // by node
}

// Listen listens to announcements until Close.
func Listen(bus Bus) (*Listener, error) {
	l := &Listener{begun: time.Now(), latest: map[string]arrival{}}
	var err error
	l.stop, err = bus.Listen("", kindInventory, func(name, _ string, data []byte) {
		l.mu.Lock()
		defer l.mu.Unlock()
		if _, known := l.latest[name]; known || len(l.latest) < maxNodes {
			l.latest[name] = arrival{data, time.Now()}
		}
	})
	return l, err
}

// Heard returns the latest announcements of the nodes that were heard within a time, by node.
func (l *Listener) Heard(within time.Duration) map[string][]byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := map[string][]byte{}
	for name, a := range l.latest {
		if time.Since(a.at) <= within && !bytes.Contains(a.data, gone) {
			out[name] = a.data
		}
	}
	return out
}

// listenFor is how long it takes until each node has been heard. Announcements come every second.
const listenFor = 1200 * time.Millisecond

// Complete returns the time by which each living node has announced itself.
func (l *Listener) Complete() time.Time { return l.begun.Add(listenFor) }

// Close stops listening.
func (l *Listener) Close() { l.stop() }

// begin takes the announcements that were heard before, except those of nodes that have been heard
// again.
func (d *Directory) begin() {
	for name, data := range d.cfg.First {
		d.mu.Lock()
		_, again := d.arrived[name]
		d.mu.Unlock()
		if !again {
			d.arrive(name, data)
		}
	}
}

// awaitEvery is how often Await looks.
const awaitEvery = 5 * time.Millisecond

// Await returns when all nodes that have been heard have joined and said what they run, but not
// before the given time, or when ctx ends. It returns the names of the other nodes. It does not
// wait for nodes that are refused.
func (d *Directory) Await(ctx context.Context, from time.Time) (missing []string) {
	look := time.NewTicker(awaitEvery)
	defer look.Stop()
	for {
		missing = d.untold()
		if len(missing) == 0 && !time.Now().Before(from) {
			return nil
		}
		select {
		case <-ctx.Done():
			return missing
		case <-look.C:
		}
	}
}

// refuses notes which daemon of a node is refused; empty: none.
func refuses(d *Directory, m *member, id string) {
	d.mu.Lock()
	m.refused = id
	d.mu.Unlock()
}

// isRefused reports whether the node's daemon cannot join. The caller holds Directory.mu.
func (m *member) isRefused() bool {
	id := m.client.Inventory().ID // empty: none was used
	return m.refused != "" && (id == "" || id == m.refused) || m.removed != "" && id == m.removed
}

// untold returns the nodes that have been heard, have not joined, and are not refused.
func (d *Directory) untold() (names []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for name := range d.cfg.First {
		if d.nodes[name] == nil {
			names = append(names, name)
		}
	}
	for name, m := range d.nodes {
		if !m.told && !m.isRefused() {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}
