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
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity/authority"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity/outside"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// initialized runs three NATS servers with the files of `stagecoach cluster init`. It returns their
// URLs and the file with the cluster key.
func initialized(t *testing.T) (of *natstest.Cluster, key string) {
	t.Helper()
	dir, ports := t.TempDir(), natstest.FreePorts(t, 6)
	var servers, dirs []string
	for i := range 3 {
		servers = append(servers, fmt.Sprintf("127.0.0.1:%d/%d", ports[i], ports[3+i]))
		dirs = append(dirs, filepath.Join(dir, fmt.Sprintf("127.0.0.1-%d", ports[i])))
	}
	var out strings.Builder
	if err := run(t.Context(), []string{"cluster", "init", "--dir", dir, "--servers", strings.Join(servers, ",")}, &out); err != nil {
		t.Fatal(err)
	}
	of = natstest.StartConfigured(t, queue.OutsideConfig, dirs, ports[:3])
	if want := "--nats " + of.String(); !strings.Contains(out.String(), want) {
		t.Errorf("cluster init prints %q, want %q in it", out.String(), want)
	}
	return of, filepath.Join(dir, outside.KeyFile)
}

// TestNodesOutliveTheLeader has two control planes on NATS outside, and a node that both reach over
// TLS alone. Requests of both reach functions there, also large ones of functions that speak HTTP.
// The leader is killed, and the next one uses the node. Then the node is revoked, and ends.
func TestNodesOutliveTheLeader(t *testing.T) {
	of, file := initialized(t)
	flags := []string{"--nats", of.String(), "--cluster-key", file, "--no-node"}
	a := start(t, flags...)
	a.leads(1)
	b := start(t, flags...)
	b.standsBy(1)
	n := &nodesRig{rig: b, url: of.String()}
	n.open(controlOf(t, file, of.String()))
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
	first := n.running("n1", "f")

	if err := a.up.Cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-a.up.Done
	a.up = nil
	b.leads(1)
	begun := time.Now()
	for _, name := range []string{"f", "h/echo"} {
		b.until(late, name+" to answer", func() bool {
			got, err := b.trySend(http.MethodPost, "/function/"+name, "x")
			return err == nil && got.Status == http.StatusOK
		})
	}
	t.Logf("the next leader's functions answer after %v", time.Since(begun))
	if now := n.running("n1", "f"); len(first) != 1 || len(now) == 0 {
		t.Errorf("n1 ran %q before and %q after, want replicas", first, now)
	}

	if out, err := n.command("node", "revoke", "n1"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	<-d.Done
	d.Process = nil
	if !strings.Contains(d.log.String(), identity.ErrRevoked.Error()) {
		t.Errorf("the node does not say that it is revoked:\n%s", d.log)
	}
}

// controlOf connects to NATS outside as a control plane.
func controlOf(t *testing.T, file, urls string) *queue.Link {
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
	nc, err := queue.Connect(urls, access, "test", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return queue.NewLink(nc)
}
