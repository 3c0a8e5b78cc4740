package node_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

func keeps(cfg *node.ServerConfig) { cfg.Keep = limit }

func keepsReplicas(cfg *node.DirectoryConfig) { cfg.Keep = true }

// greet has a replica and its new owner greet each other.
func greet(t *testing.T, owner wire.Socket, replica *wire.Conn, first bool) *wire.Conn {
	t.Helper()
	c := wire.NewConn(owner)
	t.Cleanup(func() { _ = c.Close() })
	if first {
		hello := wire.Hello{Oldest: wire.OldestVersion, Newest: wire.Version, Slots: 1, MaxBatch: 1}
		write(t, replica, wire.Frame{Type: wire.FrameHello, Payload: hello.Append(nil)})
	}
	expect(t, c, wire.FrameHello)
	write(t, c, wire.Frame{Type: wire.FrameWelcome, Payload: wire.Welcome{Version: wire.Version, Credit: 100}.Append(nil)})
	if first {
		expect(t, replica, wire.FrameWelcome)
	} else {
		expect(t, c, wire.FrameCredit)
	}
	return c
}

func write(t *testing.T, c *wire.Conn, f wire.Frame) {
	t.Helper()
	if err := c.Write(f); err != nil {
		t.Fatal(err)
	}
}

func expect(t *testing.T, c *wire.Conn, kind wire.FrameType) wire.Frame {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(limit))
	f, err := c.Read()
	if err != nil || f.Type != kind {
		t.Fatalf("frame %v, %v, want %v", f.Type, err, kind)
	}
	return f
}

// call has an owner call a replica.
func call(t *testing.T, owner, replica *wire.Conn) {
	t.Helper()
	write(t, owner, wire.Frame{Type: wire.FrameBatch, Batch: 1, Payload: wire.Batch{Calls: make([]wire.Call, 1)}.Append(nil)})
	got := expect(t, replica, wire.FrameBatch)
	write(t, replica, wire.Frame{Type: wire.FrameResult, Batch: got.Batch, Payload: wire.Result{}.Append(nil)})
	if f := expect(t, owner, wire.FrameResult); f.Batch != 1 {
		t.Errorf("answer of batch %d, want 1", f.Batch)
	}
}

// TestNextControlPlaneTakesReplicasOver has a second control plane take over a replica whose first
// one has gone. A third one takes it over while the second one has it. All of them use the unix
// socket, or the tunnel.
func TestNextControlPlaneTakesReplicasOver(t *testing.T) {
	boot, err := node.BootID()
	if err != nil {
		t.Fatal(err)
	}
	for link, change := range map[node.Link]func(*node.ServerConfig){
		node.LinkUnix: func(cfg *node.ServerConfig) { cfg.Me.Boot = boot },
		node.LinkTLS:  func(*node.ServerConfig) {},
	} {
		t.Run(string(link), func(t *testing.T) {
			b := startBroker(t)
			f, c := b.joinFar("n1", keeps, change)
			n := c.node("n1")
			started, err := n.Start(within(t), node.Order{Replica: "r-1", Spec: spec, Claim: node.Claim{Revision: 7, Home: "here"}}, nil)
			if err != nil {
				t.Fatal(err)
			}
			replica := f.replica(t, "r-1")
			first := greet(t, started.Conn, replica, true)
			call(t, first, replica)
			if got := n.Inventory().Link; got != link {
				t.Errorf("link %q, want %q", got, link)
			}
			told := func(revision uint64, home string) func() bool {
				return func() bool {
					all := n.Inventory().Replicas
					return len(all) == 1 && all[0].Kept && all[0].Revision == revision && all[0].Home == home
				}
			}
			c.wait("the node to announce the replica", told(7, "here"))
			_ = first.Close()

			conn, err := n.Adopt(within(t), node.Order{Replica: "r-1", Spec: spec, Claim: node.Claim{Revision: 7, Home: "there"}})
			if err != nil {
				t.Fatal(err)
			}
			second := greet(t, conn, replica, false)
			call(t, second, replica)
			c.wait("the node to announce what the next one has said", told(7, "there"))
			if conn, err = n.Adopt(within(t), node.Order{Replica: "r-1", Spec: spec, Claim: node.Claim{Revision: 8, Home: "there"}}); err != nil {
				t.Fatal(err)
			}
			third := greet(t, conn, replica, false)
			_ = second.SetReadDeadline(time.Now().Add(limit))
			if _, err := second.Read(); !errors.Is(err, io.EOF) {
				t.Errorf("the owner that was replaced gets %v, want EOF", err)
			}
			call(t, third, replica)

			if err := n.Stop(within(t), "r-1", time.Second); err != nil {
				t.Error(err)
			}
			_ = replica.Close()
			if _, err := third.Read(); !errors.Is(err, io.EOF) {
				t.Errorf("after the replica's end: %v, want EOF", err)
			}
			c.wait("the replica to be gone", func() bool { return len(n.Inventory().Replicas) == 0 })
			if _, err := n.Adopt(within(t), node.Order{Replica: "r-1", Spec: spec, Claim: node.Claim{Revision: 8, Home: "there"}}); err == nil || !strings.Contains(err.Error(), `replica "r-1" cannot be taken over: it has ended`) {
				t.Errorf("a replica that has ended: %v", err)
			}
		})
	}
}

