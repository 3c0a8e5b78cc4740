package main

import (
	"bytes"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// farDaemon starts a node that is one on another machine for up.
func (n *nodesRig) farDaemon(name string, flags ...string) *keysDaemon {
	n.t.Helper()
	return n.daemon(name, append([]string{"--listen", "127.0.0.1:0", "--remote"}, flags...)...)
}

// TestFarNode runs a pipeline, a function that speaks HTTP and one that prints on a node that up
// reaches over TLS alone.
func TestFarNode(t *testing.T) {
	t.Parallel()
	n := startNodes(t, "--no-node", "--log", "debug")
	n.farDaemon("n1")
	n.deployAll(
		fn{"first", "noop", map[string]string{"min": "1"}, map[string]string{"pipeline": "both", "next": "second"}, nil},
		fn{"second", "noop", map[string]string{"min": "1"}, map[string]string{"pipeline": "both"}, nil},
	)
	c := &operator{t, t.TempDir(), n.Base}
	c.run(`(?m)^NODE +KIND .* LINK\nn1 +daemon .* tls$`, "", "node", "list")
	c.run(`(?m)^Address: +127\.0\.0\.1:\d+, tls$`, "", "node", "describe", "n1")
	big := make([]byte, 16<<20)
	_, _ = rand.NewChaCha8([32]byte{}).Read(big) // never fails
	for _, body := range [][]byte{[]byte("small"), big} {
		resp, err := n.HTTP.Post(n.Base+"/function/both", "application/octet-stream", bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != http.StatusOK || !bytes.Equal(got, body) {
			t.Errorf("status %d, %d bytes, %v, want the %d sent ones", resp.StatusCode, len(got), err, len(body))
		}
	}
	prints := fn{name: "prints", image: "noop"}.deployment()
	prints.EnvProcess = "env" // it prints its environment and ends
	if err := n.Deploy(t.Context(), prints); err != nil {
		t.Fatal(err)
	}
	n.until(soon, "lines over TLS", func() bool {
		return strings.Contains(string(n.send(http.MethodGet, "/system/logs?name=prints", "").Body), "STAGECOACH_REPLICA=prints-")
	})
	n.until(soon, "the cause of its end", func() bool {
		return strings.Contains(n.shows("prints").Annotations["stagecoach.dev/status"], "exited")
	})
	n.must(http.StatusAccepted, http.MethodDelete, "/system/functions", `{"functionName":"prints"}`)
	carried := func() float64 {
		return n.value(`stagecoach_tunnel_bytes_total{direction="sent"}`) + n.value(`stagecoach_tunnel_bytes_total{direction="received"}`)
	}
	before := carried()
	n.speaksHTTP(t)
	if got := carried() - before; got < 40<<20 { // 20 MB go to the function and come back
		t.Errorf("HTTP exchanges took %v bytes over TLS, want 40 MiB at least: they went another way", got)
	}
}

// TestSecretsOnAFarNode checks that a function sees its secrets on a node that shares no files with
// up, that a change reaches it, and that nothing is left of them after its removal.
func TestSecretsOnAFarNode(t *testing.T) {
	t.Parallel()
	n := startNodes(t, "--no-node")
	d := n.farDaemon("n1", "--log", "debug")
	const hidden = "hunter2-far"
	n.must(http.StatusCreated, http.MethodPost, "/system/secrets", `{"name":"token","value":"`+hidden+`"}`)
	n.must(http.StatusAccepted, http.MethodPost, "/system/functions",
		`{"service":"reads","image":"stagecoach/echo-http:0.1.0","envProcess":"/bin/sh","envVars":{"mode":"streaming"},"secrets":["token"],"labels":{"com.openfaas.scale.max":"1"}}`)
	shell := func(script string) string {
		return string(n.must(http.StatusOK, http.MethodPost, "/function/reads", script+"\nexit 0\n").Body)
	}
	if got := shell(`cat "$secret_mount_path/token"`); got != hidden {
		t.Errorf("the function reads %q, want its secret", got)
	}
	folder := shell(`echo -n "$secret_mount_path"`)
	ups, err := filepath.Glob(n.state + "/secret-mounts/*/*/*")
	if os.Getuid() == 0 {
		ups, err = filepath.Glob("/run/stagecoach/secrets-*/openfaas-fn/reads/" + filepath.Base(folder))
	}
	if err != nil || !strings.HasSuffix(folder, "/openfaas-fn/reads/"+filepath.Base(folder)) || os.Getuid() == 0 && len(ups) < 2 {
		t.Errorf("the function's folder is %s, folders are %q, %v, want one of up and one of the node", folder, ups, err)
	}
	if inv, _ := n.inventory("n1"); !slices.Equal(inv.Secrets, []string{"reads.openfaas-fn"}) {
		t.Errorf("the node announces secrets of %q", inv.Secrets)
	}
	n.must(http.StatusAccepted, http.MethodPut, "/system/secrets", `{"name":"token","value":"`+hidden+`-2"}`)
	n.until(soon, "the changed secret", func() bool { return shell(`cat "$secret_mount_path/token"`) == hidden+"-2" })
	n.must(http.StatusAccepted, http.MethodDelete, "/system/functions", `{"functionName":"reads"}`)
	n.until(soon, "the secrets to be removed", func() bool { inv, _ := n.inventory("n1"); return len(inv.Secrets) == 0 })
	if _, err := os.Stat(folder); !os.IsNotExist(err) {
		t.Errorf("%s: %v, want nothing there", folder, err)
	}
	for _, log := range []*logFile{d.log, n.log} {
		if strings.Contains(log.String(), "hunter2") {
			t.Error("a log has the secret")
		}
	}
}

// cutter passes connections on to an address, until they are cut.
type cutter struct {
	net.Listener
	group sync.WaitGroup

	to string

	mu    sync.Mutex
	conns []net.Conn
}

func newCutter(t *testing.T, to string) *cutter {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &cutter{Listener: l, to: to}
	c.group.Go(func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			c.mu.Lock()
			far, err := net.Dial("tcp", c.to)
			if err != nil {
				_ = near.Close()
			} else {
				c.conns = append(c.conns, near, far)
				c.group.Go(func() { pipe(near, far) })
			}
			c.mu.Unlock()
		}
	})
	t.Cleanup(func() { _ = l.Close(); c.cut(); c.group.Wait() })
	return c
}

