package cluster

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

const (
	// rememberFor is how long a silent node counts among those that could hold a replica.
	rememberFor = time.Minute
	// joinWithin is how long after the start nodes may take to join. Until then, the largest node may
	// be unknown.
	joinWithin = 30 * time.Second
)

// knownNode is what a node had when it was last seen.
type knownNode struct {
	plan.Node
	at time.Time
}

// remember records what the nodes of a Snapshot have. The caller holds l.mu.
func (l *Local) remember(nodes []plan.Node, now time.Time) {
	for _, n := range nodes {
		l.known[n.Name] = knownNode{plan.Node{Name: n.Name, Memory: n.Memory, CPUMilli: n.CPUMilli, Devices: n.Devices, Leaving: n.Leaving, Moving: n.Moving}, now}
	}
	maps.DeleteFunc(l.known, func(_ string, n knownNode) bool { return now.Sub(n.at) > rememberFor })
}

// lacking returns what no known node has enough of for one replica of f. The caller holds l.mu.
func (l *Local) lacking(f *plan.Function, now time.Time) []plan.Lack {
	if l.cfg.Joining != NoNodesJoin && now.Sub(l.begun) < joinWithin {
		return nil
	}
	var nodes []plan.Node
	for _, n := range l.known {
		nodes = append(nodes, n.Node)
	}
	slices.SortFunc(nodes, func(a, b plan.Node) int { return cmp.Compare(a.Name, b.Name) })
	return plan.Lacking(nodes, f)
}

// Lacking returns the resources that no node has enough of for one replica of f, even if the node
// is empty. Nodes that fell silent within the last minute count too. Lacking returns nil if a node
// could hold the replica, if no node is known, and while nodes may still join after the start.
func (l *Local) Lacking(f plan.Function) []plan.Lack {
	var nodes []plan.Node
	for _, n := range l.present() {
		nodes = append(nodes, n.Inventory())
	}
	now := l.now()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.remember(nodes, now)
	return l.lacking(&f, now)
}

// lackText returns why no node could hold a replica. It is empty if a node could.
func lackText(lacks []plan.Lack) string {
	text := ""
	for i, lack := range lacks {
		if i > 0 {
			text += "; "
		}
		text += fmt.Sprintf("it needs %s, and %s", lack.Need, lack.Most)
	}
	if text == "" {
		return ""
	}
	return "no node could hold one: " + text
}
