package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/image/transfer"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/items"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/tunnel"
	"github.com/stagecoach-serving/stagecoach/request/gateway"
)

// tunnelConfig says how processes on other machines reach a node.
type tunnelConfig struct {
	listen    string // host:port; empty: they do not
	advertise string // host:port that they dial; empty: listen's
	remote    bool   // processes of this machine use it, too
	items     Bytes  // memory for large outputs that other nodes get
}

// defaultItems is the default of --items.
const defaultItems = 512 << 20

func (c *tunnelConfig) addFlags(fs *flag.FlagSet) {
	fs.StringVar(&c.listen, "listen", "", "host:port where control planes on other machines reach the node, with TLS; default nowhere")
	fs.StringVar(&c.advertise, "advertise", "", "host:port that they dial, if it is not that of --listen")
	c.items = defaultItems
	fs.Func("items", "memory for large outputs of replicas that other nodes get from this one, with --listen; items from other nodes may use as much again; 0: large outputs go through the control plane; default 512Mi", func(s string) error {
		return c.items.UnmarshalText([]byte(s))
	})
	fs.BoolVar(&c.remote, "remote", false, "be a node on another machine for a control plane on this one, too, such as in a container")
}

func (c *tunnelConfig) validate(bad func(flag string, got any, want string)) {
	host, port, err := net.SplitHostPort(c.listen)
	switch {
	case c.listen == "" && c.remote:
		bad("remote", true, "--listen, too")
	case c.listen == "" && c.advertise != "":
		bad("advertise", c.advertise, "--listen, too")
	case c.listen != "" && (err != nil || port == ""):
		bad("listen", fmt.Sprintf("%q", c.listen), "host:port, such as 10.0.0.7:7070")
	case c.listen != "" && c.advertise == "" && !dialable(host):
		bad("listen", fmt.Sprintf("%q", c.listen), "--advertise HOST:PORT, too: others cannot dial all addresses")
	}
	if host, port, err := net.SplitHostPort(c.advertise); c.advertise != "" && (err != nil || port == "" || !dialable(host)) {
		bad("advertise", fmt.Sprintf("%q", c.advertise), "host:port that others can dial, such as gpu-7.example:7070")
	}
}

// dialable reports whether a host is a name or the address of one machine.
func dialable(host string) bool {
	ip, err := netip.ParseAddr(host)
	return host != "" && (err != nil || !ip.IsUnspecified())
}

// farSide is a daemon's side of connections with control planes on other machines.
type farSide struct {
	d       *daemon
	tunnel  *tunnel.Tunnel
	address string // that is announced
	meets   string // path of the socket for watchdogs
	inside  string // address where functions call functions; empty: none
	secrets *nodeSecrets
	items   *items.Carrier
}

// openTunnel listens for control planes, if it is configured. Handlers follow with serveTunnel.
func (d *daemon) openTunnel() error {
	if d.cfg.tunnel.listen == "" {
		return nil
	}
	f := &farSide{d: d, tunnel: tunnel.New(tunnel.Config{Source: d.source, Log: d.log, Until: nodeUntil})}
	d.onClose(f.tunnel.Close)
	if err := d.metrics.Register(newTunnelMetrics(f.tunnel)); err != nil {
		return err
	}
	if err := f.openItems(); err != nil {
		return err
	}
	at, err := f.tunnel.Listen(d.cfg.tunnel.listen)
	if err != nil {
		return fmt.Errorf("--listen: %w", err)
	}
	if f.address = d.cfg.tunnel.advertise; f.address == "" {
		host, _, _ := net.SplitHostPort(d.cfg.tunnel.listen)
		_, port, _ := net.SplitHostPort(at.String())
		f.address = net.JoinHostPort(host, port)
	}
	if h, ok := d.source.(*identity.Holder); ok {
		d.onClose(cutRevoked(f.tunnel, h))
	}
	d.far = f
	return f.openRendezvous()
}

// nodeUntil implements tunnel.Until for a node. A node cannot know which other nodes have renewed
// their certificates. If a connection with one is cut, what is under way comes from the control
// plane. A control plane always has a certificate.
func nodeUntil(peer identity.Name) time.Time {
	if peer.Role == identity.Control {
		return time.Now().Add(time.Hour)
	}
	return time.Time{}
}

