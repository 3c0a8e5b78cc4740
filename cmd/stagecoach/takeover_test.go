package main

import (
	"log/slog"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/natstest"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// twoPlanes starts two control planes without nodes of their own, on one NATS cluster: a, which
// leads, and b, whose nodes the rig has.
func twoPlanes(t *testing.T) (a *rig, b *nodesRig) {
	t.Helper()
	of := natstest.Start(t, 3)
	a = start(t, "--nats", of.String(), "--no-node")
	a.leads(1)
	b = &nodesRig{rig: start(t, "--nats", of.String(), "--no-node"), url: of.String()}
	b.standsBy(1)
	nc, err := queue.Connect(b.url, queue.Access{}, "test", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	b.open(queue.NewLink(nc))
	return a, b
}

// replicaPIDs returns the processes of a function's replicas on a node, as it announces them.
func (n *nodesRig) replicaPIDs(name, function string) (out []int) {
	inv, _ := n.inventory(name)
	for _, r := range inv.Replicas {
		if r.Function == function+".openfaas-fn" {
			out = append(out, r.PID)
		}
	}
	slices.Sort(out)
	return out
}

// tookOver checks that a control plane has taken over n replicas of a function, and started none.
func (r *rig) tookOver(function string, n int) {
	r.t.Helper()
	if got := len(r.events(function, "adopted")); got != n {
		r.t.Errorf("%d replicas of %s were taken over, want %d", got, function, n)
	}
	for _, kind := range []string{"ordered", "started", "lost", "failed"} {
		for _, e := range r.events(function, kind) {
			r.t.Errorf("%s: replica %s was %s: %s", function, e.Replica, kind, e.Cause)
		}
	}
}

// TestReplicasOutliveTheLeader kills the leader under load. The next one takes over the replicas of
// the node, which go on with the same processes. All requests of the other control plane succeed.
func TestReplicasOutliveTheLeader(t *testing.T) {
	a, b := twoPlanes(t)
	b.daemon("n1", "--nats-outside")
	b.daemon("n2", "--nats-outside")
	two := map[string]string{"min": "2", "max": "2"}
	a.deployAll(waitFn("f", "50ms", two, nil), fn{"g", "noop", map[string]string{"min": "1", "max": "1"}, nil, nil})
	all := func() []int {
		out := append(b.replicaPIDs("n1", "f"), b.replicaPIDs("n2", "f")...)
		return append(out, append(b.replicaPIDs("n1", "g"), b.replicaPIDs("n2", "g")...)...)
	}
	b.until(soon, "three replicas to be ready", func() bool {
		return len(all()) == 3 && b.shows("f").AvailableReplicas == 2 && b.shows("g").AvailableReplicas == 1
	})
	b.must(http.StatusOK, http.MethodPost, "/function/f", "x")
	before := all()

	stop := b.hammer("f", 4)
	time.Sleep(200 * time.Millisecond) // so that calls run
	begun := time.Now()
	if err := a.up.Cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	b.leads(1)
	t.Logf("the next control plane leads after %v", time.Since(begun))
	b.must(http.StatusOK, http.MethodPost, "/function/g", "x")
	t.Logf("and answers after %v", time.Since(begun))
	b.must(http.StatusOK, http.MethodPost, "/function/f", "x")
	t.Logf("and a function that was busy after %v", time.Since(begun))
	b.until(soon, "all replicas to be shown", func() bool { return b.shows("f").AvailableReplicas == 2 && b.shows("g").AvailableReplicas == 1 })
	stop()
	if now := all(); !slices.Equal(now, before) {
		t.Errorf("replicas run as %v, before as %v", now, before)
	}
	b.tookOver("f", 2)
	b.tookOver("g", 1)
	<-a.up.Done
	a.restart()
	a.standsBy(1)
}
