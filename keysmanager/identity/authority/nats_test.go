package authority_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity/authority"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// cluster is an authority with its NATS.
type cluster struct {
	*rig
	dir    string // of the streams
	server *queue.Server
	url    string
	inside *queue.Link
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{rig: newRig(t), dir: t.TempDir(), url: fmt.Sprintf("nats://127.0.0.1:%d", proctest.Ports(t, 1)[0])}
	c.start()
	t.Cleanup(func() { c.server.Close() })
	return c
}

// start starts NATS, again, at its address.
func (c *cluster) start() {
	c.t.Helper()
	c.open()
	var err error
	c.server, err = queue.StartServer(queue.ServerConfig{
		Dir: c.dir, Log: slog.New(slog.NewTextHandler(c.log, nil)), Listen: strings.TrimPrefix(c.url, "nats://"),
		Keys: c.keys, TLS: identity.NATSServer(c.Chain), Revoked: c.RevokedUsers(),
	})
	if err != nil {
		c.t.Fatal(err)
	}
	c.url = c.server.URL()
	nc, err := c.server.Connect("test")
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(nc.Close)
	c.inside = queue.NewLink(nc)
	if _, err := c.Serve(c.inside, queue.NewJoinLink(nc), c.server.Revoke); err != nil {
		c.t.Fatal(err)
	}
}

// connect connects with an access. log gets what the connection logs.
func (c *cluster) connect(a queue.Access, log *buffer) *conn {
	c.t.Helper()
	refused := make(chan error, 1)
	a.Refused = func(err error) {
		select {
		case refused <- err:
		default:
		}
	}
	nc, err := queue.Connect(c.url, a, c.t.Name(), slog.New(slog.NewTextHandler(log, nil)))
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(nc.Close)
	return &conn{queue.NewLink(nc), queue.NewJoinLink(nc), nc, refused}
}

type conn struct {
	nodes, joins *queue.Link
	nc           interface {
		IsConnected() bool
		ForceReconnect() error
	}
	refused chan error
}

// join joins over NATS, and returns the daemon with its connection.
func (c *cluster) join(name string, t identity.Token) (*daemon, error) {
	d := newDaemon(c.t, name, c.t.TempDir(), c.clock)
	j := c.connect(queue.Bearer(t.User, identity.NATSClient(t.CA, c.clock.now)), d.log)
	return d, d.Join(bounded(c.t), j.joins, t)
}

// failsToJoin joins over NATS, until Join returns why it fails or the daemon's log has it.
func (c *cluster) failsToJoin(d *daemon, t identity.Token, why string) {
	c.t.Helper()
	j := c.connect(queue.Bearer(t.User, identity.NATSClient(t.CA, d.clock.now)), d.log)
	ctx, cancel := context.WithCancel(bounded(c.t))
	defer cancel()
	var err error
	ended := make(chan struct{})
	go func() { err = d.Join(ctx, j.joins, t); close(ended) }()
	proctest.Until(c.t, why, func() bool {
		select {
		case <-ended:
			return true
		default:
			return strings.Contains(d.log.String(), why)
		}
	})
	cancel()
	<-ended
	if err == nil || !strings.Contains(err.Error()+d.log.String(), why) {
		c.t.Errorf("%v, want %q in\n%s", err, why, d.log)
	}
}

// until waits until the log has text.
func (b *buffer) until(t *testing.T, text string) {
	t.Helper()
	proctest.Until(t, fmt.Sprintf("%q in the log", text), func() bool { return strings.Contains(b.String(), text) })
}

func (d *daemon) access() queue.Access {
	seed, tls := d.NATS()
	return queue.Access{User: d.User, Seed: seed, TLS: tls}
}

func (c *cluster) member(name string) (*daemon, *conn) {
	c.t.Helper()
	d, err := c.join(name, c.token(authority.TokenRequest{}))
	if err != nil {
		c.t.Fatalf("%v\n%s", err, d.log)
	}
	return d, c.connect(d.access(), d.log)
}

// TestJoinOverNATS joins, connects as the node, restarts the control plane, and renews.
func TestJoinOverNATS(t *testing.T) {
	c := newCluster(t)
	d, nc := c.member("box.example")
	got := make(chan string, 4)
	stop, err := c.inside.Listen("", "inventory", func(name, _ string, data []byte) { got <- name + " " + string(data) })
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	if err := nc.nodes.Send("box.example", "inventory", "", []byte("1")); err != nil {
		t.Fatal(err)
	}
	if m := receive(t, got, d.log); m != "box.example 1" {
		t.Errorf("got %q", m)
	}
	c.clock.forward(lifetime * 3 / 4)
	if renewed, err := d.Sync(bounded(t), nc.nodes); err != nil || !renewed {
		t.Errorf("renewed %t, %v", renewed, err)
	}
	if err := nc.nc.ForceReconnect(); err != nil {
		t.Fatal(err)
	}
	c.server.Close()
	c.start()
	ctx := bounded(t)
	for ctx.Err() == nil { // sending fails until it is back
		if _, err = d.Sync(ctx, nc.nodes); err == nil {
			break
		}
	}
	if err != nil {
		t.Errorf("after a restart: %v\n%s", err, d.log)
	}
}

