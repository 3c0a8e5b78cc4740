package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// node runs `stagecoach node` and returns what it prints.
func (n *nodesRig) node(ctx context.Context, args ...string) (string, error) {
	n.t.Helper()
	out := &logFile{}
	err := run(ctx, append([]string{"node", args[0], "--gateway", n.Base}, args[1:]...), out)
	return out.String(), err
}

// operate runs `stagecoach node`, which must succeed.
func (n *nodesRig) operate(args ...string) string {
	n.t.Helper()
	out, err := n.node(n.t.Context(), args...)
	if err != nil {
		n.t.Fatalf("node %q: %v\n%s", args, err, out)
	}
	return out
}

// status is the status of a node as the API says it.
func (n *nodesRig) status(name string) string {
	n.t.Helper()
	var all []schema.Node
	if err := n.Get(n.t.Context(), "/system/nodes", &all); err != nil {
		n.t.Fatal(err)
	}
	i := slices.IndexFunc(all, func(n schema.Node) bool { return n.Name == name })
	if i < 0 {
		return "unknown"
	}
	status := all[i].Status
	if all[i].Cordoned && status == schema.NodeSilent {
		status += ", cordoned"
	}
	return status
}

// later sends asynchronous requests, one after the other, until it is stopped. It counts callbacks.
type later struct {
	mu             sync.Mutex
	accepted, told int
	wrong          []string
	stop           chan struct{}
	wg             sync.WaitGroup
}

func (n *nodesRig) later(function string) *later {
	l := &later{stop: make(chan struct{})}
	back := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		l.mu.Lock()
		defer l.mu.Unlock()
		l.told++
		if s := r.Header.Get("X-Function-Status"); s != "200" || string(b) != "hello" {
			l.wrong = append(l.wrong, fmt.Sprintf("callback: status %s, %q", s, b))
		}
	}))
	n.t.Cleanup(back.Close)
	l.wg.Go(func() {
		for {
			select {
			case <-l.stop:
				return
			default:
			}
			a, err := n.trySend(http.MethodPost, "/async-function/"+function, "hello", "X-Callback-Url", back.URL)
			l.mu.Lock()
			l.accepted++
			if err != nil || a.Status != http.StatusAccepted {
				l.wrong = append(l.wrong, fmt.Sprintf("async: status %d, %v", a.Status, err))
			}
			l.mu.Unlock()
		}
	})
	return l
}

// end returns when every accepted request has had its callback.
func (l *later) end(n *nodesRig) (accepted int, wrong []string) {
	close(l.stop)
	l.wg.Wait()
	n.until(late, "all callbacks", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.told >= l.accepted
	})
	return l.accepted, l.wrong
}

// least returns the smallest number of ready replicas of a function that its timeline shows after
// it first had as many as wanted.
func (n *nodesRig) least(function string, wanted int) int {
	ready, least, full := 0, wanted, false
	for _, e := range n.line(function).Events {
		switch e.Kind {
		case "ready":
			ready++
			full = full || ready >= wanted
		case "draining", "lost":
			ready--
			if full {
				least = min(least, ready)
			}
		}
	}
	return least
}

// TestDrainLosesNothing drains one node after the other, under load of all kinds. No request may
// fail or be tried again, and functions keep as many ready replicas as they had.
func TestDrainLosesNothing(t *testing.T) {
	t.Parallel()
	n := startNodes(t, "--no-node")
	n.daemon("n1")
	n.daemon("n2")
	n.deployAll(waitFn("hold", "20ms", map[string]string{"min": "4", "max": "4"}, nil),
		waitFn("first", "10ms", map[string]string{"min": "2", "max": "2"}, map[string]string{"pipeline": "two", "next": "second"}),
		waitFn("second", "10ms", map[string]string{"min": "2", "max": "2"}, map[string]string{"pipeline": "two"}),
		httpFn("web", map[string]string{"min": "2", "max": "2"}),
		fn{"echo", "noop", map[string]string{"min": "2", "max": "2"}, nil, nil})
	want := map[string]int{"hold": 4, "first": 2, "second": 2, "web": 2, "echo": 2}
	for f, count := range want {
		n.steady(f, count, "n1", "n2")
	}
	isBody := func(body string, a client.Answer) error {
		if a.Status != http.StatusOK || string(a.Body) != body {
			return fmt.Errorf("status %d, %.200q", a.Status, a.Body)
		}
		return nil
	}
	loads := []*load{n.load(2, "/function/hold", waited), n.load(1, "/function/two", waited), n.load(1, "/function/web/echo", isBody)}
	async := n.later("echo")
	for _, l := range loads {
		l.turn()
	}
	for _, step := range [][2]string{{"n2", "n1"}, {"n1", "n2"}} {
		from, to := step[0], step[1]
		begun := time.Now()
		out := n.operate("drain", from, "--timeout", "2m")
		t.Logf("%s is drained after %v:\n%s", from, time.Since(begun).Round(time.Millisecond), out)
		if !strings.Contains(out, "node "+from+" is drained") {
			t.Errorf("drain says %q", out)
		}
		inv, _ := n.inventory(from)
		if len(inv.Replicas)+len(inv.Zygotes) > 0 || n.status(from) != "drained" {
			t.Errorf("%s is %s, with %d replicas and %d zygotes, want drained with none", from, n.status(from), len(inv.Replicas), len(inv.Zygotes))
		}
		for f, count := range want {
			n.steady(f, count, to)
		}
		for _, l := range loads {
			l.turn()
		}
		n.operate("uncordon", from)
		if s := n.status(from); s != "ready" {
			t.Errorf("%s is %s, want ready", from, s)
		}
	}
	for i, l := range loads {
		requests, wrong := l.end()
		for _, w := range wrong {
			t.Error(w)
		}
		t.Logf("load %d: %d requests, slowest answer %v", i, requests, l.slowest)
	}
	accepted, wrong := async.end(n)
	for _, w := range wrong {
		t.Error(w)
	}
	t.Logf("%d asynchronous requests", accepted)
	for f, count := range want {
		if lost := n.events(f, "lost"); len(lost) > 0 {
			t.Errorf("%s: replicas were lost: %+v", f, lost)
		}
		if least := n.least(f, count); least < count {
			t.Errorf("%s had %d ready replicas, want %d all the time", f, least, count)
		}
	}
	if retries := n.value("stagecoach_flow_retries_total"); retries != 0 {
		t.Errorf("%v calls were retried, want none", retries)
	}
}

