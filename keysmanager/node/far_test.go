package node_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity/identitytest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/tunnel"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// farNode is a daemon that is reached over a tunnel.
type farNode struct {
	*daemon
	up, own *tunnel.Tunnel
	name    identity.Name
}

// joinFar runs a daemon behind a tunnel, and a cluster that can reach it.
func (b *broker) joinFar(name string, change ...func(*node.ServerConfig)) (*farNode, *cluster) {
	b.t.Helper()
	return b.joinFarTo(name, func(*node.DirectoryConfig) {}, change...)
}

// joinFarTo does the same as joinFar with a change of the directory.
func (b *broker) joinFarTo(name string, directory func(*node.DirectoryConfig), change ...func(*node.ServerConfig)) (*farNode, *cluster) {
	b.t.Helper()
	ca := identitytest.New(b.t, "c1")
	log := slog.New(slog.DiscardHandler)
	f := &farNode{name: identity.Name{Cluster: "c1", Role: identity.Node, Name: name}}
	f.up = tunnel.New(tunnel.Config{Source: ca.Source(identity.Control, "up"), Log: log})
	f.own = tunnel.New(tunnel.Config{Source: ca.Source(identity.Node, name), Log: log})
	addr, err := f.own.Listen("127.0.0.1:0")
	if err != nil {
		b.t.Fatal(err)
	}
	c := b.watch(func(cfg *node.DirectoryConfig) {
		cfg.Dial = func(ctx context.Context, to, at string, first any) (net.Conn, error) {
			return f.up.Open(ctx, identity.Name{Cluster: "c1", Role: identity.Node, Name: to}, at, first)
		}
		keepsReplicas(cfg) // only if the node does, too
		directory(cfg)
	})
	f.daemon = b.join(name, newWorker(), append([]func(*node.ServerConfig){func(cfg *node.ServerConfig) {
		cfg.Me.Boot, cfg.Me.Host, cfg.Address = "another", "far", addr.String()
	}}, change...)...)
	for _, want := range node.Wants() {
		f.own.Handle(want, func(_ context.Context, _ identity.Name, first json.RawMessage, c net.Conn) {
			node.ServeStream(f.Server, first, c)
		})
	}
	b.t.Cleanup(f.own.Close)
	b.t.Cleanup(f.up.Close)
	return f, c
}

// replica returns the replica's end of a stage socket.
func (w *worker) replica(t *testing.T, name string) *wire.Conn {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	s, err := wire.OpenSocket(w.running[name])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return wire.NewConn(s)
}

// passes checks that a frame with a file passes from one end to the other.
func passes(t *testing.T, what string, from, to *wire.Conn) {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "")
	if err == nil {
		_, err = f.WriteString("in a file")
	}
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := from.Write(wire.Frame{Type: wire.FrameBatch, Batch: 7, Payload: []byte(what), Files: []*os.File{f}}); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	_ = to.SetReadDeadline(time.Now().Add(limit))
	got, err := to.Read()
	if err != nil || string(got.Payload) != what || len(got.Files) != 1 {
		t.Fatalf("%s: %q with %d files, %v", what, got.Payload, len(got.Files), err)
	}
	defer got.Files[0].Close()
	b := make([]byte, 9)
	if _, err := got.Files[0].ReadAt(b, 0); err != nil || string(b) != "in a file" {
		t.Errorf("%s: the file has %q, %v", what, b, err)
	}
}

// TestFarNode starts a replica on a node on another machine. Frames and files must pass, the end of
// either side must reach the other, and lines must come.
func TestFarNode(t *testing.T) {
	b := startBroker(t)
	f, c := b.joinFar("n1")
	n := c.node("n1")
	start := func(replica string) (near *wire.Conn, far *wire.Conn) {
		started, err := n.Start(within(t), node.Order{Replica: replica, Spec: spec}, nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = started.Conn.Close() })
		return wire.NewConn(started.Conn), f.replica(t, replica)
	}
	near, far := start("r-1")
	passes(t, "to the replica", near, far)
	passes(t, "from the replica", far, near)
	if inv := n.Inventory(); !n.Far() || inv.Link != node.LinkTLS || inv.Address == "" {
		t.Errorf("far: %t, link %q, address %q", n.Far(), inv.Link, inv.Address)
	}
	if _, err := f.up.Open(within(t), f.name, "", struct {
		tunnel.Request
		Replica, Order string
	}{tunnel.Request{V: 1, Want: "socket"}, "r-1", "A"}); err == nil || !strings.Contains(err.Error(), "it was handed out") {
		t.Errorf("claimed again: %v", err)
	}
	if err := n.Stop(within(t), "r-1", time.Second); err != nil {
		t.Error(err)
	}
	_ = far.Close()
	if _, err := near.Read(); !errors.Is(err, io.EOF) {
		t.Errorf("after the replica's end: %v, want EOF", err)
	}

	near, far = start("r-2")
	passes(t, "another one", near, far)
	_ = near.Close()
	_ = far.SetReadDeadline(time.Now().Add(limit))
	if _, err := far.Read(); !errors.Is(err, io.EOF) {
		t.Errorf("after the dispatcher's end: %v, want EOF", err)
	}

	f.Line(node.Line{Replica: "r-2", Text: "hello"})
	c.until(0, `line n1 r-2 "hello" 0`)

	near, far = start("r-3")
	f.up.Drop(f.name)
	for end, conn := range map[string]*wire.Conn{"dispatcher": near, "replica": far} {
		_ = conn.SetReadDeadline(time.Now().Add(limit))
		if _, err := conn.Read(); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("the %s's end after the connection was lost: %v", end, err)
		}
	}
	near, far = start("r-4")
	passes(t, "after the loss", near, far)
	f.Line(node.Line{Replica: "r-4", Text: "again"})
	c.until(0, `line n1 r-4 "again" 0`)
}

// elsewhere announces a socket at a path that is not there, as a daemon in a container does.
type elsewhere struct{ node.Bus }

func (e elsewhere) Send(name, kind, reply string, data []byte) error {
	return e.Bus.Send(name, kind, reply, bytes.ReplaceAll(data, []byte("/node.sock"), []byte("/nosuch.sock")))
}

// TestHowANodeIsReached checks when a node of this machine is reached over its unix socket.
func TestHowANodeIsReached(t *testing.T) {
	boot, err := node.BootID()
	if err != nil {
		t.Fatal(err)
	}
	here := func(cfg *node.ServerConfig) { cfg.Me.Boot = boot }
	for what, tc := range map[string]struct {
		change func(*node.ServerConfig)
		want   node.Link
	}{
		"with a socket":              {here, node.LinkUnix},
		"remote by its flag":         {func(cfg *node.ServerConfig) { here(cfg); cfg.Remote = true }, node.LinkTLS},
		"with a socket out of reach": {func(cfg *node.ServerConfig) { here(cfg); cfg.Bus = elsewhere{cfg.Bus} }, node.LinkTLS},
		"on another machine":         {func(*node.ServerConfig) {}, node.LinkTLS},
	} {
		t.Run(what, func(t *testing.T) {
			b := startBroker(t)
			_, c := b.joinFar("n1", tc.change)
			n := c.node("n1")
			started, err := n.Start(within(t), node.Order{Replica: "r-1", Spec: spec}, nil)
			if err != nil {
				t.Fatal(err)
			}
			_ = started.Conn.Close()
			if got := n.Inventory().Link; got != tc.want {
				t.Errorf("link %q, want %q", got, tc.want)
			}
		})
	}
}
