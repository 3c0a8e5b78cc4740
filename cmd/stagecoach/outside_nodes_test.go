package main

import (
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/natstest"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity/authority"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity/outside"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// initialized runs n NATS servers with the files of `stagecoach cluster init`. It returns them and
// the file with the cluster key.
func initialized(t *testing.T, n int) (of *natstest.Cluster, key string) {
	t.Helper()
	dir, ports := t.TempDir(), proctest.Ports(t, 2*n)
	var list, dirs []string
	for i := range n {
		list = append(list, fmt.Sprintf("127.0.0.1:%d/%d", ports[i], ports[n+i]))
	}
	servers := strings.Join(list, ",")
	all, err := queue.ParseOutside(servers)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range all {
		dirs = append(dirs, filepath.Join(dir, s.Name))
	}
	var out strings.Builder
	if err := run(t.Context(), []string{"cluster", "init", "--dir", dir, "--servers", servers}, &out); err != nil {
		t.Fatal(err)
	}
	of = natstest.StartConfigured(t, queue.OutsideConfig, dirs, ports[:n])
	if want := "--nats " + of.String(); !strings.Contains(out.String(), want) {
		t.Errorf("cluster init prints %q, want %q in it", out.String(), want)
	}
	return of, filepath.Join(dir, outside.KeyFile)
}

// twoControls starts two control planes without nodes, on servers of `cluster init`. The first one
// leads. n has the nodes of the second one, and key is the file with the cluster key.
func twoControls(t *testing.T, servers int) (a, b *rig, n *nodesRig, key string) {
	t.Helper()
	of, key := initialized(t, servers)
	flags := []string{"--nats", of.String(), "--cluster-key", key, "--no-node"}
	a = start(t, flags...)
	a.leads(1)
	b = start(t, flags...)
	b.standsBy(1)
	n = &nodesRig{rig: b, url: of.String()}
	n.open(controlOf(t, key, of.String()))
	return a, b, n, key
}

// TestNodesOutliveTheLeader has two control planes on NATS outside, and a node that both reach over
// TLS alone. Requests of both reach functions there, also large ones of functions that speak HTTP.
// The leader is killed, and the next one uses the node. Then the node is revoked, and ends.
func TestNodesOutliveTheLeader(t *testing.T) {
	t.Parallel()
	a, b, n, _ := twoControls(t, 3)
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte(n.printed("--name", "n1", "--uses", "1")), 0o600); err != nil {
		t.Fatal(err)
	}
	d := n.farDaemon("n1", "--token", token, "--images", t.TempDir())
	a.deployAll(fn{"f", "noop", map[string]string{"min": "1"}, nil, nil}, httpFn("h", map[string]string{"min": "1"}))
	large := strings.Repeat("large ", 1<<18)
	for _, r := range []*rig{a, b} {
		r.must(http.StatusOK, http.MethodPost, "/function/f", "x")
		if got := r.must(http.StatusOK, http.MethodPost, "/function/h/echo", large); string(got.Body) != large {
			t.Errorf("h answers %d bytes, want the %d of the request", len(got.Body), len(large))
		}
	}
	n.listsTokens(t)
	a.end9()
	b.leads(1)
	begun := time.Now()
	for _, name := range []string{"f", "h/echo"} {
		b.until(late, name+" to answer", func() bool {
			got, err := b.trySend(http.MethodPost, "/function/"+name, "x")
			return err == nil && got.Status == http.StatusOK
		})
	}
	t.Logf("the next leader's functions answer after %v", time.Since(begun))
	n.until(soon, "n1 to announce a replica", func() bool { return len(n.running("n1", "f")) > 0 })

	if out, err := n.command("node", "revoke", "n1"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	<-d.Done
	d.Process = nil
	if !strings.Contains(d.log.String(), identity.ErrRevoked.Error()) {
		t.Errorf("the node does not say that it is revoked:\n%s", d.log)
	}
}

// TestNewClusterKey replaces the cluster key as docs/security.md says: new servers, the control
// plane and the node on their folders, a new token, and a deploy. The secrets are still there.
func TestNewClusterKey(t *testing.T) {
	t.Parallel()
	var a *rig
	var d *keysDaemon
	for i := range 2 {
		of, file := initialized(t, 1)
		flags := []string{"--nats", of.String(), "--cluster-key", file}
		if i == 0 {
			a = start(t, append(flags, "--no-node")...)
		} else {
			a.args = append(a.args, flags...) // the later flags count
			a.restart()
		}
		a.leads(i + 1)
		n := &nodesRig{rig: a, url: of.String()}
		n.open(controlOf(t, file, n.url))
		token := filepath.Join(t.TempDir(), "token")
		if err := os.WriteFile(token, []byte(n.printed()), 0o600); err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			d = n.farDaemon("n1", "--token", token)
			a.must(http.StatusCreated, http.MethodPost, "/system/secrets", `{"name": "token", "value": "one"}`)
		} else {
			d.args = append(d.args, "--nats", n.url, "--token", token)
			n.restartDaemon(d)
			if !strings.Contains(d.log.String(), "has to join again") {
				t.Error("the node has not joined again")
			}
		}
		f := fn{"f", "noop", map[string]string{"min": "1"}, nil, nil}.deployment()
		f.Secrets = []string{"token"}
		if err := a.Deploy(t.Context(), f); err != nil {
			t.Fatal(err)
		}
		a.must(http.StatusOK, http.MethodPost, "/function/f", "x")
		if err := d.Stop(); err != nil {
			t.Error(err)
		}
		d.Process = nil
		a.stop() // while its servers run
	}
}

// listsTokens lists the tokens after n1 has joined, and makes another one void.
func (n *nodesRig) listsTokens(t *testing.T) {
	t.Helper()
	n.printed()
	table := func() [][]string {
		out, err := n.command("node", "tokens")
		if err != nil {
			t.Fatal(err)
		}
		var rows [][]string
		for line := range strings.Lines(out) {
			rows = append(rows, strings.Fields(line))
		}
		return rows[1:]
	}
	rows := table()
	if len(rows) != 2 || rows[0][1] != "any" || rows[1][1] != "n1" || !strings.HasSuffix(strings.Join(rows[1], " "), " 1 of 1") {
		t.Fatalf("tokens: %q, want one for any node and one that n1 has used", rows)
	}
	if _, err := n.command("node", "token", "revoke", rows[0][0]); err != nil {
		t.Error(err)
	}
	if _, err := n.command("node", "token", "revoke", rows[0][0]); err == nil || !strings.Contains(err.Error(), "404") {
		t.Errorf("a token is revoked again: %v, want 404", err)
	}
	if left := table(); len(left) != 1 || left[0][0] != rows[1][0] {
		t.Errorf("tokens: %q, want that of n1 alone", left)
	}
}

// controlOf connects to NATS outside as a control plane.
func controlOf(t *testing.T, file, urls string) *queue.Link {
	t.Helper()
	nc, err := queue.Connect(urls, controlAccess(t, file), "test", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return queue.NewLink(nc)
}

// controlAccess is how a control plane with a cluster key connects to NATS.
func controlAccess(t *testing.T, file string) queue.Access {
	t.Helper()
	key, err := authority.ReadClusterKey(file)
	if err != nil {
		t.Fatal(err)
	}
	keys, err := queue.DeriveKeys(key.Derive)
	if err != nil {
		t.Fatal(err)
	}
	_, ca := key.CA()
	access := keys.Control()
	access.TLS = identity.NATSClient(identity.KeyHash(ca), time.Now)
	return access
}
