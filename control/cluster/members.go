package cluster

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// member is a Node that joined, with a mailbox for its warm orders. It is kept while it has
// replicas, even if it is away.
type member struct {
	name   string
	wanted chan warmList // the latest; sent while Local.mu is held

	// The fields below are guarded by Local.mu.
	hands    Node                // as it joined the latest time
	joins    uint64              // how often it has joined
	runs     map[string]*replica // its replicas, by name
	presence presence
	left     time.Time            // time of the latest Leave
	unwarm   context.CancelFunc   // ends the goroutine for warm orders
	missing  map[string]time.Time // ready replicas that its announcements lack, and since when
	stopping map[string]bool      // unknown replicas that are being stopped
	stopped  map[string]time.Time // replicas that were recently stopped, and when
	warming  int                  // warm orders of the plan that is being applied; see warmAll
	list     []warmOrder          // those orders
	shown    *plan.Node           // the node in the Snapshot that is being made; nil: it is in none
}

// presence says whether a node can be reached.
type presence uint8

const (
	here      presence = iota
	returning          // it joined again; its running replicas are not known yet
	away
)

const (
	// missingFor is how long an announcement may be out of date. A ready replica counts as lost
	// when announcements have lacked it for this long. A stopped replica may be listed for this
	// long without being stopped again. A broken connection reports a loss sooner.
	missingFor = 2 * time.Second
	// stopsAtATime bounds how many unknown replicas are stopped on a node at a time. The next
	// announcement lists the others.
	stopsAtATime = 8
)

// Join adds n, so that plans may place replicas there. It replaces a node with the same name, for
// example after its daemon was restarted. If n returns after [Local.Leave] and has known replicas,
// plans use n again only after the next [Local.Running]: that call says which of these replicas
// still run. Join does not monitor n: the caller calls Leave when n falls silent.
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
		m = &member{name: name, wanted: make(chan warmList, 1), presence: here, runs: map[string]*replica{}, stopping: map[string]bool{}, stopped: map[string]time.Time{}}
		l.nodes[name] = m
	}
	if m.joins++; m.joins == 1 {
		if l.cfg.Joining == NodesJoinWithReplicas && tell {
			m.presence = returning
		} // otherwise, it takes part at once
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

// Leave reports that a node is silent. Snapshots leave the node out until it joins again. Its
// replicas are hidden: they serve as long as their connections last, but plans neither count nor
// release them. Starts that have begun continue until their timeout.
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

// leave returns how many replicas are hidden now, unless the node was away already.
func (l *Local) leave(name string) (hidden int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.nodes[name]
	if n == nil || n.presence == away || l.closed {
		return 0, false
	}
	n.presence, n.left = away, l.now()
	n.unwarm()
	select { // drops a list that nobody will read
	case <-n.wanted:
	default:
	}
	l.cfg.Event(Event{At: stamp(), Node: name, Kind: Left})
	for _, r := range n.sorted() {
		if !r.hidden {
			r.hidden, r.seen = true, 0
			hidden++
			l.note(r, Event{Kind: Hidden, Cause: "its node is silent"})
		}
	}
	l.dropLocked(n)
	return hidden, true
}

// dropLocked forgets a node that is away and has no replicas. The caller holds l.mu.
func (l *Local) dropLocked(n *member) {
	if n.presence == away && l.nodes[n.name] == n && len(n.runs) == 0 {
		delete(l.nodes, n.name)
	}
}

// sorted returns the node's replicas by name. The caller holds Local.mu.
func (n *member) sorted() []*replica {
	return slices.SortedFunc(maps.Values(n.runs), func(a, b *replica) int { return cmp.Compare(a.name, b.name) })
}

// Running handles a node's announcement of the replicas that run there. Hidden replicas that run
// become visible again. Ready replicas that no longer run are lost: at once if the node was away,
// otherwise after missingFor. Unknown replicas are taken over if they are among the offers, their
// function is deployed, and l has not had them before; others are stopped.
// Running returns at once. It does nothing for an unknown node.
func (l *Local) Running(name string, replicas []string, offers ...Offer) {
	if l.running(name, replicas, offers) {
		l.cfg.Changed()
	}
}

func (l *Local) running(name string, replicas []string, offers []Offer) (changed bool) {
	now, specs := time.Now(), adoptable(l, offers)
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
	for _, r := range n.sorted() {
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
	forgetEnded(l, name, now, there)
	for _, o := range offers {
		if r := l.replicas[o.Replica]; r != nil && r.host == n {
			r.kept = true
		}
	}
	l.stopUnknown(n, replicas, func(name string) bool {
		spec, ok := specs[name]
		if _, had := l.past[name]; had {
			return false
		}
		i := slices.IndexFunc(offers, func(o Offer) bool { return o.Replica == name })
		return ok && takeOver(l, n, offers[i], spec)
	})
	return back
}

// stopUnknown stops replicas on n that do not belong to it, unless adopted returns true. The caller
// holds l.mu.
func (l *Local) stopUnknown(n *member, replicas []string, adopted func(name string) bool) {
	for _, name := range slices.Sorted(slices.Values(replicas)) {
		if r := l.replicas[name]; r != nil && r.node == n.name || n.stopping[name] {
			continue
		}
		if at, ok := n.stopped[name]; ok && time.Since(at) < missingFor || adopted(name) || len(n.stopping) >= stopsAtATime {
			continue
		}
		n.stopping[name] = true
		hands := n.hands
		l.group.Go(func() {
			l.cfg.Log.Warn("an unknown replica is stopped", "replica", name, "node", n.name)
			ctx, cancel := context.WithTimeout(l.ctx, l.cfg.Grace+stopMargin)
			defer cancel()
			if err := hands.Stop(ctx, name, l.cfg.Grace); err != nil {
				l.cfg.Log.Error("failed to stop an unknown replica; it may still run", "replica", name, "node", n.name, "error", err)
			}
			l.mu.Lock()
			defer l.mu.Unlock()
			delete(n.stopping, name)
		})
	}
}

// reach returns the Node to call, or nil if it is away.
func (l *Local) reach(n *member) Node {
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
