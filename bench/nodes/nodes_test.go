package nodes

import (
	"log/slog"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/control/cluster"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
)

// adapted is a daemon as a node of the cluster. It has all of its parameters in use.
type adapted struct{ *node.Client }

func (a adapted) Inventory() plan.Node {
	inv := a.Client.Inventory()
	n := plan.Node{Name: inv.Name, Memory: inv.Memory.Total, MemoryUsed: inv.Memory.Used, CPUMilli: inv.CPU.Total}
	for _, z := range inv.Zygotes {
		n.Zygotes = append(n.Zygotes, plan.Zygote{Function: z.Function, Bytes: z.Bytes})
	}
	return n
}

// TestTwentyNodes is a small form of the bench: nodes join, replicas start on all of them, and
// some nodes fall silent.
func TestTwentyNodes(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	const nodes, silent, limit = 20, 3, time.Minute
	log := slog.New(slog.DiscardHandler)
	p, err := openPlane(t.TempDir(), func(c *node.Client) cluster.Node { return adapted{c} }, log)
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	f, err := openFleet(p.nats.URL(), p.token, t.TempDir(), nodes, log)
	if err != nil {
		t.Fatal(err)
	}
	closed := false
	defer func() {
		if !closed {
			f.close()
		}
	}()
	wait := func(what string, done func() bool) {
		t.Helper()
		if err := until(t.Context(), limit, what, done); err != nil {
			t.Fatal(err)
		}
	}
	wait("join", func() bool { return len(p.directory.Clients()) == nodes })
	if err := p.deploy(nodes, replicasPerNode); err != nil {
		t.Fatal(err)
	}
	wait("start", func() bool { return p.ready() == nodes*replicasPerNode })
	snapshot, made := p.loop.Last()
	if len(snapshot.Nodes) != nodes || len(made.Wants) != nodes {
		t.Errorf("a plan for %d nodes and %d functions, want %d each", len(snapshot.Nodes), len(made.Wants), nodes)
	}
	for _, n := range f.nodes {
		if has := len(n.worker.Inventory().Replicas); has != replicasPerNode {
			t.Errorf("%s has %d replicas, want %d", n.worker.name, has, replicasPerNode)
		}
	}
	wait("warm", func() bool {
		return !slices.ContainsFunc(f.nodes, func(n *noop) bool { return len(n.worker.Inventory().Zygotes) == 0 })
	})
	if p.bus.announcements.Load() < nodes || p.bus.bytes.Load() == 0 {
		t.Errorf("%d announcements of %d bytes were counted, want one per node at least", p.bus.announcements.Load(), p.bus.bytes.Load())
	}
	since := time.Now()
	f.silence(silent)
	wait("silence", func() bool { n, _ := p.silent(since); return n >= silent })
	wait("a plan without them", func() bool { s, _ := p.loop.Last(); return len(s.Nodes) == nodes-silent })
	closed = true
	f.close()
}