func receive[T any](t *testing.T, from <-chan T, log *buffer) T {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(limit):
		t.Fatalf("nothing within %v; log:\n%s", limit, log)
		panic("unreachable")
	}
}

// TestOneNodesNATSUserIsNotAnothers listens to and sends messages of other nodes. Package queue's
// tests have the list of what is refused; this one shows that joined nodes have such users.
func TestOneNodesNATSUserIsNotAnothers(t *testing.T) {
	c := newCluster(t)
	_, b := c.member("b")
	a, asA := c.member("a")
	orders, stolen := make(chan string, 1), make(chan string, 1)
	for _, l := range []struct {
		on *queue.Link
		to chan string
	}{{b.nodes, orders}, {asA.nodes, stolen}} {
		if _, err := l.on.Listen("b", "order", func(_, _ string, data []byte) { l.to <- string(data) }); err != nil {
			t.Fatal(err)
		}
	}
	announced := make(chan string, 2)
	if _, err := c.inside.Listen("b", "inventory", func(_, _ string, data []byte) { announced <- string(data) }); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(asA.nodes.Send("b", "inventory", "", []byte("forged")), asA.nodes.Flush()); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(b.nodes.Send("b", "inventory", "", []byte("true")), c.inside.Send("b", "order", "", []byte("secret"))); err != nil {
		t.Fatal(err)
	}
	if m := receive(t, announced, a.log); m != "true" {
		t.Errorf("a announces b: %q", m)
	}
	receive(t, orders, a.log)
	if err := errors.Join(c.inside.Flush(), asA.nodes.Flush()); err != nil {
		t.Fatal(err)
	}
	select {
	case m := <-stolen:
		t.Errorf("a reads b's order %q", m)
	default:
	}
	// a's token with b's key does not even connect.
	token, err := a.User()
	if err != nil {
		t.Fatal(err)
	}
	seed, _, err := queue.NewUser()
	if err != nil {
		t.Fatal(err)
	}
	_, config := a.NATS()
	mixed := queue.Access{User: func() (string, error) { return token, nil }, Seed: seed, TLS: config}
	if err := queue.Probe(c.url, mixed); !errors.Is(err, queue.ErrRefused) {
		t.Errorf("a's token with another key: %v, want ErrRefused", err)
	}
}

// TestRevokedOverNATS revokes a node. Its connection is cut at once. It does not come back, even
// after a restart of the control plane.
func TestRevokedOverNATS(t *testing.T) {
	c := newCluster(t)
	_, others := c.member("b")
	d, nc := c.member("a")
	if err := c.Revoke("a"); err != nil {
		t.Fatal(err)
	}
	receive(t, nc.refused, d.log)
	for deadline := time.Now().Add(limit); nc.nc.IsConnected(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it is connected")
		}
	}
	if !others.nc.IsConnected() {
		t.Error("another node is not")
	}
	c.server.Close()
	c.start()
	if err := queue.Probe(c.url, d.access()); !errors.Is(err, queue.ErrRefused) {
		t.Errorf("after a restart: %v, want ErrRefused", err)
	}
	c.log.until(t, "a client of NATS was refused")
	// It joins again, with a new user.
	c.clock.forward(time.Second)
	again, err := c.join("a", c.token(authority.TokenRequest{Name: "a"}))
	if err == nil {
		err = queue.Probe(c.url, again.access())
	}
	if err != nil {
		t.Error(err)
	}
}

