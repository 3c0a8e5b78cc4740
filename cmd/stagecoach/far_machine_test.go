package main

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
)

// lan is a network namespace that stands for another machine, and the link to it.
type lan struct {
	netns      string // path
	near, far  string // addresses
	disconnect func()
	connect    func()
}

// lans counts the namespaces of this process's tests.
var lans atomic.Int32

// newLAN makes another machine. At the test's end, it is removed.
func newLAN(t *testing.T) *lan {
	t.Helper()
	needRoot(t)
	id := fmt.Sprintf("%d-%d", os.Getpid()%100000, lans.Add(1))
	ns, link := "sc-"+id, "sc"+id
	subnet := fmt.Sprintf("10.99.%d", (os.Getpid()+int(lans.Load()))%250)
	l := &lan{netns: "/run/netns/" + ns, near: subnet + ".1", far: subnet + ".2"}
	ip := func(args ...string) {
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Errorf("ip %q: %v: %s", args, err, out)
		}
	}
	ip("netns", "add", ns)
	t.Cleanup(func() { ip("netns", "del", ns) })
	ip("link", "add", link, "type", "veth", "peer", "name", "up0", "netns", ns)
	ip("addr", "add", l.near+"/24", "dev", link)
	ip("link", "set", link, "up")
	ip("-n", ns, "addr", "add", l.far+"/24", "dev", "up0")
	ip("-n", ns, "link", "set", "up0", "up")
	ip("-n", ns, "link", "set", "lo", "up")
	l.disconnect = func() { ip("link", "set", link, "down") }
	l.connect = func() { ip("link", "set", link, "up") }
	if t.Failed() {
		t.FailNow()
	}
	return l
}

// TestAnotherMachine runs functions in another network namespace than up's, which only a cable
// connects. They are called, and call each other; they do not reach what is up's.
func TestAnotherMachine(t *testing.T) {
	m := newLAN(t)
	t.Parallel()
	images := attackers(t)
	n := startNodes(t, "--no-node", "--nats-listen", m.near+":0", "--images", images)
	n.daemonIn(m.netns, "n1", "--listen", m.far+":0", "--remote", "--images", images)
	hostile := map[string]string{"fprocess": "./hostile", "mode": "streaming"}
	n.deployAll(
		fn{"hostile", "test/hostile:1", map[string]string{"min": "1", "max": "1"}, nil, hostile},
		fn{"victim", "noop", map[string]string{"min": "1", "max": "1"}, nil, nil},
	)
	n.steady("hostile", 1, "n1")
	n.steady("victim", 1, "n1")
	got := n.attack("hostile", "get http://gateway.openfaas:8080/function/victim", "get http://gateway.openfaas:8080/system/functions", "tcp "+m.near+":22")
	if !strings.HasPrefix(got[0], "200") || !strings.HasPrefix(got[1], "401") || got[2] == "reached" {
		t.Errorf("%q, want the function reached and nothing else", got)
	}
	body := strings.Repeat("x", 1<<20)
	if a := n.must(http.StatusOK, http.MethodPost, "/function/victim", body); string(a.Body) != body {
		t.Errorf("%d bytes came back, want %d", len(a.Body), len(body))
	}
	if out, err := exec.Command("ip", "-n", strings.TrimPrefix(m.netns, "/run/netns/"), "-br", "link").Output(); err != nil || len(strings.Fields(string(out))) < 9 {
		t.Errorf("links of the other machine: %s, %v, want those of replicas beside its own", out, err)
	}
}

