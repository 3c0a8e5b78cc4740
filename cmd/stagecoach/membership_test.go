package main

import (
	"context"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/child"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// command runs a command of the program against the rig, and returns what it prints.
func (n *nodesRig) command(args ...string) (string, error) {
	var out strings.Builder
	err := run(n.t.Context(), append(args, "--gateway", n.Base), &out)
	return strings.TrimSpace(out.String()), err
}

// printed is a new join token.
func (n *nodesRig) printed(flags ...string) string {
	n.t.Helper()
	token, err := n.command(append([]string{"node", "token"}, flags...)...)
	if err != nil || !identity.IsToken(token) || strings.ContainsAny(token, " \n") {
		n.t.Fatalf("node token prints %q, %v", token, err)
	}
	return token
}

// fails starts a daemon that must not come up, and returns what it says.
func (n *nodesRig) fails(args ...string) string {
	n.t.Helper()
	var log logFile
	if c, err := child.Start(n.t.Context(), &log, args...); err == nil {
		n.t.Errorf("%q comes up: %v", args, c.Stop())
	}
	return log.String()
}

// TestMembership has a node join with a token, renew, restart without a token, and be revoked.
func TestMembership(t *testing.T) {
	t.Parallel()
	config := filepath.Join(t.TempDir(), "up.yml")
	if err := os.WriteFile(config, []byte("nats: {certificates: 6s}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	n := startNodes(t, "--no-node", "--config", config)
	old := n.printed("--uses", "1")
	d := &keysDaemon{name: "gpu-7", state: t.TempDir(), log: &logFile{}}
	flags := []string{
		"--state", d.state, "--memory", "1Gi", "--cpus", "1", "--devices", "none", "--images", proctest.Built(t, "images"),
		"--ort", proctest.Built(t, "ort", "libonnxruntime.so.1"),
	}
	args := func(name, token string, more ...string) []string {
		return append(append([]string{"keysmanager", "--join", n.url, "--name", name, "--token", token}, flags...), more...)
	}
	d.args = args("gpu-7", old)
	n.restartDaemon(d)
	t.Cleanup(func() {
		if d.Process != nil {
			_ = d.Stop()
		}
	})
	n.deployAll(waitFn("hold", "20ms", map[string]string{"min": "2", "max": "2"}, nil))
	n.steady("hold", 2, "gpu-7")
	n.until(soon, "the certificate to be renewed", func() bool { return strings.Contains(d.log.String(), "certificate renewed") })
	n.must(http.StatusOK, http.MethodPost, "/function/hold", "x")

	t.Log("a restart needs no token")
	before := n.processes("gpu-7")
	kill9(t, d.Cmd.Process.Pid)
	<-d.Done
	d.args = args("gpu-7", "/nowhere")
	n.restartDaemon(d)
	if len(n.events("hold", "lost")) > 0 {
		t.Errorf("replicas were lost: %v", n.events("hold", "lost"))
	}

	t.Log("others do not join with what they have")
	for want, args := range map[string][]string{
		"the token is used up":               args("gpu-8", old, "--state", t.TempDir()),
		`the name "gpu-7" is taken`:          args("gpu-7", n.token(), "--state", t.TempDir()),
		`the token is for node "a"`:          args("b", n.printed("--name", "a"), "--state", t.TempDir()),
		"needs a token to join":              args("c", "/nowhere", "--state", t.TempDir()),
		"the join token is incomplete":       args("d", old[:len(old)/2], "--state", t.TempDir()),
		`node "gpu-9" needs a token to join`: args("gpu-9", "/nowhere", "--state", copyOf(t, d.state)),
	} {
		if log := n.fails(args...); !strings.Contains(log, want) {
			t.Errorf("want %q, got\n%s", want, log)
		}
	}

	t.Log("the node is revoked")
	if out, err := n.command("node", "revoke", "gpu-7"); err != nil || !strings.Contains(out, "it needs a new token") {
		t.Errorf("node revoke: %q, %v", out, err)
	}
	select {
	case err := <-d.Done:
		if err == nil || !strings.Contains(d.log.String(), "identity: revoked: this node") {
			t.Errorf("it ended with %v and says\n%s", err, d.log)
		}
	case <-time.After(late):
		t.Fatalf("the daemon goes on:\n%s", d.log)
	}
	d.Process = nil
	gone(t, before)
	n.until(soon, "the node to be out of sight", func() bool { _, ok := n.inventory("gpu-7"); return !ok })
	if _, err := n.command("node", "revoke", "gpu-7"); err == nil || !strings.Contains(err.Error(), "status 404") {
		t.Errorf("revoked again: %v", err)
	}
	if log := n.fails(args("gpu-7", n.token())...); !strings.Contains(log, `node "gpu-7" was revoked at `) {
		t.Errorf("with a token of before:\n%s", log)
	}
	d.args = args("gpu-7", n.printed("--name", "gpu-7", "--ttl", "10m"))
	n.restartDaemon(d)
	n.steady("hold", 2, "gpu-7")
}

// copyOf returns a copy of a folder's credentials.
func copyOf(t *testing.T, state string) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.CopyFS(filepath.Join(dir, "identity"), os.DirFS(filepath.Join(state, "identity"))); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestAnotherCluster moves a daemon to an up of another cluster: it joins there if it is given that
// cluster's token, and not otherwise.
func TestAnotherCluster(t *testing.T) {
	t.Parallel()
	first, second := startNodes(t, "--no-node"), startNodes(t, "--no-node")
	d := first.daemon("n1")
	kill9(t, d.Cmd.Process.Pid)
	<-d.Done
	var log logFile
	ctx, cancel := context.WithCancel(t.Context())
	wait := make(chan struct{})
	go func() { // it does not find its cluster, and tries until it is ended
		defer close(wait)
		c, err := child.Start(ctx, &log, append(d.args, "--nats", second.url)...)
		if err == nil {
			_ = c.Stop()
		}
	}()
	second.until(soon, "both sides to say why the node cannot connect", func() bool {
		return strings.Contains(log.String(), "the NATS server is control") && strings.Contains(second.log.String(), "a client of NATS was refused")
	})
	cancel()
	<-wait
	if _, ok := second.inventory("n1"); ok {
		t.Error("the node of another cluster is heard")
	}
	d.args = append(d.args, "--nats", second.url, "--nats-token", second.token())
	second.restartDaemon(d)
	if !strings.Contains(d.log.String(), "the node has to join again") {
		t.Errorf("it does not say that it has joined again:\n%s", d.log)
	}
	// It ends before first checks that none of its processes are left.
	if err := d.Stop(); err != nil {
		t.Error(err)
	}
	d.Process = nil
}

// TestMembershipAPI asks for what the API refuses.
func TestMembershipAPI(t *testing.T) {
	t.Parallel()
	n := startNodes(t, "--no-node")
	for body, want := range map[string]string{
		`{"ttl": "soon"}`:  "a JSON object with name, ttl (such as 1h) and uses",
		`{"ttl": "-1h"}`:   "ttl: got -1h0m0s, want",
		`{"uses": -1}`:     "uses: got -1, want 0 or more",
		`{"name": "a b"}`:  "want a name without spaces",
		`{"nodes": ["a"]}`: "unknown field",
		``:                 "EOF",
	} {
		if a := n.send(http.MethodPost, "/system/nodes/tokens", body); a.Status != http.StatusBadRequest || !strings.Contains(string(a.Body), want) {
			t.Errorf("%s: status %d, %s, want 400 with %q", body, a.Status, a.Body, want)
		}
	}
	var token schema.JoinToken
	a := n.must(http.StatusOK, http.MethodPost, "/system/nodes/tokens", `{"name": "a", "ttl": "90m", "uses": 3}`)
	if err := json.Unmarshal(a.Body, &token); err != nil {
		t.Fatal(err)
	}
	parsed, err := identity.ParseToken(token.Token)
	if err != nil || parsed.ID() != token.ID || parsed.Cluster() != token.Cluster || time.Until(token.Expires).Round(time.Minute) != 90*time.Minute {
		t.Errorf("%+v, %v", token, err)
	}
	if a.Header.Get("Cache-Control") != "no-store" {
		t.Errorf("a secret may be cached: %v", a.Header)
	}
	without := start(t)
	for _, path := range []string{"/system/nodes/tokens", "/system/nodes/a/revoke"} {
		if a := without.send(http.MethodPost, path, "{}"); a.Status != http.StatusConflict || !strings.Contains(string(a.Body), "--nats-listen") {
			t.Errorf("%s without --nats-listen: status %d, %s, want 409", path, a.Status, a.Body)
		}
	}
}