// wait waits for a condition that announcements change.
func (c *cluster) wait(what string, done func() bool) {
	c.t.Helper()
	for deadline := time.Now().Add(limit); ; {
		since := c.mark()
		if done() {
			return
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("waited %v for %s", limit, what)
		}
		c.until(since, "heard")
	}
}

// TestUnwantedReplicasAreStopped checks that a replica is stopped when no control plane has it for
// too long, and that an older control plane cannot take it over.
func TestUnwantedReplicasAreStopped(t *testing.T) {
	b := startBroker(t)
	w := newWorker()
	d := b.join("n1", w, func(cfg *node.ServerConfig) { cfg.Keep = time.Second })
	var epoch atomic.Uint64
	epoch.Store(5)
	c := b.watch(func(cfg *node.DirectoryConfig) {
		cfg.Keep, cfg.Epoch = true, func() (uint64, error) { return epoch.Load(), nil }
	})
	n := c.node("n1")
	started, err := n.Start(within(t), node.Order{Replica: "r-1", Spec: spec}, nil)
	if err != nil {
		t.Fatal(err)
	}
	epoch.Store(4)
	if _, err := n.Adopt(within(t), node.Order{Replica: "r-1", Spec: spec, Claim: node.Claim{Revision: 1, Home: ""}}); err == nil || !strings.Contains(err.Error(), "the node has seen epoch 5") {
		t.Errorf("an older control plane: %v", err)
	}
	_ = started.Conn.Close()
	w.until(t, "the replica to be stopped", func() bool { return len(w.of(node.OrderStop)) == 1 })
	d.stop()
}

// TestOldEpochsReplaceNoOwner checks that a control plane does not get a replica if a newer one has
// become its owner in the meantime.
func TestOldEpochsReplaceNoOwner(t *testing.T) {
	b := startBroker(t)
	w := newWorker()
	var gateway atomic.Value
	d := b.join("n1", w, keeps, func(cfg *node.ServerConfig) { cfg.Claimed = func(at string) { gateway.Store(at) } })
	var mine reign
	n := b.watch(keepsReplicas, mine.of(5)).node("n1")
	adopt := func(order node.Order) (wire.Socket, error) {
		order.Replica, order.Spec = "r-1", spec
		return n.Adopt(within(t), order)
	}
	started, err := n.Start(within(t), node.Order{Replica: "r-1", Spec: spec}, nil)
	if err != nil {
		t.Fatal(err)
	}
	replica := w.replica(t, "r-1")
	first := greet(t, started.Conn, replica, true)
	call(t, first, replica)

	near, far := net.Pipe()
	_ = near.SetDeadline(time.Now().Add(limit))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		node.ServeStream(d.Server, []byte(`{"v":1,"want":"socket","replica":"r-1","epoch":5,"keep":true,"adopt":true,"gateway":"old","revision":1,"home":"old"}`), far)
		_ = far.Close()
	}()
	// The daemon has admitted the request when the first byte of its reply comes.
	if _, err := io.ReadFull(near, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	mine.epoch.Store(6)
	conn, err := adopt(node.Order{Claim: node.Claim{Revision: 2, Home: "new"}})
	if err != nil {
		t.Fatal(err)
	}
	owner := greet(t, conn, replica, false)
	call(t, owner, replica)
	at := gateway.Load()
	reply, err := io.ReadAll(near)
	if err != nil || bytes.Count(reply, []byte("\n")) != 1 || bytes.Contains(reply, []byte("error")) {
		t.Errorf("the older one gets %q, %v, want a reply, no frames, and the end", reply, err)
	}
	_ = near.Close()
	<-ended
	call(t, owner, replica)
	if got := gateway.Load(); got != at || got == "old" {
		t.Errorf("gateway %q, want %q", got, at)
	}
}

