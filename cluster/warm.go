package cluster

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/plan"
)

// node is a Node with its mailbox of warm orders.
type node struct {
	Node
	name   string
	wanted chan []WarmOrder // the latest list; written with Local.mu held
}

// warmAll tells each node what to keep warm; l.mu is held.
func (l *Local) warmAll(p plan.Plan, specs map[string]FunctionSpec) {
	lists := map[string][]WarmOrder{}
	for _, w := range p.Warm {
		if spec, ok := specs[w.Function]; ok {
			lists[w.Node] = append(lists[w.Node], WarmOrder{Function: spec, Warmth: w.Warmth, Key: w.Key})
		}
	}
	for name, n := range l.nodes {
		select { // a list that the node has not looked at is superseded
		case <-n.wanted:
		default:
		}
		n.wanted <- lists[name]
	}
}

// warm passes lists on to a node until l ends. A list that failed is passed on again later and later, until it changes.
func (l *Local) warm(n *node) {
	var failed string // the list that failed latest
	var failures int
	var until time.Time
	for {
		select {
		case <-l.ctx.Done():
			return
		case list := <-n.wanted:
			is := signature(list)
			if is == failed && time.Now().Before(until) {
				continue
			}
			ctx, cancel := context.WithTimeout(l.ctx, l.cfg.StartTimeout)
			err := n.Warm(ctx, list)
			cancel()
			switch {
			case err == nil:
				failed, failures = "", 0
				continue
			case is != failed:
				failed, failures = is, 0
				l.cfg.Log.Warn("parameters are not as warm as wanted", "node", n.name, "error", err)
			}
			failures++
			until = time.Now().Add(Backoff(failures))
		}
	}
}

// signature tells lists apart.
func signature(list []WarmOrder) string {
	var b strings.Builder
	for _, w := range list {
		fmt.Fprintf(&b, "%s %d %v %v\n", w.Function.Key, w.Function.Revision, w.Warmth, w.Key)
	}
	return b.String()
}
