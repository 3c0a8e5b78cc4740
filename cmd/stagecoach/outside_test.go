package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/natstest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
)

// leads waits until this control plane leads, and has done so n times.
func (r *rig) leads(n int) {
	r.t.Helper()
	r.until(soon, "the control plane to lead", func() bool { return strings.Count(r.log.String(), "this control plane leads") == n })
}

// standsBy waits until this control plane knows that another one leads, n times.
func (r *rig) standsBy(n int) {
	r.t.Helper()
	r.until(soon, "the control plane to stand by", func() bool {
		return len(regexp.MustCompile(`this control plane stands by" holder="\S+ at`).FindAllString(r.log.String(), -1)) >= n
	})
}

// TestTwoControlPlanes has two control planes on one NATS cluster. Both answer requests of all
// kinds, whichever leads. When the leader is killed under load, the other one takes over, no
// accepted async request is lost, and sync requests of the other one succeed in the end.
func TestTwoControlPlanes(t *testing.T) {
	of := natstest.Start(t, 3)
	a := start(t, "--nats", of.String())
	a.leads(1)
	b := start(t, "--nats", of.String())
	b.standsBy(1)
	b.deployAll(fn{"f", "noop", map[string]string{"min": "1"}, nil, nil}, waitFn("slow", "300ms", nil, nil))
	large := strings.Repeat("large item ", 30_000)
	for _, r := range []*rig{a, b} {
		for _, body := range []string{"x", large} {
			if got := r.must(http.StatusOK, http.MethodPost, "/function/f", body); string(got.Body) != body {
				t.Errorf("f answers %d bytes, want the %d of the request", len(got.Body), len(body))
			}
		}
		if n := r.shows("f").AvailableReplicas; n != 1 {
			t.Errorf("%d replicas of f are shown, want 1", n)
		}
	}

	l := &ledger{chance: rand.New(rand.NewPCG(1, 2)), accepted: map[string]bool{}, told: map[string]int{}}
	to := httptest.NewServer(l)
	t.Cleanup(to.Close)
	stop := make(chan struct{})
	var load sync.WaitGroup
	load.Go(func() { // async requests
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			case <-time.After(10 * time.Millisecond):
			}
			name := fmt.Sprint("r-", i)
			got, err := b.trySend(http.MethodPost, "/async-function/f", asyncBody(name), "X-Callback-Url", to.URL+"?"+name)
			if err == nil && got.Status == http.StatusAccepted {
				l.mu.Lock()
				l.accepted[name] = true
				l.mu.Unlock()
			}
		}
	})
	stopSync := b.hammer("slow", 4) // these wait for the next leader
	accepted := func(more int) {
		t.Helper()
		l.mu.Lock()
		from := len(l.accepted)
		l.mu.Unlock()
		b.until(late, "async requests to be accepted", func() bool { l.mu.Lock(); defer l.mu.Unlock(); return len(l.accepted) > from+more })
	}
	accepted(50)
	begun := time.Now()
	a.kill()
	b.leads(1)
	t.Logf("the other control plane leads after %v", time.Since(begun))
	b.must(http.StatusOK, http.MethodPost, "/function/f", "x")
	t.Logf("and answers after %v", time.Since(begun))
	accepted(50)

	a.restart()
	a.standsBy(1)
	a.must(http.StatusOK, http.MethodPost, "/function/f", "x")
	close(stop)
	load.Wait()
	stopSync()
	b.until(late, "all accepted requests to be told", func() bool { return l.waiting() == 0 })
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range l.wrong {
		t.Error(w)
	}
	t.Logf("%d accepted, %d deliveries marked as repetitions", len(l.accepted), l.marked)
}