// farAddress returns the address that the daemon announces; empty: none.
func (d *daemon) farAddress() string {
	if d.far == nil {
		return ""
	}
	return d.far.address
}

// serveTunnel serves what control planes ask for. The parts of the daemon are open.
func (d *daemon) serveTunnel(images *transfer.Server) {
	if d.far == nil {
		return
	}
	sweep, cancel := context.WithCancel(context.Background())
	var sweeps sync.WaitGroup
	sweeps.Go(func() { d.far.secrets.sweep(sweep, d.keys.Inventory) })
	d.onClose(func() { cancel(); sweeps.Wait() })
	ofControl := func(h tunnel.Handler) tunnel.Handler {
		return func(ctx context.Context, peer identity.Name, first json.RawMessage, c net.Conn) {
			if peer.Role != identity.Control {
				_ = tunnel.Refuse(c, fmt.Errorf("%v is no control plane", peer))
				return
			}
			h(ctx, peer, first, c)
		}
	}
	for _, want := range node.Wants() {
		d.far.tunnel.Handle(want, ofControl(func(_ context.Context, _ identity.Name, first json.RawMessage, c net.Conn) {
			node.ServeStream(d.server, first, c)
		}))
	}
	d.far.tunnel.Handle(wantImages, servesImages(images))  // to nodes, too
	d.far.tunnel.Handle(items.WantItem, d.far.items.Serve) // to nodes, too
	d.far.tunnel.Handle(items.WantDrop, d.far.items.ServeDrop)
	d.far.tunnel.Handle(wantSecrets, ofControl(func(_ context.Context, _ identity.Name, _ json.RawMessage, c net.Conn) {
		d.far.secrets.serve(c)
	}))
}

// openParts opens what processes of this machine get in place of what is on the control plane's.
func (f *farSide) openParts(users accounts, n networks) error {
	if f == nil {
		return nil
	}
	if err := f.openSecrets(users); err != nil {
		return err
	}
	return f.openInside(n)
}

// openRendezvous opens the socket where watchdogs meet gateways on other machines. A connection
// begins with a line that has the control plane's name.
func (f *farSide) openRendezvous() error {
	folder := filepath.Join(f.d.cfg.state, "run")
	// The path of a socket must be short.
	if abs, err := filepath.Abs(folder); err != nil || len(abs) > gateway.MaxFolder {
		if folder, err = os.MkdirTemp("", "stagecoach-"); err != nil {
			return fmt.Errorf("rendezvous: %w", err)
		}
		f.d.onClose(func() { _ = os.RemoveAll(folder) })
	} else {
		folder = abs
	}
	f.meets = filepath.Join(folder, "http")
	err := os.MkdirAll(folder, 0o700)
	if err == nil {
		if err = os.Remove(f.meets); errors.Is(err, os.ErrNotExist) {
			err = nil
		}
	}
	var l net.Listener
	if err == nil {
		l, err = net.Listen("unix", f.meets)
	}
	if err != nil {
		return fmt.Errorf("rendezvous: %w", err)
	}
	r := newRelay(l, func(ctx context.Context, c net.Conn) (net.Conn, error) {
		name, err := shortLine(c)
		if err != nil {
			return nil, err
		}
		to := identity.Name{Cluster: f.d.source.Me().Cluster, Role: identity.Control, Name: name}
		return f.open(ctx, to, wants(wantRendezvous))
	})
	f.d.onClose(r.close)
	return nil
}

// shortLine reads a line of at most 253 bytes, and nothing behind it.
func shortLine(c net.Conn) (string, error) {
	var line []byte
	var b [1]byte
	for len(line) <= 253 {
		if _, err := c.Read(b[:]); err != nil {
			return "", err
		}
		if b[0] == '\n' {
			return string(line), nil
		}
		line = append(line, b[0])
	}
	return "", errors.New("a name of more than 253 bytes")
}

// open opens a stream to a control plane over the connection that it has made.
func (f *farSide) open(ctx context.Context, to identity.Name, first any) (net.Conn, error) {
	c, err := f.tunnel.Open(ctx, to, "", first)
	if err != nil {
		f.d.log.Warn("failed to reach a control plane for a function", "error", err)
	}
	return c, err
}

// neighbourTime bounds how long a fetch waits for a connection to another node. A firewall may let
// only control planes through.
const neighbourTime = 3 * time.Second