// TestShortOutage unplugs the cable until the node is silent, and plugs it in again. A call that
// was sent meanwhile is answered by the same replica.
func TestShortOutage(t *testing.T) {
	m := newLAN(t)
	t.Parallel()
	n := startNodes(t, "--no-node", "--nats-listen", m.near+":0")
	n.daemonIn(m.netns, "n1", "--listen", m.far+":0", "--remote")
	n.deployAll(fn{"alive", "noop", map[string]string{"min": "1", "max": "1"}, nil, nil})
	n.steady("alive", 1, "n1")
	before := n.running("n1", "alive")
	n.must(http.StatusOK, http.MethodPost, "/function/alive", "x")
	m.disconnect()
	n.until(soon, "the node to be silent", func() bool { _, heard := n.inventory("n1"); return !heard })
	var call sync.WaitGroup
	call.Go(func() {
		if a := n.send(http.MethodPost, "/function/alive", "y"); a.Status != http.StatusOK || string(a.Body) != "y" {
			t.Errorf("a call during the outage: status %d, %q", a.Status, a.Body)
		}
	})
	n.until(soon, "the call to be under way", func() bool { return n.line("alive").Running == 1 })
	m.connect()
	call.Wait()
	n.until(soon, "the node to be heard", func() bool { _, heard := n.inventory("n1"); return heard })
	if now := n.running("n1", "alive"); !slices.Equal(now, before) {
		t.Errorf("replicas %v, want %v: nothing was lost", now, before)
	}
}

// TestStageThatDoesNotRead stops a replica while many calls are sent to it, until nothing more fits
// into its socket. Another function of the same node must go on.
func TestStageThatDoesNotRead(t *testing.T) {
	t.Parallel()
	n := startNodes(t, "--no-node")
	n.farDaemon("n1")
	one := map[string]string{"min": "1", "max": "1"}
	n.deployAll(fn{"frozen", "noop", one, nil, map[string]string{"max_inflight": "400"}}, fn{"alive", "noop", one, nil, nil})
	n.steady("frozen", 1, "n1")
	n.steady("alive", 1, "n1")
	inv, _ := n.inventory("n1")
	frozen := inv.Replicas[slices.IndexFunc(inv.Replicas, func(r node.Replica) bool { return strings.HasPrefix(r.Name, "frozen-") })].PID
	n.must(http.StatusOK, http.MethodPost, "/function/frozen", "first")
	if err := syscall.Kill(frozen, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	body := bytes.Repeat([]byte("y"), 60<<10)
	var calls sync.WaitGroup
	var ended atomic.Int32
	for range 120 { // 7 MB, and a stream's window has 4
		calls.Go(func() {
			resp, err := n.HTTP.Post(n.Base+"/function/frozen", "text/plain", bytes.NewReader(body))
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			if b, err := io.ReadAll(resp.Body); resp.StatusCode != http.StatusOK || !bytes.Equal(b, body) {
				t.Errorf("status %d, %d bytes, %v", resp.StatusCode, len(b), err)
			}
			ended.Add(1)
		})
	}
	n.until(soon, "the calls to be under way", func() bool { l := n.line("frozen"); return l.Running+l.Waiting >= 120 })
	for range 20 {
		if a := n.must(http.StatusOK, http.MethodPost, "/function/alive", string(body)); !bytes.Equal(a.Body, body) {
			t.Errorf("%d bytes came back", len(a.Body))
		}
	}
	if got := ended.Load(); got != 0 {
		t.Errorf("%d calls of a stopped replica have ended", got)
	}
	if err := syscall.Kill(frozen, syscall.SIGCONT); err != nil {
		t.Error(err)
	}
	calls.Wait()
}

// TestProfileOfAFarNode measures a function on a node that up reaches over TLS.
func TestProfileOfAFarNode(t *testing.T) {
	needGroups(t)
	t.Parallel()
	n := startNodes(t, "--no-node")
	n.farDaemon("n1")
	spin := fn{"spin", "spin", map[string]string{"min": "1"}, map[string]string{"example": "x"}, map[string]string{"spin_base": "5ms", "spin_call": "0ms"}}
	n.deployAll(spin)
	n.steady("spin", 1, "n1")
	c := &operator{t, t.TempDir(), n.Base}
	c.run(`(?s)on node n1.*\n1000m +1 `, "", "profile", "spin", "--cpu", "1", "--batch", "1", "--most", "10")
}
