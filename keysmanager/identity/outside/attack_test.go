package outside_test

import (
	"crypto/tls"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
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

// TestOneUseAtTwoControlPlanes has two nodes use a token that is good for one, at two control
// planes at the same moment. One of them is let in.
func TestOneUseAtTwoControlPlanes(t *testing.T) {
	c := newCluster(t, 3)
	planes := []*plane{c.plane("a"), c.plane("b")}
	for round := range 5 {
		token := planes[round%2].token(t, authority.TokenRequest{Uses: 1})
		var errs [2]error
		var both sync.WaitGroup
		for i, p := range planes {
			both.Go(func() {
				m, err := identity.OpenMember(identity.MemberConfig{Dir: t.TempDir(), Name: "n" + string(rune('a'+2*round+i)), Now: time.Now, NewUser: queue.NewUser, Log: c.log})
				if err == nil {
					err = m.Join(t.Context(), direct{p}, token)
				}
				errs[i] = err
			})
		}
		both.Wait()
		won := 0
		for _, err := range errs {
			var refused *identity.RefusedError
			switch {
			case err == nil:
				won++
			case !errors.As(err, &refused) || !strings.Contains(refused.Cause, "the token is used up"):
				t.Errorf("a node is refused with %v, want that the token is used up", err)
			}
		}
		if won != 1 {
			t.Errorf("%d nodes have joined with a token for one: %v", won, errs)
		}
	}
}

// direct is a bus of a process that joins, to one control plane.
type direct struct{ *plane }

func (d direct) Listen(about, kind string, f func(about, reply string, data []byte)) (func(), error) {
	return d.link.Joins().Listen(about, kind, f)
}

// Send passes an ask to the control plane.
func (d direct) Send(about, _, reply string, data []byte) error {
	ask, err := identity.DecodeAsk(data)
	if err != nil {
		return err
	}
	b, err := json.Marshal(d.Join(about, ask))
	if err != nil {
		return err
	}
	return d.link.Joins().Send(about, reply, "", b)
}

// TestOtherKeys has control planes with wrong keys, and servers without the files of Init.
func TestOtherKeys(t *testing.T) {
	c := newCluster(t, 1)
	if _, err := c.open("stranger", authority.NewClusterKey()); !errors.Is(err, identity.ErrOtherCluster) {
		t.Errorf("a control plane with another key: %v, want %v", err, identity.ErrOtherCluster)
	}
	_, err := queue.OpenCluster(t.Context(), queue.ClusterConfig{URLs: c.urls, Log: c.log})
	if err == nil {
		t.Error("a control plane without a key is connected")
	}
	plain := natstest.Start(t, 1)
	_, ca := c.key.CA()
	_, err = queue.OpenCluster(t.Context(), queue.ClusterConfig{URLs: plain.URLs(), Keys: c.keys, TLS: identity.NATSClient(identity.KeyHash(ca), time.Now), Log: c.log})
	if !errors.Is(err, queue.ErrNoTLS) {
		t.Errorf("a control plane at a server without TLS: %v, want %v", err, queue.ErrNoTLS)
	}
	// A server whose certificate is right, and whose users are of another key.
	other, err := queue.DeriveKeys(authority.NewClusterKey().Derive)
	if err != nil {
		t.Fatal(err)
	}
	_, err = queue.OpenCluster(t.Context(), queue.ClusterConfig{URLs: c.urls, Keys: other, TLS: identity.NATSClient(identity.KeyHash(ca), time.Now), Log: c.log})
	if !errors.Is(err, queue.ErrRefused) {
		t.Errorf("a control plane with users of another key: %v, want %v", err, queue.ErrRefused)
	}
}

// TestFilesAreNoSecondChance revokes a node, writes the files of the servers again, and starts them
// while no control plane runs. The node stays out.
func TestFilesAreNoSecondChance(t *testing.T) {
	c := newCluster(t, 1)
	a := c.plane("a")
	stop := c.serve(a)
	m, err := c.join("n1", a.token(t, authority.TokenRequest{}), c.urls...)
	if err != nil {
		t.Fatal(err)
	}
	if err := queue.Probe(c.urls[0], access(m, nil)); err != nil {
		t.Fatal(err)
	}
	if err := a.Revoke("n1"); err != nil {
		t.Fatal(err)
	}
	stop()
	time.Sleep(1100 * time.Millisecond) // tokens of NATS have times in seconds
	if err := outside.Init(c.dir, c.servers, time.Now()); err != nil {
		t.Fatal(err)
	}
	c.Kill(0)
	c.Run(0)
	proctest.Until(t, "an answer of the server", func() bool {
		err := queue.Probe(c.urls[0], access(m, nil))
		if err == nil {
			t.Fatal("the revoked node is connected")
		}
		return errors.Is(err, queue.ErrRefused)
	})
	if key, err := authority.ReadClusterKey(filepath.Join(c.dir, outside.KeyFile)); err != nil || key != c.key {
		t.Errorf("the second Init has changed the cluster key: %v", err)
	}
}

// TestServerThatForgets revokes a node, and starts the server without the accounts that it had
// stored. The control plane tells it again who is revoked.
func TestServerThatForgets(t *testing.T) {
	c := newCluster(t, 1)
	a := c.plane("a")
	c.serve(a)
	m, err := c.join("n1", a.token(t, authority.TokenRequest{}), c.urls...)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Revoke("n1"); err != nil {
		t.Fatal(err)
	}
	c.Kill(0)
	if err := os.RemoveAll(filepath.Join(c.dir, c.servers[0].Name, "accounts")); err != nil {
		t.Fatal(err)
	}
	c.Run(0)
	proctest.Until(t, "the server to refuse the node", func() bool { return errors.Is(queue.Probe(c.urls[0], access(m, nil)), queue.ErrRefused) })
}

// TestNodesAreNoServers tries to connect to the port for servers with the certificate of a node,
// and takes a server for a peer.
func TestNodesAreNoServers(t *testing.T) {
	c := newCluster(t, 3)
	a := c.plane("a")
	c.serve(a)
	m, err := c.join("n1", a.token(t, authority.TokenRequest{}), c.urls...)
	if err != nil {
		t.Fatal(err)
	}
	for name, dir := range map[string]string{"a node": "", "a server": filepath.Join(c.dir, c.servers[0].Name)} {
		// The client is what is tried.
		cfg := &tls.Config{MinVersion: tls.VersionTLS13, InsecureSkipVerify: true}
		cfg.GetClientCertificate = m.Source().Client(m.Source().Me()).GetClientCertificate
		if dir != "" {
			pair, err := tls.LoadX509KeyPair(filepath.Join(dir, queue.OutsideRouteCert), filepath.Join(dir, queue.OutsideRouteKey))
			if err != nil {
				t.Fatal(err)
			}
			cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
		}
		err := greet(t, c.route(1), cfg)
		if allowed := dir != ""; (err == nil) != allowed {
			t.Errorf("%s at the port for servers: %v", name, err)
		}
	}

	dir := filepath.Join(c.dir, c.servers[0].Name)
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, queue.OutsideCert), filepath.Join(dir, queue.OutsideKey))
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Source().Check(pair.Leaf); err == nil || !strings.Contains(err.Error(), "is a server of NATS") {
		t.Errorf("a control plane says %v of a server, want that it is no peer", err)
	}
}