// TestTokensUserMayOnlyJoin uses the NATS user of a join token for something else.
func TestTokensUserMayOnlyJoin(t *testing.T) {
	c := newCluster(t)
	token, other := c.token(authority.TokenRequest{}), c.token(authority.TokenRequest{})
	log := &buffer{}
	nc := c.connect(queue.Bearer(token.User, identity.NATSClient(token.CA, c.clock.now)), log)
	heard := make(chan string, 8)
	for _, kind := range []string{"inventory", "order", "identity"} {
		if _, err := c.inside.Listen("", kind, func(_, _ string, data []byte) { heard <- kind }); err != nil {
			t.Fatal(err)
		}
		if err := nc.nodes.Send("a", kind, "", []byte("x")); err != nil && !nc.nc.IsConnected() {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	// The secret of one token over the user of another: the message does not arrive.
	if err := newDaemon(t, "a", t.TempDir(), c.clock).Join(ctx, nc.joins, other); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("with the user of another token: %v", err)
	}
	if err := nc.joins.Flush(); err != nil {
		t.Fatal(err)
	}
	select {
	case kind := <-heard:
		t.Errorf("a message of kind %s has arrived", kind)
	default:
	}
	proctest.Until(t, "a violation to be logged", func() bool { return strings.Contains(strings.ToLower(log.String()), "permissions violation") })
}

// TestOtherClusters connects with what other clusters have given out.
func TestOtherClusters(t *testing.T) {
	c, other := newCluster(t), newCluster(t)
	foreign := other.token(authority.TokenRequest{})
	why := fmt.Sprintf("the NATS server is control up of cluster %s, and this process is of cluster %s", c.Source().Me().Cluster, foreign.Cluster())
	c.failsToJoin(newDaemon(t, "a", t.TempDir(), c.clock), foreign, why)
	c.log.until(t, "a client of NATS was refused")
	// Even a client that does not verify the server is refused.
	if err := queue.Probe(c.url, queue.Bearer(foreign.User, &tls.Config{InsecureSkipVerify: true})); !errors.Is(err, queue.ErrRefused) {
		t.Errorf("a user of another cluster: %v, want ErrRefused", err)
	}
	if err := queue.Probe(c.url, queue.Bearer(foreign.User, nil)); err == nil {
		t.Error("a connection without TLS is accepted")
	}
	// A node's certificate is no control plane's.
	node, _ := c.member("n")
	fake, err := queue.StartServer(queue.ServerConfig{
		Dir: t.TempDir(), Log: slog.New(slog.DiscardHandler), Listen: "127.0.0.1:0", Keys: c.keys,
		TLS: identity.NATSServer(func() (*tls.Certificate, error) {
			cert, err := node.Source().Client(c.Source().Me()).GetClientCertificate(nil)
			if err != nil {
				return nil, err
			}
			ca, err := c.Chain()
			if err != nil {
				return nil, err
			}
			return &tls.Certificate{Certificate: [][]byte{cert.Certificate[0], ca.Certificate[1]}, PrivateKey: cert.PrivateKey}, nil
		}),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer fake.Close()
	if err := queue.Probe(fake.URL(), node.access()); err == nil || !strings.Contains(err.Error(), "the NATS server is node n of cluster") {
		t.Errorf("a node that plays the control plane: %v", err)
	}
}

// TestClocksOverNATS connects with wrong clocks: by less than a day, the control plane can say so;
// by more, the node says so by itself.
func TestClocksOverNATS(t *testing.T) {
	c := newCluster(t)
	token := c.token(authority.TokenRequest{})
	for _, tc := range []struct {
		skew time.Duration
		want string
	}{
		{7*time.Minute + 12*time.Second, "clock of node gpu-7 is 7m12s ahead of the control plane's; set the clock"},
		{lifetime + 12*time.Hour, "clock of node gpu-7 is 36h0m0s ahead of the control plane's; set the clock"},
		{-12 * time.Hour, "clock of node gpu-7 is 12h0m0s behind the control plane's; set the clock"},
		{1000 * time.Hour, "this machine's clock says "},
		{-1000 * time.Hour, "this machine's clock says "},
	} {
		wrong := &clock{add: tc.skew}
		d := newDaemon(t, "gpu-7", t.TempDir(), wrong)
		c.failsToJoin(d, token, tc.want)
	}
	if log := c.log.String(); strings.Count(log, "set the clock") != 3 {
		t.Errorf("the control plane says:\n%s", log)
	}
}

// TestManyJoin has many nodes join at the same time with one token. JOINS is how many.
func TestManyJoin(t *testing.T) {
	many := 50
	if text := os.Getenv("JOINS"); text != "" {
		if _, err := fmt.Sscan(text, &many); err != nil {
			t.Fatal(err)
		}
	}
	c := newCluster(t)
	token := c.token(authority.TokenRequest{Uses: many})
	done := make(chan error, many)
	bearer := queue.Bearer(token.User, identity.NATSClient(token.CA, c.clock.now))
	start := time.Now()
	for i := range many {
		d, nc := newDaemon(t, fmt.Sprintf("n%d", i), t.TempDir(), c.clock), c.connect(bearer, &buffer{})
		go func() { done <- d.Join(bounded(t), nc.joins, token) }()
	}
	for range many {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	t.Logf("%d nodes joined in %v", many, time.Since(start))
	if err := newDaemon(t, "last", t.TempDir(), c.clock).Join(bounded(t), c.connect(bearer, &buffer{}).joins, token); err == nil || !strings.Contains(err.Error(), "used up") {
		t.Errorf("one more: %v", err)
	}
}