// dialImages opens a connection to a process that serves images.
func (d *daemon) dialImages(ctx context.Context, s node.ImageSource) (net.Conn, error) {
	if s.Local() {
		return node.DialImages(ctx, s)
	}
	if d.far == nil {
		return nil, errors.New("it is on another machine, and this node does not listen for those (--listen)")
	}
	me := d.source.Me()
	if s.Node == "" {
		return d.far.tunnel.Open(ctx, identity.Name{Cluster: me.Cluster, Role: identity.Control, Name: s.Control}, "", wants(wantImages))
	}
	ctx, cancel := context.WithTimeout(ctx, neighbourTime)
	defer cancel()
	c, err := d.far.tunnel.Open(ctx, identity.Name{Cluster: me.Cluster, Role: identity.Node, Name: s.Node}, s.Address, wants(wantImages))
	if err != nil {
		d.log.Warn("a node that has an image is not reached; others are asked", "node", s.Node, "address", s.Address, "error", err)
		err = fmt.Errorf("%w: %w", transfer.ErrUnreachable, err)
	}
	return c, err
}

// gatewayCall is the first line of a stream of kind wantGateway.
type gatewayCall struct {
	tunnel.Request
	From string `json:"from"` // address of the function's process
}

// openInside listens where functions call functions, which a control plane answers.
func (f *farSide) openInside(n networks) error {
	at := n.gateway()
	if at == "" {
		return nil
	}
	l, err := net.Listen("tcp", at)
	if err != nil {
		return fmt.Errorf("listen for functions, which call the gateway at port %d: %w; no other program may listen on that port of all addresses", gatewayPort, err)
	}
	f.inside = at
	r := newRelay(l, func(ctx context.Context, c net.Conn) (net.Conn, error) {
		if f.d.inside.near() != "" {
			return f.d.inside.dial(ctx, c)
		}
		planes := f.tunnel.Peers(identity.Control)
		if len(planes) == 0 {
			return nil, tunnel.ErrNotConnected
		}
		return f.open(ctx, planes[0], gatewayCall{wants(wantGateway), c.RemoteAddr().String()})
	})
	f.d.onClose(r.close)
	return nil
}

// openSecrets opens the folders of secrets that control planes send.
func (f *farSide) openSecrets(users accounts) error {
	abs, err := filepath.Abs(f.d.cfg.state)
	if err != nil {
		return err
	}
	at := secretFolders{values: abs, mounts: filepath.Join(abs, "secret-mounts")}
	if users.open != nil {
		sum := sha256.Sum256([]byte("node " + abs))
		id := hex.EncodeToString(sum[:8])
		at = secretFolders{filepath.Join(sandbox.RunFolder, "values-"+id), filepath.Join(sandbox.RunFolder, "secrets-"+id), func(namespace string, names []string) (int, error) {
			return users.open.Group(fmt.Sprintf("%q of %q with %q", namespace, abs, names))
		}}
	}
	f.secrets, err = openNodeSecrets(at, f.d.log)
	if err != nil {
		return err
	}
	f.d.onClose(func() { f.secrets.close(f.d.stopped) })
	return nil
}

// localize makes those fields of a spec that name something of a machine.
func (f *farSide) localize(s *node.Spec) error {
	if f == nil {
		return errors.New("the order is from another machine, and the node does not listen for those")
	}
	s.Gateway, s.Rendezvous, s.Group = f.inside, f.meets, 0
	if s.Secrets == "" {
		return nil
	}
	folder, group, err := f.secrets.of(s.Function, filepath.Base(s.Secrets))
	if err != nil {
		return err
	}
	env := make(map[string]string, len(s.Env))
	for k, v := range s.Env {
		if strings.HasPrefix(v, s.Secrets) && k == envSecrets {
			v = folder
		}
		env[k] = v
	}
	s.Secrets, s.Group, s.Env = folder, group, env
	return nil
}

// localized returns an order with specs for this machine.
func (f *farSide) localized(o node.Order) (node.Order, error) {
	if !o.Far {
		return o, nil
	}
	if o.Kind == node.OrderStart || o.Kind == node.OrderLoad {
		return o, f.localize(&o.Spec)
	}
	all := append([]node.Wanted(nil), o.Wanted...)
	for i := range all {
		if err := f.localize(&all[i].Spec); err != nil {
			return o, err
		}
	}
	o.Wanted = all
	return o, nil
}
