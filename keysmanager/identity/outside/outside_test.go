package outside_test

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/natstest"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity/authority"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity/outside"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

func TestMain(m *testing.M) {
	natstest.Main()
	os.Exit(m.Run())
}

// limit bounds waits. They normally need a fraction of it.
const limit = time.Minute

// cluster is a NATS cluster with the files of Init.
type cluster struct {
	*natstest.Cluster
	t    *testing.T
	dir  string
	key  authority.ClusterKey
	keys *queue.Keys
	urls []string
	log  *slog.Logger

	servers []queue.OutsideServer
}

func newCluster(t *testing.T, n int) *cluster {
	t.Helper()
	c := &cluster{t: t, dir: t.TempDir(), log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	ports := proctest.Ports(t, 2*n)
	var list, dirs []string
	for i := range n {
		list = append(list, fmt.Sprintf("127.0.0.1:%d/%d", ports[i], ports[n+i]))
	}
	servers, err := queue.ParseOutside(strings.Join(list, ","))
	if err != nil {
		t.Fatal(err)
	}
	c.servers = servers
	if err := outside.Init(c.dir, servers, time.Now()); err != nil {
		t.Fatal(err)
	}
	if c.key, err = authority.ReadClusterKey(filepath.Join(c.dir, outside.KeyFile)); err != nil {
		t.Fatal(err)
	}
	if c.keys, err = queue.DeriveKeys(c.key.Derive); err != nil {
		t.Fatal(err)
	}
	for _, s := range servers {
		dirs = append(dirs, filepath.Join(c.dir, s.Name))
		c.urls = append(c.urls, s.URL())
	}
	c.Cluster = natstest.StartConfigured(t, queue.OutsideConfig, dirs, ports[:n])
	return c
}

// plane is a control plane's connection and authority.
type plane struct {
	*authority.Authority
	nats *queue.Cluster
	link *queue.Link
}

// store is cmd's adapter.
type store struct{ *queue.KV }

func (s store) Get(ctx context.Context, key string) ([]byte, uint64, error) {
	b, rev, err := s.KV.Get(ctx, key)
	if errors.Is(err, queue.ErrNotFound) {
		err = authority.ErrNone
	}
	return b, rev, err
}

func (s store) Replace(ctx context.Context, key string, value []byte, rev uint64) (uint64, error) {
	rev, err := s.KV.Replace(ctx, key, value, rev)
	if errors.Is(err, queue.ErrConflict) {
		err = authority.ErrConflict
	}
	return rev, err
}

// open connects a control plane with a cluster key.
func (c *cluster) open(name string, key authority.ClusterKey) (*plane, error) {
	c.t.Helper()
	keys, err := queue.DeriveKeys(key.Derive)
	if err != nil {
		c.t.Fatal(err)
	}
	_, ca := key.CA()
	ctx, cancel := context.WithTimeout(c.t.Context(), limit)
	defer cancel()
	of, err := queue.OpenCluster(ctx, queue.ClusterConfig{URLs: c.urls, Keys: keys, TLS: identity.NATSClient(identity.KeyHash(ca), time.Now), Log: c.log})
	if err != nil {
		return nil, err
	}
	c.t.Cleanup(of.Close)
	nc, err := of.Connect(name)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(nc.Close)
	kv, err := queue.OpenKV(ctx, nc, of.Disk(), "authority")
	if err != nil {
		c.t.Fatal(err)
	}
	a, err := authority.Open(authority.Config{Shared: &authority.Shared{Key: key, Store: store{kv}}, Name: name, Now: time.Now, Users: keys, Log: c.log})
	if err != nil {
		return nil, err
	}
	c.t.Cleanup(a.Close)
	return &plane{a, of, queue.NewLink(nc)}, nil
}

func (c *cluster) plane(name string) *plane {
	c.t.Helper()
	p, err := c.open(name, c.key)
	if err != nil {
		c.t.Fatal(err)
	}
	return p
}

// serve answers nodes as a control plane until the end of the test, or until stop is called.
func (c *cluster) serve(p *plane) (stop func()) {
	c.t.Helper()
	end, err := p.Serve(p.link, p.link.Joins(), p.nats.Revoke)
	if err != nil {
		c.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var following sync.WaitGroup
	following.Go(func() { p.nats.FollowRevoked(ctx, p.RevokedUsers) })
	stop = sync.OnceFunc(func() { end(); cancel(); following.Wait() })
	c.t.Cleanup(stop)
	return stop
}

func (p *plane) token(t *testing.T, r authority.TokenRequest) identity.Token {
	t.Helper()
	token, _, err := p.NewToken(r)
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// join joins through some servers.
func (c *cluster) join(name string, token identity.Token, urls ...string) (*identity.Member, error) {
	c.t.Helper()
	m, err := identity.OpenMember(identity.MemberConfig{Dir: c.t.TempDir(), Name: name, Now: time.Now, NewUser: queue.NewUser, Log: c.log})
	if err != nil {
		c.t.Fatal(err)
	}
	nc, err := queue.Connect(strings.Join(urls, ","), queue.Bearer(token.User, identity.NATSClient(token.CA, time.Now)), "join "+name, c.log)
	if err != nil {
		c.t.Fatal(err)
	}
	defer nc.Close()
	ctx, cancel := context.WithTimeout(c.t.Context(), limit)
	defer cancel()
	return m, m.Join(ctx, queue.NewJoinLink(nc), token)
}

func access(m *identity.Member, refused func(error)) queue.Access {
	seed, tls := m.NATS()
	return queue.Access{User: m.User, Seed: seed, TLS: tls, Refused: refused}
}

// connect connects a node.
func (c *cluster) connect(m *identity.Member, refused func(error)) (link *queue.Link, connected func() bool) {
	c.t.Helper()
	nc, err := queue.Connect(strings.Join(c.urls, ","), access(m, refused), "node", c.log)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(nc.Close)
	return queue.NewLink(nc), nc.IsConnected
}

// TestNodesOfAClusterOutside joins through one server, loses another server and the control plane
// that has let the node in, renews, and revokes: the node is out on all servers, also on the one
// that was away.
func TestNodesOfAClusterOutside(t *testing.T) {
	c := newCluster(t, 3)
	a, b := c.plane("a"), c.plane("b")
	stop := c.serve(a)
	m, err := c.join("n1", a.token(t, authority.TokenRequest{Uses: 1}), c.urls[1])
	if err != nil {
		t.Fatal(err)
	}
	gone := make(chan error, 16)
	link, connected := c.connect(m, func(err error) {
		select {
		case gone <- err:
		default:
		}
	})
	proctest.Until(t, "a connection of the node", connected)

	c.Kill(0)
	stop() // b leads now
	c.serve(b)
	got := make(chan string, 16)
	unlisten, err := b.link.Listen("", "inventory", func(name, _ string, data []byte) { got <- name + " " + string(data) })
	if err != nil {
		t.Fatal(err)
	}
	defer unlisten()
	proctest.Until(t, "a message of the node", func() bool {
		_ = link.Send("n2", "inventory", "", []byte("1")) // it may not
		_ = link.Send("n1", "inventory", "", []byte("1")) // fails while it reconnects
		select {
		case text := <-got:
			if text != "n1 1" {
				t.Fatalf("a control plane gets %q, want messages of n1 alone", text)
			}
			return true
		default:
			return false
		}
	})
	if _, err := m.Sync(t.Context(), link); err != nil {
		t.Errorf("the next control plane does not answer a question: %v", err)
	}
	proctest.Until(t, "writes", func() bool { _, _, err := b.NewToken(authority.TokenRequest{}); return err == nil })

	if err := b.Revoke("n1"); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-gone:
		if !errors.Is(err, queue.ErrRefused) {
			t.Errorf("the node gets %v, want that it is refused", err)
		}
	case <-time.After(limit):
		t.Fatal("the node is still connected")
	}
	c.Run(0)
	for _, url := range c.urls {
		proctest.Until(t, url+" to refuse the node", func() bool { return errors.Is(queue.Probe(url, access(m, nil)), queue.ErrRefused) })
	}
	proctest.Until(t, "the first control plane to know", func() bool { return len(a.RevokedUsers()) == 1 })
	if ok := a.Source().Check(leaf(t, m)); !errors.Is(ok, identity.ErrRevoked) {
		t.Errorf("the first control plane says %v of the node's certificate, want that it is revoked", ok)
	}
}

func leaf(t *testing.T, m *identity.Member) *x509.Certificate {
	t.Helper()
	c, err := m.Source().Client(m.Source().Me()).GetClientCertificate(nil)
	if err != nil {
		t.Fatal(err)
	}
	return c.Leaf
}

// TestInitServer writes the files of one server, with a key from elsewhere. The server has the
// configuration that Init writes, and shows no key of the cluster.
func TestInitServer(t *testing.T) {
	all, err := queue.ParseOutside("a,b,c")
	if err != nil {
		t.Fatal(err)
	}
	whole, one := t.TempDir(), t.TempDir()
	if err := outside.Init(whole, all, time.Now()); err != nil {
		t.Fatal(err)
	}
	key := filepath.Join(whole, outside.KeyFile)
	if err := outside.InitServer(one, key, "b", all, time.Now()); err != nil {
		t.Fatal(err)
	}
	want, err1 := os.ReadFile(filepath.Join(whole, "b", queue.OutsideConfig))
	got, err2 := os.ReadFile(filepath.Join(one, queue.OutsideConfig))
	if err1 != nil || err2 != nil || string(got) != string(want) {
		t.Errorf("the configuration differs from that of Init: %v %v\n%s", err1, err2, got)
	}
	written, err := filepath.Glob(filepath.Join(one, "*"))
	if err != nil || len(written) != 6 {
		t.Errorf("files %v, %v, want six", written, err)
	}
	for i := range all {
		all[i].Monitor = "0.0.0.0:8222"
	}
	if err := outside.InitServer(one, key, "b", all, time.Now()); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(one, queue.OutsideConfig)); err != nil || !strings.Contains(string(got), "\nhttp: \"0.0.0.0:8222\"") || strings.Contains(string(got), "127.0.0.1") {
		t.Errorf("the server does not answer GET /healthz where it should: %v\n%s", err, got)
	}
	if err := outside.InitServer(one, key, "d", all, time.Now()); err == nil || !strings.Contains(err.Error(), `"d" is not one of the servers`) {
		t.Errorf("a server that is not listed: %v", err)
	}
	if err := outside.InitServer(one, filepath.Join(one, "none"), "b", all, time.Now()); err == nil {
		t.Error("files are written without a key")
	}
}