// TestPausedLeader stops a leader with SIGSTOP until another control plane has taken over, and lets
// it go on. It carries out no order with its old epoch, and stands by. The other one has the same
// replicas all the time.
func TestPausedLeader(t *testing.T) {
	a, n := twoPlanes(t)
	b := n.rig
	n.daemon("n1", "--nats-outside")
	a.deployAll(fn{"f", "noop", map[string]string{"min": "2", "max": "2"}, nil, nil})
	a.must(http.StatusOK, http.MethodPost, "/function/f", "x")
	var first []string
	n.until(soon, "the node to announce both replicas", func() bool { first = n.running("n1", "f"); return len(first) == 2 })
	b.until(soon, "both replicas to be ready", func() bool { return b.shows("f").AvailableReplicas == 2 })
	var before node.Inventory
	b.until(soon, "the node to announce the leader's epoch", func() bool { before, _ = n.inventory("n1"); return before.Epoch > 0 })

	if err := a.up.Cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	b.leads(1)
	b.must(http.StatusOK, http.MethodPost, "/function/f", "x")
	if err := a.up.Cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	b.until(late, "the old leader to stand by", func() bool { return strings.Contains(a.log.String(), "begins again, to stand by") })
	if now := n.running("n1", "f"); !slices.Equal(now, first) {
		t.Errorf("replicas %v, want %v", now, first)
	}
	b.tookOver("f", 2)
	started := regexp.MustCompile(`epoch=(\d+)`).FindAllStringSubmatch(b.log.String(), -1)
	inv, _ := n.inventory("n1")
	if want := started[len(started)-1][1]; fmt.Sprint(inv.Epoch) != want {
		t.Errorf("the node has seen epoch %d, want %s", inv.Epoch, want)
	}
	n.epoch.Store(before.Epoch)
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	_, err := n.watch.Clients()[0].Do(ctx, node.Order{Kind: node.OrderStop, Replica: n.running("n1", "f")[0]})
	if want := fmt.Sprintf("the epoch of this one is %d, and the node has seen epoch %d", before.Epoch, inv.Epoch); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("an order of the old epoch: %v, want %q", err, want)
	}
	for range 20 {
		b.must(http.StatusOK, http.MethodPost, "/function/f", "x")
	}
}

// hammer sends sync requests to a function until stop is called. Each must be answered with 200.
func (r *rig) hammer(function string, senders int) (stop func()) {
	end := make(chan struct{})
	var load sync.WaitGroup
	var mu sync.Mutex
	all := 0
	for range senders {
		load.Go(func() {
			for {
				select {
				case <-end:
					return
				default:
				}
				got, err := r.trySend(http.MethodPost, "/function/"+function, "x")
				if err != nil || got.Status != http.StatusOK {
					r.t.Errorf("request to %s: status %d, %v: %s", function, got.Status, err, got.Body)
					return
				}
				mu.Lock()
				all++
				mu.Unlock()
			}
		})
	}
	return func() {
		close(end)
		load.Wait()
		r.t.Logf("%d requests to %s were answered", all, function)
	}
}

// TestLeaderHandsOver stops a leader as an operator does. The next one leads at once, and no
// request of the other control plane fails.
func TestLeaderHandsOver(t *testing.T) {
	of := natstest.Start(t, 3)
	a := start(t, "--nats", of.String())
	a.leads(1)
	b := start(t, "--nats", of.String())
	b.standsBy(1)
	a.deployAll(fn{"f", "noop", map[string]string{"min": "1"}, nil, nil}, waitFn("slow", "200ms", nil, nil))
	b.must(http.StatusOK, http.MethodPost, "/function/slow", "x")
	stopF, stopSlow := b.hammer("f", 2), b.hammer("slow", 4)
	begun := time.Now()
	a.stop()
	b.leads(1)
	t.Logf("handed over within %v, with the end of the process", time.Since(begun))
	b.must(http.StatusOK, http.MethodPost, "/function/slow", "x")
	stopF()
	stopSlow()
}

// ownPIDs returns the processes of a function's replicas on the node of this control plane. It
// fails the test if there are none.
func (r *rig) ownPIDs(function string) (pids []int) {
	r.t.Helper()
	for _, is := range r.own().Replicas {
		if is.Function == function+".openfaas-fn" {
			pids = append(pids, is.PID)
		}
	}
	if len(pids) == 0 {
		r.t.Fatalf("%s has no replicas", function)
	}
	return pids
}

