package cluster

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/plan"
)

// node is a Node that joined, with its mailbox of warm orders. It is kept while it has replicas, also while it is away.
type node struct {
	name   string
	wanted chan []WarmOrder // the latest list; written with Local.mu held

	// With Local.mu held:
	hands    Node // as it joined the latest time
	presence presence
	left     time.Time            // when it fell silent the latest time
	unwarm   context.CancelFunc   // ends its goroutine of warm orders
	missing  map[string]time.Time // ready replicas that its announcements lack, since when
	stopping map[string]bool      // replicas that nobody knows and that are being stopped
	stopped  map[string]time.Time // replicas that it has been told to stop lately, and when
	warming  int                  // warm orders of the plan that is being applied; see warmAll
	list     []WarmOrder          // those orders
	shown    *plan.Node           // the node in the Snapshot that is being made; nil: it is in none
}

// presence is whether a node can be reached.
type presence uint8

const (
	here      presence = iota
	returning          // it joined again; what it still runs is not known yet
	away
)

const (
	// missingFor is how long announcements must lack a ready replica before it counts as lost, and how long they may have one that
	// was stopped. What an announcement says may be older than what is known here, and a connection that breaks tells sooner.
	missingFor = 2 * time.Second
	// stopsAtATime bounds how many replicas that nobody knows are being stopped on a node. The next announcement has the others.
	stopsAtATime = 8
)

// Join makes n a node: plans may place replicas there. One of this name that is there already is replaced, as when its daemon
// was started again. A node that comes back after [Local.Leave] with replicas still known takes part from its first
// [Local.Running] on, which says what has become of them. Join does not keep up with n by itself: who calls it tells when n
// falls silent.
func (l *Local) Join(n Node) {
	name := n.Inventory().Name
	if l.join(n, name, true) {
		l.cfg.Log.Info("node joined", "node", name)
		l.cfg.Changed()
	}
}

func (l *Local) join(n Node, name string, tell bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	m := l.nodes[name]
	if m == nil {
		m = &node{name: name, wanted: make(chan []WarmOrder, 1), presence: here, stopping: map[string]bool{}, stopped: map[string]time.Time{}}
		l.nodes[name] = m
	} else if m.presence == away {
		m.presence = returning
	} else {
		m.hands = n
		return false
	}
	m.hands, m.missing = n, map[string]time.Time{}
	ctx, cancel := context.WithCancel(l.ctx)
	m.unwarm = cancel
	l.group.Go(func() { l.warm(ctx, m) })
	if tell {
		l.cfg.Event(Event{At: stamp(), Node: name, Kind: Joined})
	}
	return true
}

// Leave says that a node is silent. It is in no Snapshot until it joins again, and its replicas are out of sight: they serve
// as long as their connections hold, are not counted and not let go, and what starts there goes on until its timeout.
func (l *Local) Leave(name string) {
	hidden, ok := l.leave(name)
	switch {
	case !ok:
		return
	case hidden > 0:
		l.cfg.Log.Warn("node left; its replicas are out of sight until it returns", "node", name, "replicas", hidden)
	default:
		l.cfg.Log.Info("node left", "node", name)
	}
	l.cfg.Changed()
}

// leave returns how many replicas are out of sight now, unless the node was away.
func (l *Local) leave(name string) (hidden int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.nodes[name]
	if n == nil || n.presence == away || l.closed {
		return 0, false
	}
	n.presence, n.left = away, l.now()
	n.unwarm()
	select { // a list that nobody will look at
	case <-n.wanted:
	default:
	}
	l.cfg.Event(Event{At: stamp(), Node: name, Kind: Left})
	for _, r := range l.sorted() {
		if r.node == name && !r.hidden {
			r.hidden, r.seen = true, 0
			hidden++
			l.note(r, Event{Kind: Hidden, Cause: "its node is silent"})
		}
	}
	l.dropLocked(n)
	return hidden, true
}

// dropLocked forgets a node that is away and has no replicas; l.mu is held.
func (l *Local) dropLocked(n *node) {
	if n.presence != away || l.nodes[n.name] != n {
		return
	}
	for _, r := range l.replicas {
		if r.node == n.name {
			return
		}
	}
	delete(l.nodes, n.name)
}

// Running takes a node's announcement of which replicas run there. Replicas that were out of sight are back; those that were
// ready and are not there any more are lost; what runs there and is not known is stopped. It returns at once, and does nothing
// for a node that is not there.
func (l *Local) Running(name string, replicas []string) {
	if l.running(name, replicas) {
		l.cfg.Changed()
	}
}

func (l *Local) running(name string, replicas []string) (changed bool) {
	now := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.nodes[name]
	if n == nil || n.presence == away || l.closed {
		return false
	}
	there := make(map[string]bool, len(replicas))
	for _, r := range replicas {
		there[r] = true
	}
	back, left := n.presence == returning, n.left
	n.presence = here
	missing := map[string]time.Time{}
	for _, r := range l.sorted() {
		if r.node != name {
			continue
		}
		gone := r.state == plan.Ready && !r.released && !there[r.name]
		switch {
		case gone && back && !r.since.After(left):
			r.lose(fmt.Errorf("it ended while its node %q was away", name))
			continue
		case gone:
			since, known := n.missing[r.name]
			if !known {
				since = now
			}
			if missing[r.name] = since; now.Sub(since) >= missingFor {
				r.lose(fmt.Errorf("its node %q says that it does not run", name))
			}
		}
		if back && r.hidden {
			r.hidden = false
			l.note(r, Event{Kind: Back})
		}
	}
	n.missing = missing
	l.stopUnknown(n, replicas)
	return back
}

// stopUnknown stops what runs on n and is none of its replicas; l.mu is held.
func (l *Local) stopUnknown(n *node, replicas []string) {
	for _, name := range slices.Sorted(slices.Values(replicas)) {
		if r := l.replicas[name]; r != nil && r.node == n.name || n.stopping[name] || len(n.stopping) >= stopsAtATime {
			continue
		}
		if at, ok := n.stopped[name]; ok && time.Since(at) < missingFor {
			continue
		}
		n.stopping[name] = true
		hands := n.hands
		l.group.Go(func() {
			l.cfg.Log.Warn("a replica that nobody wants is stopped", "replica", name, "node", n.name)
			ctx, cancel := context.WithTimeout(l.ctx, l.cfg.Grace+stopMargin)
			defer cancel()
			if err := hands.Stop(ctx, name, l.cfg.Grace); err != nil {
				l.cfg.Log.Error("a replica that nobody wants may still run", "replica", name, "node", n.name, "error", err)
			}
			l.mu.Lock()
			defer l.mu.Unlock()
			delete(n.stopping, name)
		})
	}
}

// reach returns what reaches a node; nil: it is away.
func (l *Local) reach(n *node) Node {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n.presence == away {
		return nil
	}
	return n.hands
}

// present returns the nodes that take part.
func (l *Local) present() []Node {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []Node
	for _, n := range l.nodes {
		if n.presence == here {
			out = append(out, n.hands)
		}
	}
	return out
}
