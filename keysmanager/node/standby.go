package node

import (
	"bytes"
	"context"
	"maps"
	"slices"
	"sync"
	"time"
)

// Listener keeps the latest announcements of nodes for a process that stands by. When it leads, it
// knows which nodes there are. Its methods are safe for concurrent use.
type Listener struct {
	stop func()

	mu     sync.Mutex
	latest map[string]arrival // by node
}

// Listen listens to announcements until Close.
func Listen(bus Bus) (*Listener, error) {
	l := &Listener{latest: map[string]arrival{}}
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

// Await returns when all nodes of DirectoryConfig.First have joined and said what they run, or when
// ctx ends. It returns the names of the others.
func (d *Directory) Await(ctx context.Context) (missing []string) {
	missing = slices.Sorted(maps.Keys(d.cfg.First))
	look := time.NewTicker(awaitEvery)
	defer look.Stop()
	for {
		d.mu.Lock()
		missing = slices.DeleteFunc(missing, func(name string) bool { return d.nodes[name] != nil && d.nodes[name].told })
		d.mu.Unlock()
		if len(missing) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return missing
		case <-look.C:
		}
	}
}