// route returns the address of a server for other servers.
func (c *cluster) route(i int) string {
	c.t.Helper()
	b, err := os.ReadFile(filepath.Join(c.dir, c.servers[i].Name, queue.OutsideConfig))
	if err != nil {
		c.t.Fatal(err)
	}
	return regexp.MustCompile(`(?m)^  listen: "(.*)"$`).FindStringSubmatch(string(b))[1]
}

// greet does TLS with a server's port for other servers, which speaks first in plain text and
// answers a ping afterwards.
func greet(t *testing.T, address string, cfg *tls.Config) error {
	t.Helper()
	raw, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	_ = raw.SetDeadline(time.Now().Add(limit))
	c := tls.Client(raw, cfg)
	if err := c.Handshake(); err != nil {
		return err
	}
	_, err = io.ReadFull(c, make([]byte, len("INFO ")))
	return err
}

// TestInitRefusesWhatItCannotRead checks the list of servers and the file with the key.
func TestInitRefusesWhatItCannotRead(t *testing.T) {
	for list, want := range map[string]string{
		"a,b,c":              "nats://a:4222 a 6222;nats://b:4222 b 6222;nats://c:4222 c 6222",
		"10.0.0.7:4300/7000": "nats://10.0.0.7:4300 10.0.0.7 7000",
		"a:1,a:2":            "nats://a:1 a-1 2001;nats://a:2 a-2 2002",
		"[::1]:4222":         "nats://[::1]:4222 --1 6222",
		"":                   "servers: ",
		"a,":                 "servers: ",
		"a,a":                "listed twice",
		"a:0":                "servers: ",
		"a:70000":            "servers: ",
		"a:x":                "servers: ",
		"a/b":                "servers: ",
		"a b":                "servers: ",
		`a"`:                 "servers: ",
		"a:65000":            "servers: ",
		"a:65000/65001":      "nats://a:65000 a 65001",
		"nats://a:4222":      "servers: ",
	} {
		all, err := queue.ParseOutside(list)
		var got []string
		for _, s := range all {
			if _, err := url.Parse(s.URL()); err != nil {
				t.Error(err)
			}
			got = append(got, strings.Join([]string{s.URL(), s.Name, strconv.Itoa(s.Route)}, " "))
		}
		if text := strings.Join(got, ";"); err == nil && text != want || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %q, %v, want %q", list, text, err, want)
		}
	}
	dir := t.TempDir()
	file := filepath.Join(dir, outside.KeyFile)
	key := authority.NewClusterKey()
	if err := key.Write(file); err != nil {
		t.Fatal(err)
	}
	if err := key.Write(file); err == nil {
		t.Error("a cluster key is written over another one")
	}
	if err := os.Chmod(file, 0o444); err != nil {
		t.Fatal(err)
	}
	if _, err := authority.ReadClusterKey(file); err == nil || !strings.Contains(err.Error(), "chmod 400") {
		t.Errorf("a key that all may read: %v, want what to do", err)
	}
	if err := errors.Join(os.Remove(file), os.WriteFile(file, []byte("stagecoach-cluster-1.AAAA"), 0o400)); err != nil {
		t.Fatal(err)
	}
	if err := outside.Init(dir, nil, time.Now()); err == nil || strings.Contains(err.Error(), "AAAA") {
		t.Errorf("a key that is cut off: %v, want an error without it", err)
	}
}
