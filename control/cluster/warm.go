package cluster

import (
	"context"
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// warmOrder is a function whose parameters a node should keep in memory.
type warmOrder struct {
	function *FunctionSpec // read only
	key      bool          // evicted last
}

// warmList is what a node should keep in memory.
type warmList struct {
	orders []warmOrder
	// print changes with the list, and with the replicas and parameters that the node has.
	print uint64
}

// warmAgain is how long a list that was carried out is not sent again, if neither the list nor what
// runs on the node changes.
const warmAgain = 10 * time.Second

// warmAll tells each node what to keep warm; l.mu is held. Only functions that are deployed now are
// kept warm.
func (l *Local) warmAll(p plan.Plan) {
	for _, n := range l.nodes {
		n.warming = 0
	}
	for i := range p.Warm {
		if n := l.nodes[p.Warm[i].Node]; n != nil {
			n.warming++
		}
	}
	lists := make([]warmOrder, len(p.Warm)) // of all nodes, one after the other
	for _, n := range l.nodes {
		n.list, lists = lists[:0:n.warming], lists[n.warming:]
	}
	var k *function
	for i := range p.Warm {
		w := &p.Warm[i]
		if i == 0 || p.Warm[i-1].Function != w.Function {
			k = l.functions[pipeline.ParseKey(w.Function)]
		}
		if w.Warmth < plan.Host {
			continue // an image's files are on the node's disk already
		}
		if n := l.nodes[w.Node]; n != nil && k != nil && k.deployed != nil {
			n.list = append(n.list, warmOrder{k.deployed, w.Key})
		}
	}
	for _, n := range l.nodes {
		list := n.list
		n.list = nil
		if n.presence != here {
			continue
		}
		select { // replaces a list that the node has not read
		case <-n.wanted:
		default:
		}
		n.wanted <- warmList{list, l.print(n, list)}
	}
}

// print returns a fingerprint of a list, and of what the node has, as of the latest Snapshot. The
// caller holds l.mu.
func (l *Local) print(n *member, list []warmOrder) uint64 {
	var h maphash.Hash
	h.SetSeed(l.seed)
	add := func(text string, number uint64) {
		_, _ = h.WriteString(text) // it cannot fail
		_, _ = h.Write(binary.LittleEndian.AppendUint64(nil, number))
	}
	for _, w := range list {
		number := w.function.Revision << 1
		if w.key {
			number |= 1
		}
		add(w.function.Name, number)
	}
	replicas := uint64(0) // their order does not count
	for name, r := range n.runs {
		replicas += maphash.String(l.seed, name) + uint64(r.state)
	}
	add("", replicas)
	add("", n.joins)
	if n.shown == nil {
		return h.Sum64()
	}
	for _, z := range n.shown.Zygotes {
		idle := uint64(0)
		if z.Idle {
			idle = 1
		}
		add(z.Function, idle)
	}
	for _, d := range n.shown.Devices {
		add(d.ID, uint64(d.MemoryUsed))
	}
	return h.Sum64()
}

// warm sends lists to a node until ctx ends, which is when l closes or the node leaves. It retries
// a failed list with growing pauses until the list changes. It sends a list that was carried out
// again if anything changes, and otherwise after warmAgain: see docs/adr/0108.
func (l *Local) warm(ctx context.Context, n *member) {
	var failed string // the list that failed latest
	var failures int
	var until time.Time
	var told uint64 // the print of the list that was carried out latest
	var toldAt time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case wanted := <-n.wanted:
			list := wanted.orders
			if wanted.print == told && time.Since(toldAt) < warmAgain {
				continue
			}
			if failures > 0 && time.Now().Before(until) && signature(list) == failed {
				continue
			}
			err := l.tellWarm(ctx, n, list)
			switch {
			case ctx.Err() != nil:
				return
			case err == nil:
				failed, failures = "", 0
				told, toldAt = wanted.print, time.Now()
				continue
			}
			told = 0
			if is := signature(list); failures == 0 || is != failed {
				failed, failures = is, 0
				l.cfg.Log.Warn("parameters are not as warm as wanted", "node", n.name, "error", err)
			}
			failures++
			until = time.Now().Add(Backoff(failures))
		}
	}
}

func (l *Local) tellWarm(ctx context.Context, n *member, list []warmOrder) error {
	hands := l.reach(n)
	if hands == nil {
		return nil // it gets the list again when it is back
	}
	ctx, cancel := context.WithTimeout(ctx, l.cfg.StartTimeout)
	defer cancel()
	wanted := make([]node.Wanted, len(list))
	for i, w := range list {
		wanted[i] = node.Wanted{Spec: w.function.Spec, Key: w.key}
	}
	return hands.Warm(ctx, wanted)
}

// signature identifies a list.
func signature(list []warmOrder) string {
	var b strings.Builder
	for _, w := range list {
		fmt.Fprintf(&b, "%s %d %v\n", w.function.Key, w.function.Revision, w.key)
	}
	return b.String()
}