// TestLeaderOutlivesServers kills each server of the NATS cluster in turn. The control plane goes
// on to lead, and its replicas serve all the time.
func TestLeaderOutlivesServers(t *testing.T) {
	of := natstest.Start(t, 3)
	a := start(t, "--nats", of.String())
	a.leads(1)
	a.deployAll(fn{"f", "noop", map[string]string{"min": "1"}, nil, nil}, fn{"g", "noop", map[string]string{"min": "0", "zero": "true"}, nil, nil})
	a.must(http.StatusOK, http.MethodPost, "/function/f", "x")
	stop := a.hammer("f", 1)
	before := a.ownPIDs("f")
	for i := range 3 {
		of.Kill(i)
		a.until(late, "the cluster to store something", func() bool {
			got, err := a.trySend(http.MethodPost, "/async-function/f", "x")
			return err == nil && got.Status == http.StatusAccepted
		})
		of.Run(i)
		a.until(late, "another function to be started", func() bool {
			got, err := a.trySend(http.MethodPost, "/function/g", "x")
			return err == nil && got.Status == http.StatusOK
		})
	}
	stop()
	for _, pid := range before {
		if _, err := readProcess(pid); err != nil {
			t.Errorf("replica %d has ended", pid)
		}
	}
	if strings.Contains(a.log.String(), "begins again") || strings.Count(a.log.String(), "this control plane leads") != 1 {
		t.Error("the control plane has begun again")
	}
}

// TestLapseIsNoLoss pauses the NATS cluster until the lease of control has lapsed. Until the
// cluster goes on, the control plane accepts and starts nothing, and its replicas serve. Then it
// leads again, with the same replicas.
func TestLapseIsNoLoss(t *testing.T) {
	of := natstest.Start(t, 3)
	a := start(t, "--nats", of.String())
	a.leads(1)
	a.deployAll(fn{"f", "noop", map[string]string{"min": "1"}, nil, nil}, fn{"asleep", "noop", map[string]string{"min": "0", "zero": "true"}, nil, nil})
	a.must(http.StatusOK, http.MethodPost, "/function/f", "x")
	before := a.ownPIDs("f")
	stop := a.hammer("f", 1)
	goOn := of.Pause()
	a.until(late, "the lease to lapse", func() bool { return a.value("stagecoach_control_leading") == 0 })
	if got := a.send(http.MethodPost, "/async-function/f", "x"); got.Status != http.StatusServiceUnavailable {
		t.Errorf("an async request got %d without the lease, want 503: %s", got.Status, got.Body)
	}
	if got := a.send(http.MethodPost, "/function/asleep", "x", "X-Timeout", "1s"); got.Status != http.StatusGatewayTimeout {
		t.Errorf("a request that needs a start got %d without the lease, want 504: %s", got.Status, got.Body)
	}
	a.until(late, "the log to say so", func() bool { return strings.Contains(a.log.String(), "could not be renewed in time") })
	goOn()
	a.until(late, "the control plane to lead again", func() bool { return a.value("stagecoach_control_leading") == 1 })
	a.must(http.StatusOK, http.MethodPost, "/function/asleep", "x")
	to := newReceiver(t)
	a.until(late, "async requests to be accepted", func() bool {
		got, err := a.trySend(http.MethodPost, "/async-function/f", "x", "X-Callback-Url", to.URL)
		return err == nil && got.Status == http.StatusAccepted
	})
	if got := to.next(t); got.status != "200" {
		t.Errorf("the async request ended with %+v", got)
	}
	stop()
	for _, pid := range before {
		if _, err := readProcess(pid); err != nil {
			t.Errorf("replica %d has ended", pid)
		}
	}
	if strings.Contains(a.log.String(), "begins again") {
		t.Error("the control plane has begun again")
	}
}
