package cluster

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/plan"
)

// warmAll sends each node the list of parameters to keep warm. The caller holds l.mu.
func (l *Local) warmAll(p plan.Plan, specs map[pipeline.Key]*FunctionSpec) {
	lists := map[string][]WarmOrder{}
	for _, w := range p.Warm {
		if spec, ok := specs[pipeline.ParseKey(w.Function)]; ok {
			lists[w.Node] = append(lists[w.Node], WarmOrder{Function: *spec, Warmth: w.Warmth, Key: w.Key})
		}
	}
	for name, n := range l.nodes {
		if n.presence != here {
			continue
		}
		select { // replaces a list that the node has not read
		case <-n.wanted:
		default:
		}
		n.wanted <- lists[name]
	}
}

// warm sends lists to a node until ctx ends, which is when l closes or the node leaves. It retries
// a failed list with growing pauses until the list changes.
func (l *Local) warm(ctx context.Context, n *node) {
	var failed string // the list that failed latest
	var failures int
	var until time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case list := <-n.wanted:
			is := signature(list)
			if is == failed && time.Now().Before(until) {
				continue
			}
			err := l.tellWarm(ctx, n, list)
			switch {
			case ctx.Err() != nil:
				return
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

func (l *Local) tellWarm(ctx context.Context, n *node, list []WarmOrder) error {
	hands := l.reach(n)
	if hands == nil {
		return nil // it gets the list again when it is back
	}
	ctx, cancel := context.WithTimeout(ctx, l.cfg.StartTimeout)
	defer cancel()
	return hands.Warm(ctx, list)
}

// signature identifies a list.
func signature(list []WarmOrder) string {
	var b strings.Builder
	for _, w := range list {
		fmt.Fprintf(&b, "%s %d %v %v\n", w.Function.Key, w.Function.Revision, w.Warmth, w.Key)
	}
	return b.String()
}
