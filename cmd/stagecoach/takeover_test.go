package main

import (
	"log/slog"
	"net/http"
	"os"
	"os/exec"
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

// replicaPIDs returns the processes of a function's replicas, as the nodes announce them.
func (n *nodesRig) replicaPIDs(function string) (out []int) {
	for _, inv := range n.watch.Inventories() {
		for _, r := range inv.Replicas {
			if r.Function == function+".openfaas-fn" {
				out = append(out, r.PID)
			}
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

// TestReplicasOutliveTheLeader kills the leader under load, and later stops the next one as an
// operator does. Each time, the next one takes over the replicas of the nodes, which go on with the
// same processes. All requests of the other control plane succeed. Functions can call functions.
func TestReplicasOutliveTheLeader(t *testing.T) {
	a, b := twoPlanes(t)
	b.daemon("n1", "--nats-outside")
	b.daemon("n2", "--nats-outside")
	names := map[string]int{"f": 2, "g": 1, "calls": 1}
	a.deployAll(waitFn("f", "50ms", map[string]string{"min": "2", "max": "2"}, nil), fn{"g", "noop", one(), nil, nil}, shells("calls"))
	ready := func(r *rig) func() bool {
		return func() bool {
			for name, n := range names {
				if r.shows(name).AvailableReplicas != n {
					return false
				}
			}
			return true
		}
	}
	b.until(soon, "all replicas to be ready", ready(b.rig))
	before := map[string][]int{}
	for name, n := range names {
		b.until(soon, "the nodes to announce replicas", func() bool { return len(b.replicaPIDs(name)) == n })
		before[name] = b.replicaPIDs(name)
	}
	b.calls()

	for _, round := range []struct {
		next  *rig
		leads int // how often, with this time
		end   func() error
	}{
		{b.rig, 1, func() error { a.end9(); return nil }},
		{a, 2, func() error { defer func() { b.up = nil }(); return b.up.Stop() }},
	} {
		stop := round.next.hammer("f", 4)
		round.next.until(soon, "calls to run", func() bool { return round.next.line("f").Running > 0 })
		begun := time.Now()
		if err := round.end(); err != nil {
			t.Fatal(err)
		}
		round.next.leads(round.leads)
		t.Logf("the next control plane leads after %v", time.Since(begun))
		round.next.must(http.StatusOK, http.MethodPost, "/function/g", "x")
		t.Logf("and answers after %v", time.Since(begun))
		round.next.must(http.StatusOK, http.MethodPost, "/function/f", "x")
		t.Logf("and a function that was busy after %v", time.Since(begun))
		b.until(soon, "all replicas to be shown", ready(round.next))
		stop()
		round.next.calls()
		for name, n := range names {
			if now := b.replicaPIDs(name); !slices.Equal(now, before[name]) {
				t.Errorf("replicas of %s run as %v, before as %v", name, now, before[name])
			}
			round.next.tookOver(name, n)
		}
		if round.next == b.rig {
			a.restart()
			a.standsBy(1)
		}
	}
}

// calls has a function call another one.
func (r *rig) calls() {
	r.t.Helper()
	if _, err := exec.LookPath("curl"); err != nil || os.Geteuid() != 0 {
		return // functions have no networks, or no program for it
	}
	got := r.must(http.StatusOK, http.MethodPost, "/function/calls", "curl -sS --max-time 30 -d hello http://gateway.openfaas:8080/function/g 2>&1")
	if string(got.Body) != "hello" {
		r.t.Errorf("a function that calls g got %q", got.Body)
	}
}
