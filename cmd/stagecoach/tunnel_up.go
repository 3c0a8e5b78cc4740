package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/items"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/tunnel"
	"github.com/stagecoach-serving/stagecoach/provider/secret"
	"github.com/stagecoach-serving/stagecoach/request/gateway"
)

// farNodes is a control plane's side of connections with nodes on other machines.
type farNodes struct {
	tunnel *tunnel.Tunnel
	me     identity.Name
	inside *streams // of functions that call functions
	// apart is when a node without a connection to this process was last heard, in ns since 1970.
	apart atomic.Int64

	mu   sync.Mutex
	sent map[sentTo]bool
}

// sentTo is a folder of secrets that a daemon has got.
type sentTo struct{ node, daemon, function, folder string }

// openTunnel prepares up's connections to nodes on other machines.
func openTunnel(u *up) error {
	source := u.nodes.authority.Source()
	f := &farNodes{tunnel: tunnel.New(tunnel.Config{Source: source, Log: u.log, Until: u.nodes.authority.Until}), me: source.Me(), inside: newStreams(), sent: map[sentTo]bool{}}
	u.onClose(func() error { f.tunnel.Close(); return nil })
	stop := cutRevoked(f.tunnel, source)
	u.onClose(func() error { stop(); return nil })
	ofNodes := func(h tunnel.Handler) tunnel.Handler {
		return func(ctx context.Context, peer identity.Name, first json.RawMessage, c net.Conn) {
			if peer.Role != identity.Node {
				_ = tunnel.Refuse(c, fmt.Errorf("%v is no node", peer))
				return
			}
			h(ctx, peer, first, c)
		}
	}
	f.tunnel.Handle(wantRendezvous, ofNodes(func(ctx context.Context, _ identity.Name, _ json.RawMessage, c net.Conn) {
		if tunnel.Accept(c) == nil {
			l := lend(c)
			u.meeting.Serve(l)
			l.wait(ctx)
		}
	}))
	f.tunnel.Handle(wantGateway, ofNodes(f.inside.serve))
	f.tunnel.Handle(wantImages, ofNodes(servesImages(u.images.share.server)))
	u.store.Reach(f.name(), items.Opener(f.dial()), u.nodes.runs)
	f.tunnel.Handle(items.WantItem, u.store.Relay)
	u.nodes.far = f
	return u.metrics.Register(newTunnelMetrics(f.tunnel))
}

// cutRevoked ends connections with peers whose certificates are revoked, until stop is called.
func cutRevoked(t *tunnel.Tunnel, h *identity.Holder) (stop func()) {
	var checks sync.WaitGroup
	unwatch := h.OnRevoke(func() { checks.Go(func() { t.Check(h.Check) }) })
	return func() { unwatch(); checks.Wait() }
}

// dial implements node.Dial. Without nodes on other machines, it is nil.
func (f *farNodes) dial() node.Dial {
	if f == nil {
		return nil
	}
	return func(ctx context.Context, name, addr string, first any) (net.Conn, error) {
		return f.tunnel.Open(ctx, f.of(name), addr, first)
	}
}

// name returns the name of this control plane; empty: there are no nodes on other machines.
func (f *farNodes) name() string {
	if f == nil {
		return ""
	}
	return f.me.Name
}

func (f *farNodes) of(node string) identity.Name {
	return identity.Name{Cluster: f.me.Cluster, Role: identity.Node, Name: node}
}

// prepare sends a function's secrets to a node before the node starts or loads the function.
func (f *farNodes) prepare(ctx context.Context, c *node.Client, kind node.OrderKind, spec node.Spec) error {
	if spec.Secrets == "" {
		return nil
	}
	inv := c.Inventory()
	to := sentTo{c.Name(), inv.ID, spec.Function, spec.Secrets}
	f.mu.Lock()
	known := f.sent[to]
	f.mu.Unlock()
	if known && kind != node.OrderStart {
		return nil
	}
	return f.send(ctx, to, inv.Address)
}