// TestHeldReplicasEndWithTheirDaemon checks that a daemon that ends closes the sockets that it has.
func TestHeldReplicasEndWithTheirDaemon(t *testing.T) {
	b := startBroker(t)
	w := newWorker()
	d := b.join("n1", w, keeps)
	n := b.watch(keepsReplicas).node("n1")
	started, err := n.Start(within(t), node.Order{Replica: "r-1", Spec: spec}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer started.Conn.Close()
	replica := w.replica(t, "r-1")
	d.stop()
	for end, c := range map[string]*wire.Conn{"replica": replica, "owner": wire.NewConn(started.Conn)} {
		_ = c.SetReadDeadline(time.Now().Add(limit))
		if _, err := c.Read(); !errors.Is(err, io.EOF) {
			t.Errorf("the %s gets %v, want EOF", end, err)
		}
	}
	if n := len(w.of(node.OrderStop)); n > 0 {
		t.Errorf("%d stops: the next daemon decides about the replica", n)
	}
}

// TestListener checks that a process that stood by has the nodes at once, without their next
// announcements.
func TestListener(t *testing.T) {
	b := startBroker(t)
	l, err := node.Listen(b.link("standby"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	b.join("n1", newWorker())
	b.join("n2", newWorker()).stop() // says that it is gone
	proctest.Until(t, "one node to be heard", func() bool { return len(l.Heard(time.Hour)) == 1 })
	if got := l.Heard(-time.Second); len(got) > 0 {
		t.Errorf("%d nodes were heard in the future", len(got))
	}
	first := l.Heard(time.Hour)
	first["n3"] = first["n1"] // the name is another one, so it never joins
	c := b.watch(func(cfg *node.DirectoryConfig) {
		cfg.First, cfg.Bus = first, unhearing{cfg.Bus}
	})
	ctx, cancel := context.WithCancel(within(t))
	defer cancel()
	done := make(chan []string, 1)
	go func() { done <- c.Await(ctx, l.Complete()) }()
	c.until(0, "heard n1")
	select {
	case got := <-done:
		t.Errorf("n3 is not awaited; missing are %v", got)
	case <-time.After(20 * time.Millisecond):
	}
	cancel()
	if got := <-done; len(got) != 1 || got[0] != "n3" {
		t.Errorf("missing are %v, want n3", got)
	}
}

// TestRefusedNodesAreNotAwaited checks that Await does not wait for a node that follows a newer
// control plane, because that node never joins.
func TestRefusedNodesAreNotAwaited(t *testing.T) {
	b := startBroker(t)
	newer := b.watch(new(reign).of(9))
	b.join("n1", newWorker())
	if _, err := newer.node("n1").Do(within(t), node.Order{Kind: node.OrderForget, Function: "f"}); err != nil {
		t.Fatal(err)
	}
	newer.wait("the node to announce the epoch", func() bool { return newer.node("n1").Inventory().Epoch == 9 })
	l, err := node.Listen(b.link("standby"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	proctest.Until(t, "the node to be heard", func() bool { return len(l.Heard(time.Hour)) == 1 })
	older := b.watch(new(reign).of(8), func(cfg *node.DirectoryConfig) { cfg.First = l.Heard(time.Hour) })
	if got := older.Await(within(t), time.Time{}); len(got) > 0 {
		t.Errorf("missing are %v, want none", got)
	}
	if n := len(older.Clients()); n > 0 {
		t.Errorf("%d nodes have joined, want none", n)
	}
}

// unhearing hears no announcements.
type unhearing struct{ node.Bus }

func (d unhearing) Listen(name, kind string, f func(node, reply string, data []byte)) (func(), error) {
	if kind == "inventory" {
		return func() {}, nil
	}
	return d.Bus.Listen(name, kind, f)
}
