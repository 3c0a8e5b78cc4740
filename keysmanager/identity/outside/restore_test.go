package outside_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity/authority"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// TestRestoredState restores a backup that is older than the cluster's last state: since the
// backup, a node was revoked, another node has joined and was revoked, and a token was used up.
// Neither the nodes nor the token get in. With new tokens, nodes join again.
func TestRestoredState(t *testing.T) {
	c := newCluster(t, 1)
	a := c.plane("a")
	stop := c.serve(a)
	once, other := a.token(t, authority.TokenRequest{Uses: 1}), a.token(t, authority.TokenRequest{})
	n1, err1 := c.join("n1", other, c.urls...)
	file := c.backup()
	n2, err2 := c.join("n2", once, c.urls...)
	if err := errors.Join(err1, err2, a.Revoke("n1"), a.Revoke("n2")); err != nil {
		t.Fatal(err)
	}
	stop()
	r := c.restore(file)
	if nodes, err := r.Restored(false); err != nil || !slices.Equal(nodes, []string{"n1"}) {
		t.Fatalf("the restored state has the nodes %q, %v; want n1", nodes, err)
	}
	b := c.plane("b")
	c.serve(b)
	for name, m := range map[string]*identity.Member{"n1": n1, "n2": n2} {
		proctest.Until(t, "the server to refuse "+name, func() bool { return errors.Is(queue.Probe(c.urls[0], access(m, nil)), queue.ErrRefused) })
	}
	if ok := b.Source().Check(leaf(t, n1)); !errors.Is(ok, identity.ErrRevoked) {
		t.Errorf("the certificate of n1: %v, want that it is revoked", ok)
	}
	for _, token := range []identity.Token{once, other} {
		if err := queue.Probe(c.urls[0], queue.Bearer(token.User, identity.NATSClient(token.CA, time.Now))); !errors.Is(err, queue.ErrRefused) {
			t.Errorf("a token of the backup: %v, want that it is refused", err)
		}
	}
	if left := b.Tokens(); len(left) > 0 {
		t.Errorf("tokens of the backup: %+v, want none", left)
	}
	proctest.Until(t, "n1 to join again", func() bool {
		token, _, err := b.NewToken(authority.TokenRequest{Name: "n1"})
		if err != nil {
			return false // b connects again: it was signed in the second that is revoked
		}
		m, err := c.join("n1", token, c.urls...)
		return err == nil && queue.Probe(c.urls[0], access(m, nil)) == nil
	})
}

// TestRestoredStateThatIsKept restores a backup with its nodes.
func TestRestoredStateThatIsKept(t *testing.T) {
	c := newCluster(t, 1)
	a := c.plane("a")
	stop := c.serve(a)
	m, err := c.join("n1", a.token(t, authority.TokenRequest{}), c.urls...)
	if err != nil {
		t.Fatal(err)
	}
	file := c.backup()
	stop()
	if nodes, err := c.restore(file).Restored(true); err != nil || !slices.Equal(nodes, []string{"n1"}) {
		t.Fatalf("the restored state has the nodes %q, %v; want n1", nodes, err)
	}
	b := c.plane("b")
	c.serve(b)
	link, connected := c.connect(m, nil)
	proctest.Until(t, "a connection of the node", connected)
	if _, err := m.Sync(t.Context(), link); err != nil {
		t.Errorf("the node asks for what is revoked: %v", err)
	}
	if left := b.Tokens(); len(left) > 0 {
		t.Errorf("tokens of the backup: %+v, want none", left)
	}
}

// config is that of a connection without checks.
func (c *cluster) config() queue.ClusterConfig {
	_, ca := c.key.CA()
	return queue.ClusterConfig{URLs: c.urls, Keys: c.keys, TLS: identity.NATSClient(identity.KeyHash(ca), time.Now), Log: c.log}
}

func (c *cluster) backup() *bytes.Buffer {
	c.t.Helper()
	nc, err := c.config().Dial("backup")
	if err != nil {
		c.t.Fatal(err)
	}
	defer nc.Close()
	var file bytes.Buffer
	if err := queue.Backup(c.t.Context(), nc, &file, time.Now(), func(string, int64) {}); err != nil {
		c.t.Fatal(err)
	}
	return &file
}

// restore restores a backup on an empty server, which has forgotten the accounts, too. It opens the
// authority with a clock that is ahead: otherwise, users that were signed less than two seconds ago
// would be let in.
func (c *cluster) restore(file *bytes.Buffer) *authority.Authority {
	c.t.Helper()
	c.Kill(0)
	for _, name := range []string{"data", "accounts"} {
		if err := os.RemoveAll(filepath.Join(c.dir, c.servers[0].Name, name)); err != nil {
			c.t.Fatal(err)
		}
	}
	c.Run(0)
	nc, err := c.config().Dial("restore")
	proctest.Until(c.t, "the server to run", func() bool {
		if err != nil {
			nc, err = c.config().Dial("restore")
		}
		return err == nil
	})
	_, err = queue.Restore(c.t.Context(), nc, file, func(string, int64) {})
	nc.Close()
	if err != nil {
		c.t.Fatal(err)
	}
	var of *queue.Cluster
	proctest.Until(c.t, "the cluster to be ready", func() bool {
		var err error
		of, err = queue.OpenCluster(c.t.Context(), c.config())
		return err == nil
	})
	c.t.Cleanup(of.Close)
	nc, err = of.Connect("restore")
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(nc.Close)
	kv, err := queue.OpenKV(c.t.Context(), nc, of.Disk(), "authority")
	if err != nil {
		c.t.Fatal(err)
	}
	r, err := authority.Open(authority.Config{
		Shared: &authority.Shared{Key: c.key, Store: store{kv}}, Name: "restore", Users: c.keys, Log: c.log,
		Now: func() time.Time { return time.Now().Add(2 * time.Second) },
	})
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(r.Close)
	return r
}