// send sends the secrets in a folder to a node, as they are now.
func (f *farNodes) send(ctx context.Context, to sentTo, addr string) error {
	b, err := readSecrets(to.function, to.folder)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, streamTime)
	defer cancel()
	c, err := f.tunnel.Open(ctx, f.of(to.node), addr, wants(wantSecrets))
	if err != nil {
		return fmt.Errorf("send secrets: %w", err)
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	_, err = c.Write(b)
	if half, ok := c.(interface{ CloseWrite() error }); ok && err == nil {
		err = half.CloseWrite()
	}
	var answer struct{ Error string }
	if err == nil {
		err = json.NewDecoder(bufio.NewReader(c)).Decode(&answer)
	}
	if err == nil && answer.Error != "" {
		err = errors.New(answer.Error)
	}
	if err != nil {
		return fmt.Errorf("send secrets: %w", err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for old := range f.sent { // of the node's earlier daemons
		if old.node == to.node && old.daemon != to.daemon {
			delete(f.sent, old)
		}
	}
	f.sent[to] = true
	return nil
}

// forgotten notes that a node removes the secrets of a function. Without nodes on other machines,
// it does nothing.
func (f *farNodes) forgotten(node, function string) {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for to := range f.sent {
		if to.node == node && to.function == function {
			delete(f.sent, to)
		}
	}
}

// spreadSecrets is the store of secrets, whose changes reach nodes on other machines.
type spreadSecrets struct {
	*secret.Store
	n *nodes
}

// Put stores a secret. Nodes on other machines get the new value a moment later.
func (s spreadSecrets) Put(namespace, name string, value []byte) error {
	err := s.Store.Put(namespace, name, value)
	if err == nil {
		s.spread(namespace, name)
	}
	return err
}

// spread sends a secret that has changed to the nodes on other machines that have it.
func (s spreadSecrets) spread(namespace, name string) {
	if s.n.far != nil {
		s.n.resend(namespace, name)
	}
}

// resend sends the changed folders of secrets to the nodes that have them.
func (n *nodes) resend(namespace, name string) {
	f := n.far
	f.mu.Lock()
	var all []sentTo
	for to := range f.sent {
		if strings.HasSuffix(to.function, "."+namespace) && there(filepath.Join(to.folder, name)) {
			all = append(all, to)
		}
	}
	f.mu.Unlock()
	for _, to := range all {
		n.group.Go(func() {
			for _, c := range n.clients() {
				if inv := c.Inventory(); c.Name() == to.node && inv.ID == to.daemon {
					if err := f.send(n.ctx, to, inv.Address); err != nil {
						n.log.Warn("a changed secret has not reached a node; it comes with the next start", "node", to.node, "function", to.function, "error", err)
					}
				}
			}
		})
	}
}

// streams is a listener whose connections are streams of the tunnel.
type streams struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func newStreams() *streams { return &streams{conns: make(chan net.Conn), closed: make(chan struct{})} }

// farAddr is the local address of such a connection.
type farAddr struct{}

// Network implements net.Addr.
func (farAddr) Network() string { return "tunnel" }

// String implements net.Addr.
func (farAddr) String() string { return gatewayName }

// farConn is a connection of a function on another machine.
type farConn struct {
	*lent
	from net.Addr
}

// LocalAddr implements net.Conn.
func (farConn) LocalAddr() net.Addr { return farAddr{} }

// RemoteAddr implements net.Conn.
func (c farConn) RemoteAddr() net.Addr { return c.from }

// serve implements tunnel.Handler.
func (s *streams) serve(ctx context.Context, _ identity.Name, first json.RawMessage, c net.Conn) {
	var call gatewayCall
	from, err := (*net.TCPAddr)(nil), json.Unmarshal(first, &call)
	if err == nil {
		from, err = net.ResolveTCPAddr("tcp", call.From)
	}
	if err != nil {
		_ = tunnel.Refuse(c, err)
		return
	}
	if tunnel.Accept(c) != nil {
		return
	}
	l := lend(c)
	select {
	case s.conns <- gateway.StrictConn(farConn{l, from}):
		l.wait(ctx)
	case <-s.closed:
	case <-time.After(streamTime):
	case <-ctx.Done():
	}
}

// Accept implements net.Listener.
func (s *streams) Accept() (net.Conn, error) {
	select {
	case c := <-s.conns:
		return c, nil
	case <-s.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (s *streams) Close() error {
	s.once.Do(func() { close(s.closed) })
	return nil
}

// Addr implements net.Listener.
func (*streams) Addr() net.Addr { return farAddr{} }