// TestDrainSaysWhatItWaitsFor drains a node when no other node has room, and when a call runs for
// long. In the end, force ends the call's replica, and the call runs again elsewhere.
func TestDrainSaysWhatItWaitsFor(t *testing.T) {
	t.Parallel()
	n := startNodes(t, "--no-node")
	n.daemon("n1")
	n.daemon("n2")
	n.operate("cordon", "n2")
	n.deployAll(waitFn("hold", "10s", map[string]string{"min": "1", "max": "1"}, nil))
	n.steady("hold", 1, "n1")
	if on := n.running("n2", "hold"); len(on) > 0 {
		t.Errorf("%v run on n2, which was cordoned", on)
	}
	out, err := n.node(t.Context(), "drain", "n1", "--timeout", "2s")
	const room = "waits for hold.openfaas-fn: no other node has room (none of 2 nodes takes a replica; n1: an operator drains it; n2: it is cordoned)"
	if err == nil || !strings.Contains(out, room) || !strings.Contains(err.Error(), "n1 is not drained after 2s: 1 replica left; "+room) {
		t.Errorf("drain without room: %v\n%s", err, out)
	}
	n.must(http.StatusOK, http.MethodPost, "/function/hold", "x")

	answer := make(chan client.Answer, 1)
	go func() {
		a, _ := n.trySend(http.MethodPost, "/function/hold", "x", "X-Call-Id", "long")
		answer <- a
	}()
	n.until(soon, "the call to run", func() bool { return n.line("hold").Running == 1 })
	n.operate("uncordon", "n2")
	out, err = n.node(t.Context(), "drain", "n1", "--timeout", "3s", "--force", "--keep-parameters")
	if err != nil || !strings.Contains(out, "waits for call long.") || !strings.Contains(out, " of hold.openfaas-fn, running for ") || !strings.Contains(out, "3s are over; ending what is left: 1 replica left") {
		t.Errorf("drain by force: %v\n%s", err, out)
	}
	if a := <-answer; a.Status != http.StatusOK {
		t.Errorf("the call that was ended has status %d: %s, want it to run again on n2", a.Status, a.Body)
	}
	if inv, _ := n.inventory("n1"); len(inv.Replicas) > 0 || len(inv.Zygotes) == 0 {
		t.Errorf("n1 has %d replicas and %d zygotes, want none, and the parameters", len(inv.Replicas), len(inv.Zygotes))
	}

	ctx, cancel := context.WithCancel(t.Context())
	cancelled := make(chan error, 1)
	go func() { _, err := n.node(ctx, "drain", "n2"); cancelled <- err }()
	n.until(soon, "n2 to be drained", func() bool { return n.status("n2") == "draining" })
	cancel()
	if err := <-cancelled; err == nil || !strings.Contains(err.Error(), "the drain of n2 goes on") {
		t.Errorf("interrupted: %v", err)
	}
	if s := n.status("n2"); s != "draining" {
		t.Errorf("n2 is %s after the wait was interrupted, want draining", s)
	}
}