func (c *cutter) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, conn := range c.conns {
		_ = conn.Close()
	}
	c.conns = nil
}

// TestFarNodeIsLost cuts a node's connection under load, and kills its daemon. No request may fail,
// because another node takes the calls. Afterwards the node takes part again.
func TestFarNodeIsLost(t *testing.T) {
	t.Parallel()
	n := startNodes(t, "--no-node")
	between := newCutter(t, "127.0.0.1:"+freePort(t))
	d1 := n.daemon("n1", "--listen", between.to, "--advertise", between.Addr().String(), "--remote")
	n.farDaemon("n2")
	n.deployAll(waitFn("hold", "20ms", map[string]string{"min": "4", "max": "4"}, nil))
	n.steady("hold", 4, "n1", "n2")
	l := n.load(4, "/function/hold", waited)
	l.turn()
	for range 2 {
		before := n.running("n1", "hold")
		between.cut()
		n.until(late, "n1's replicas to be replaced", func() bool {
			now := n.running("n1", "hold")
			return !slices.ContainsFunc(now, func(r string) bool { return slices.Contains(before, r) })
		})
		n.steady("hold", 4, "n1", "n2")
		l.turn()
	}
	proctest.Until(t, "a replica on n1 after the cuts", func() bool { return len(n.running("n1", "hold")) > 0 })
	kill9(t, d1.Cmd.Process.Pid)
	<-d1.Done
	l.turn()
	n.restartDaemon(d1)
	n.steady("hold", 4, "n1", "n2")
	l.turn()
	if requests, wrong := l.end(); len(wrong) > 0 {
		t.Errorf("of %d requests, %d failed: %v", requests, len(wrong), wrong[:min(len(wrong), 5)])
	}
	if inv, ok := n.inventory("n1"); !ok || inv.Socket != "" || inv.Address != between.Addr().String() {
		t.Errorf("n1 announces the socket %q and the address %q, want only an address", inv.Socket, inv.Address)
	}
}

// TestUnfitAddresses checks the flags of a node that other machines reach.
func TestUnfitAddresses(t *testing.T) {
	for args, want := range map[string]string{
		"--remote":              "--remote: true, want --listen, too",
		"--advertise a:1":       "--advertise: a:1, want --listen, too",
		"--listen 0.0.0.0:7070": "want --advertise HOST:PORT, too",
		"--listen :7070":        "want --advertise HOST:PORT, too",
		"--listen nowhere":      `--listen: "nowhere", want host:port`,
		"--listen :7070 --advertise 0.0.0.0:7070":  "host:port that others can dial",
		"--listen :7070 --advertise gpu-7.example": "host:port that others can dial",
	} {
		if _, err := readKeysManagerConfig(strings.Fields(args)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
	if _, err := readKeysManagerConfig(strings.Fields("--listen :7070 --advertise gpu-7.example:7070 --remote")); err != nil {
		t.Error(err)
	}
}