// TestCordonSurvives kills `up` and a daemon, one after the other. The cordon holds until it is
// lifted.
func TestCordonSurvives(t *testing.T) {
	t.Parallel()
	n := startNodes(t, "--no-node")
	d1 := n.daemon("n1")
	n.daemon("n2")
	n.deployAll(waitFn("before", "1ms", map[string]string{"min": "2", "max": "2"}, nil))
	n.steady("before", 2, "n1", "n2")
	if out := n.operate("cordon", "n1"); out != "node n1 is cordoned: it takes no new replicas\n" {
		t.Errorf("cordon says %q", out)
	}
	n.operate("cordon", "n1")
	n.steady("before", 2, "n1", "n2")
	if on := n.running("n1", "before"); len(on) != 1 {
		t.Errorf("n1 runs %v, want the replica that it had", on)
	}
	n.end9()
	n.restart()
	n.until(soon, "n1 to be back", func() bool { return n.status("n1") == "cordoned" })
	n.deployAll(waitFn("after", "1ms", map[string]string{"min": "3", "max": "3"}, nil))
	n.steady("after", 3, "n2")
	kill9(t, d1.Cmd.Process.Pid)
	<-d1.Done
	n.until(soon, "n1 to be silent", func() bool { return n.status("n1") == "silent, cordoned" })
	if out := n.operate("list"); !strings.Contains(strings.Join(strings.Fields(out), " "), "n1 daemon silent since ") {
		t.Errorf("list says\n%s", out)
	}
	n.restartDaemon(d1)
	n.until(soon, "n1 to be back", func() bool { return n.status("n1") == "cordoned" })
	if out := n.operate("describe", "n1"); !strings.Contains(strings.Join(strings.Fields(out), " "), "Status: cordoned, for ") {
		t.Errorf("describe says\n%s", out)
	}
	if on := slices.Concat(n.running("n1", "before"), n.running("n1", "after")); len(on) > 0 {
		t.Errorf("n1 runs %v, want nothing new", on)
	}
	n.operate("uncordon", "n1")
	if out := n.operate("uncordon", "n1"); out != "node n1 takes new replicas\n" {
		t.Errorf("uncordon says %q", out)
	}
	n.deployAll(waitFn("late", "1ms", map[string]string{"min": "2", "max": "2"}, nil))
	n.steady("late", 2, "n1", "n2")
	if on := n.running("n1", "late"); len(on) != 1 {
		t.Errorf("n1 runs %v, want one of two", on)
	}
}

// TestRemoveNode removes nodes that are in use, drained, silent and unknown, and sends bad orders.
func TestRemoveNode(t *testing.T) {
	t.Parallel()
	n := startNodes(t)
	host := defaultConfig().Node.Name
	d1, d2 := n.daemon("n1"), n.daemon("n2")
	n.operate("cordon", host) // the node inside up
	n.deployAll(waitFn("hold", "1ms", map[string]string{"min": "2", "max": "2"}, nil))
	n.steady("hold", 2, "n1", "n2")
	for _, tc := range []struct {
		method, path, body string
		status             int
		want               string
	}{
		{"POST", "/system/nodes/n9/cordon", "", 404, `node "n9": no node of this name, want one of: `},
		{"POST", "/system/nodes/a%20b/cordon", "", 400, `name: got "a b", want the name of a node`},
		{"POST", "/system/nodes/" + strings.Repeat("x", 300) + "/drain", "", 400, "want the name of a node"},
		{"POST", "/system/nodes/n1/drain", `{"forse": true}`, 400, `body: got json: unknown field "forse"`},
		{"GET", "/system/nodes/n1/drain", "", 409, "it is not being drained; `stagecoach node drain n1` drains it"},
		{"DELETE", "/system/nodes/n1", "", 409, "it has 1 replicas, such as hold-"},
		{"DELETE", "/system/nodes/" + host, "", 409, "it is a part of `stagecoach up`"},
		{"DELETE", "/system/nodes/n9", "", 404, "no node of this name"},
		{"GET", "/system/nodes/n9", "", 404, "no node of this name"},
		{"POST", "/system/nodes/n1", "", 405, ""},
	} {
		a := n.must(tc.status, tc.method, tc.path, tc.body)
		if !strings.Contains(string(a.Body), tc.want) {
			t.Errorf("%s %s: %s, want %q", tc.method, tc.path, a.Body, tc.want)
		}
	}
	n.operate("drain", "n2")
	n.operate("drain", "n2") // again
	n.steady("hold", 2, "n1")
	n.operate("remove", "n2")
	if err := <-d2.Done; err == nil || !strings.Contains(d2.log.String(), "an operator removed the node") {
		t.Errorf("n2's daemon ended with %v, want that it was refused", err)
	}
	d2.Process = nil
	n.must(http.StatusNotFound, http.MethodGet, "/system/nodes/n2", "")
	n.restartDaemon(d2)
	n.until(soon, "n2 to be back", func() bool { return n.status("n2") == "ready" })

	t.Log("n1 falls silent with replicas")
	if err := d1.Cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	n.until(soon, "n1 to be silent", func() bool { return n.status("n1") == "silent" })
	if a := n.must(http.StatusConflict, http.MethodDelete, "/system/nodes/n1", ""); !strings.Contains(string(a.Body), "replicas that may still serve") {
		t.Errorf("remove: %s", a.Body)
	}
	n.operate("drain", "n1", "--timeout", "0s", "--force")
	n.operate("remove", "n1")
	n.must(http.StatusNotFound, http.MethodGet, "/system/nodes/n1", "")
	n.steady("hold", 2, "n2")
	if err := d1.Cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	n.until(soon, "n1 to join again", func() bool { return n.status("n1") == "ready" })
	n.operate("uncordon", host)
}
