package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/child"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// nodesRig is a running `stagecoach up` that is no node, and daemons that are.
type nodesRig struct {
	*rig
	url   string // of its NATS
	epoch atomic.Uint64
	watch *node.Directory
}

// keysDaemon is a running `stagecoach keysmanager`.
type keysDaemon struct {
	*child.Process
	name  string
	state string
	args  []string
	log   *logFile
	netns string // path of the network namespace that it is in; empty: the test's
}

var joinURL = regexp.MustCompile(`msg="nodes can join" url=(\S+)`)

func startNodes(t *testing.T, flags ...string) *nodesRig {
	t.Helper()
	// Of the test, so that a restarted up can have it again.
	n := &nodesRig{rig: start(t, append([]string{"--nats-listen", "127.0.0.1:" + freePort(t)}, flags...)...)}
	n.url = n.joinURL()
	n.open(n.control())
	return n
}

// open begins to watch the nodes.
func (n *nodesRig) open(bus *queue.Link) {
	t := n.t
	t.Helper()
	boot, err := node.BootID()
	if err != nil {
		t.Fatal(err)
	}
	// This directory runs beside up's own one. It does not read the replicas' lines, because only
	// up's directory may take them.
	n.watch, err = node.OpenDirectory(node.DirectoryConfig{
		Bus: bus, Boot: boot, Log: slog.New(slog.DiscardHandler),
		Epoch:  func() (uint64, error) { return n.epoch.Load(), nil },
		Joined: func(*node.Client) {}, Left: func(string, string) {}, Heard: func(*node.Client) {}, Event: func(string, node.Event) {},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.watch.Close)
}

// access is the access of a control plane to NATS, with the keys in up's state folder.
func (n *nodesRig) access() queue.Access {
	n.t.Helper()
	keys, err := natsKeys(filepath.Join(n.state, "identity"))
	if err != nil {
		n.t.Fatal(err)
	}
	token, err := joinConfig{token: n.token()}.readToken()
	if err != nil {
		n.t.Fatal(err)
	}
	a := keys.Control()
	a.TLS = identity.NATSClient(token.CA, time.Now)
	return a
}

// control connects to NATS as a control plane.
func (n *nodesRig) control() *queue.Link {
	n.t.Helper()
	nc, err := queue.Connect(n.url, n.access(), "test", slog.New(slog.DiscardHandler))
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(nc.Close)
	return queue.NewLink(nc)
}

// joinURL waits until up has logged where nodes join, and returns the latest such place.
func (r *rig) joinURL() string {
	r.t.Helper()
	var all [][]string
	r.until(soon, "up to say where nodes join", func() bool {
		all = joinURL.FindAllStringSubmatch(r.log.String(), -1)
		return len(all) > 0
	})
	return all[len(all)-1][1]
}

func (n *nodesRig) token() string { return tokenFile(n.state) }

// daemon starts a node. At the test's end it is stopped, and must leave no process.
func (n *nodesRig) daemon(name string, flags ...string) *keysDaemon {
	n.t.Helper()
	return n.daemonIn("", name, flags...)
}

// daemonIn does what daemon does, in a network namespace.
func (n *nodesRig) daemonIn(netns, name string, flags ...string) *keysDaemon {
	n.t.Helper()
	d := &keysDaemon{name: name, state: n.t.TempDir(), log: &logFile{}, netns: netns}
	d.args = append([]string{
		"keysmanager", "--node", name, "--nats", n.url, "--nats-token", n.token(), "--state", d.state, "--memory", "1Gi", "--cpus", "1",
		"--devices", "none", "--images", proctest.Built(n.t, "images"), "--ort", proctest.Built(n.t, "ort", "libonnxruntime.so.1"),
	}, flags...)
	n.restartDaemon(d)
	n.t.Cleanup(func() {
		left := n.processes(name)
		if d.Process != nil {
			if err := d.Stop(); err != nil {
				n.t.Errorf("%s ended with %v, want exit status 0", name, err)
			}
		}
		gone(n.t, left)
		if log := d.log.String(); n.t.Failed() || crashed(log) {
			n.t.Errorf("the end of %s's log:\n%s", name, log[max(0, len(log)-4000):])
		}
	})
	return d
}

// restartDaemon starts a daemon, again, on the same folder, and returns when both the test and up
// have heard it: up starts replicas only on nodes that it has heard.
func (n *nodesRig) restartDaemon(d *keysDaemon) {
	n.t.Helper()
	var err error
	program, args := os.Args[0], d.args
	if d.netns != "" {
		program, args = "nsenter", append([]string{"--net=" + d.netns, os.Args[0]}, args...)
	}
	if d.Process, err = child.StartProgram(context.Background(), program, d.log, args...); err != nil {
		n.t.Fatalf("%v\n%s", err, d.log)
	}
	pid := d.Cmd.Process.Pid
	n.until(soon, d.name+" to be heard", func() bool {
		i, ok := n.inventory(d.name)
		return ok && i.PID == pid && n.hears(d.name, pid)
	})
}

// hears reports whether up hears a node's daemon in this process.
func (n *nodesRig) hears(name string, pid int) bool {
	var all []schema.Node
	if err := n.Get(n.t.Context(), "/system/nodes", &all); err != nil {
		n.t.Fatal(err)
	}
	return slices.ContainsFunc(all, func(n schema.Node) bool { return n.Name == name && n.PID == pid && n.Status != schema.NodeSilent })
}

// inventory is the latest announcement of a node that is heard.
func (n *nodesRig) inventory(name string) (node.Inventory, bool) {
	all := n.watch.Inventories()
	i := slices.IndexFunc(all, func(i node.Inventory) bool { return i.Name == name })
	if i < 0 {
		return node.Inventory{}, false
	}
	return all[i], true
}

// processes are those that a node has announced.
func (n *nodesRig) processes(name string) []process {
	inv, _ := n.inventory(name)
	var out []process
	for _, z := range inv.Zygotes {
		if p, err := readProcess(z.PID); err == nil {
			out = append(out, p)
		}
	}
	for _, r := range inv.Replicas {
		if p, err := readProcess(r.PID); err == nil {
			out = append(out, p)
		}
	}
	return out
}

// running are the names of a function's replicas on a node.
func (n *nodesRig) running(name, function string) []string {
	inv, _ := n.inventory(name)
	var out []string
	for _, r := range inv.Replicas {
		if strings.HasPrefix(r.Function, function+".") {
			out = append(out, r.Name)
		}
	}
	slices.Sort(out)
	return out
}

func waited(_ string, a client.Answer) error {
	if a.Status != http.StatusOK || !strings.HasPrefix(string(a.Body), "waited ") {
		return fmt.Errorf("status %d, %q", a.Status, a.Body)
	}
	return nil
}

// steady returns when a function has this many replicas on all nodes together, and all are ready.
func (n *nodesRig) steady(function string, want int, names ...string) {
	n.t.Helper()
	n.until(late, fmt.Sprintf("%d replicas of %s on %v", want, function, names), func() bool {
		there := 0
		for _, name := range names {
			there += len(n.running(name, function))
		}
		return there == want && n.shows(function).AvailableReplicas == want
	})
}

// TestNodes runs replicas on two daemons under load, and no request may fail. One daemon falls
// silent, returns, and is then stopped as operators do. The other daemon, which now has all
// replicas, is killed and started again.
func TestNodes(t *testing.T) {
	t.Parallel()
	n := startNodes(t, "--no-node")
	d1, d2 := n.daemon("n1"), n.daemon("n2")
	n.deployAll(waitFn("hold", "20ms", map[string]string{"min": "8", "max": "8"}, nil), fn{"echo", "noop", map[string]string{"min": "1", "max": "1"}, nil, nil})
	n.steady("hold", 8, "n1", "n2")
	on1, on2 := n.running("n1", "hold"), n.running("n2", "hold")
	if len(on1) != 4 || len(on2) != 4 {
		t.Errorf("replicas %v on n1 and %v on n2, want four on each", on1, on2)
	}
	if a := n.must(http.StatusOK, http.MethodPost, "/function/echo", "hello"); string(a.Body) != "hello" {
		t.Errorf("echo answers %q", a.Body)
	}
	for _, name := range []string{"n1", "n2"} {
		if got := n.value(fmt.Sprintf(`stagecoach_cache_zygotes{node=%q}`, name)); got != 1 {
			t.Errorf("the metrics say that %s has %v zygotes, want 1", name, got)
		}
	}
	l := n.load(4, "/function/hold", waited)
	l.turn()

	t.Log("a node falls silent")
	if err := d2.Cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	stopped := time.Now()
	n.until(soon, "n2's replicas to be out of sight", func() bool { return len(n.events("hold", "out of sight")) == 4 })
	t.Logf("out of sight after %v", n.events("hold", "out of sight")[0].At.Sub(stopped))
	l.turn()
	if err := d2.Cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	n.until(soon, "n2's replicas to be back", func() bool { return len(n.events("hold", "back in sight")) == 4 })
	n.steady("hold", 8, "n1", "n2")
	l.turn()

	t.Log("a node is stopped")
	left := n.processes("n2")
	if err := d2.Stop(); err != nil {
		t.Errorf("n2 ended with %v, want exit status 0", err)
	}
	d2.Process = nil
	gone(t, left)
	n.steady("hold", 8, "n1")
	l.turn()

	t.Log("a daemon is killed, and the next one cannot start")
	before := n.running("n1", "hold")
	zygote := n.processes("n1")[0]
	if len(before) != 8 {
		t.Fatalf("n1 runs %v, want 8 replicas", before)
	}
	kill9(t, d1.Cmd.Process.Pid)
	<-d1.Done
	if c, err := child.Start(t.Context(), d1.log, append(d1.args, "--metrics", strings.TrimPrefix(n.Base, "http://"))...); err == nil {
		t.Error("a daemon starts whose --metrics are up's own address", c.Stop())
	}
	l.turn()
	n.restartDaemon(d1)
	if got := n.running("n1", "hold"); !slices.Equal(got, before) {
		t.Errorf("the new daemon runs %v, want those that it has adopted: %v", got, before)
	}
	if now, err := readProcess(zygote.pid); err != nil || now.start != zygote.start {
		t.Errorf("the zygote %d has ended: %v", zygote.pid, err)
	}
	l.turn()
	n.steady("hold", 8, "n1")
	requests, wrong := l.end()
	for _, w := range wrong {
		t.Error(w)
	}
	if lost := n.events("hold", "lost"); len(lost) > 0 {
		t.Errorf("replicas were lost: %+v", lost)
	}
	t.Logf("%d requests, slowest answer %v, %v calls retried", requests, l.slowest, n.value("stagecoach_flow_retries_total"))
}

// TestUpUnderNodes suspends up while a daemon runs its replicas, as on a laptop that sleeps. When
// up resumes, the same replicas run. Then the test kills up and starts it again. The replicas have
// ended with it, but the daemon has kept the parameters in memory, and new replicas fork from them.
func TestUpUnderNodes(t *testing.T) {
	t.Parallel()
	n := startNodes(t, "--no-node")
	n.daemon("n1")
	n.deployAll(waitFn("hold", "20ms", map[string]string{"min": "3", "max": "3"}, nil))
	n.steady("hold", 3, "n1")
	before, names := n.processes("n1"), n.running("n1", "hold")
	if err := n.up.Cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	<-time.After(4 * time.Second) // longer than a node may be silent
	if err := n.up.Cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	n.must(http.StatusOK, http.MethodPost, "/function/hold", "x")
	n.steady("hold", 3, "n1")
	if got := n.running("n1", "hold"); !slices.Equal(got, names) || len(n.events("hold", "lost")) > 0 {
		t.Errorf("n1 runs %v after up stood still, lost were %v, want %v still", got, n.events("hold", "lost"), names)
	}
	n.end9()
	gone(t, before[1:])
	n.restart()
	n.steady("hold", 3, "n1")
	n.must(http.StatusOK, http.MethodPost, "/function/hold", "x")
	if after := n.processes("n1"); after[0] != before[0] {
		t.Errorf("the zygote is %+v, want the one that was there: %+v", after[0], before[0])
	}
	for _, e := range n.events("hold", "started") {
		if e.Path == "cold" {
			t.Errorf("%+v, want forks of the zygote that was there", e)
		}
	}
	n.must(http.StatusAccepted, http.MethodDelete, "/system/functions", `{"functionName":"hold"}`)
	gone(t, before[:1]) // nobody needs it any more
}

// TestStrayReplica starts a replica that up has not ordered, and checks that up stops it.
func TestStrayReplica(t *testing.T) {
	t.Parallel()
	n := startNodes(t)
	n.daemon("n1")
	spec := node.Spec{Function: "stray.openfaas-fn", Namespace: "openfaas-fn", Image: "stagecoach/noop:0.1.0"}
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	n.until(soon, "up to have spoken to the node", func() bool { inv, _ := n.inventory("n1"); n.epoch.Store(inv.Epoch); return inv.Epoch > 0 })
	all := n.watch.Clients()
	started, err := all[0].Start(ctx, node.Order{Replica: "stray-1", Spec: spec}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer started.Conn.Close()
	proctest.Gone(t, started.PID)
	n.until(soon, "up to say that it has stopped stray-1", func() bool { return strings.Contains(n.log.String(), "replica=stray-1") })
}

// exports checks that a daemon's own metrics have a line.
func (d *keysDaemon) exports(t *testing.T, line string) {
	t.Helper()
	var at []string
	proctest.Until(t, d.name+" to say where its metrics are", func() bool {
		at = regexp.MustCompile(`msg=metrics url=(\S+)`).FindStringSubmatch(d.log.String())
		return at != nil
	})
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, at[1], nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK || !slices.Contains(strings.Split(string(b), "\n"), line) {
		t.Errorf("%s's metrics: status %d, %v, want %s in\n%s", d.name, resp.StatusCode, err, line, b)
	}
}

// TestNodeNames starts daemons under names that other nodes have.
func TestNodeNames(t *testing.T) {
	t.Parallel()
	n := startNodes(t)
	d := n.daemon("n1", "--metrics", "127.0.0.1:0")
	d.exports(t, `stagecoach_cache_zygotes{node="n1"} 0`)
	host := defaultConfig().Node.Name
	for name, want := range map[string]string{
		"n1": `the name "n1" is taken`,
		host: "is a part of `stagecoach up` itself",
	} {
		var log logFile
		args := []string{"keysmanager", "--node", name, "--nats", n.url, "--nats-token", n.token(), "--state", t.TempDir(), "--images", proctest.Built(t, "images")}
		c, err := child.Start(t.Context(), &log, args...)
		if err == nil {
			err = <-c.Done
		}
		if err == nil || !strings.Contains(log.String(), want) {
			t.Errorf("a second daemon of %s ended with %v and says %s, want %q", name, err, &log, want)
		}
	}
	var log logFile
	if c, err := child.Start(t.Context(), &log, append(d.args, "--node", "n3")...); err == nil {
		t.Error("a second daemon on a folder comes up", c.Stop())
	} else if !strings.Contains(log.String(), "is in use by another stagecoach") {
		t.Errorf("a second daemon on a folder says %s", &log)
	}
}

// gap is a connection to NATS that can be cut.
type gap struct {
	l      net.Listener
	to     string
	group  sync.WaitGroup
	mu     sync.Mutex
	cut    bool
	closed []net.Conn
}

func newGap(t *testing.T, to string) *gap {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := &gap{l: l, to: strings.TrimPrefix(to, "nats://")}
	g.group.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			g.group.Go(func() { g.carry(c) })
		}
	})
	t.Cleanup(func() { g.set(true); _ = l.Close(); g.group.Wait() })
	return g
}

func (g *gap) carry(c net.Conn) {
	defer c.Close()
	g.mu.Lock()
	cut := g.cut
	g.mu.Unlock()
	if cut {
		return
	}
	d, err := net.Dial("tcp", g.to)
	if err != nil {
		return
	}
	defer d.Close()
	g.mu.Lock()
	if g.cut {
		g.mu.Unlock()
		return
	}
	g.closed = append(g.closed, c, d)
	g.mu.Unlock()
	var both sync.WaitGroup
	both.Go(func() { _, _ = io.Copy(c, d); _ = c.Close() })
	both.Go(func() { _, _ = io.Copy(d, c); _ = d.Close() })
	both.Wait()
}

func (g *gap) set(cut bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.cut = cut; cut {
		for _, c := range g.closed {
			_ = c.Close()
		}
		g.closed = nil
	}
}

// TestNATSOutage cuts a node off from NATS under load. Its replicas go on, and are known again
// afterwards. NATS_OUTAGE is how long the outage lasts once it was noticed; see `make test-faults`.
func TestNATSOutage(t *testing.T) {
	t.Parallel()
	n := startNodes(t, "--no-node")
	g := newGap(t, n.url)
	n.daemon("n1", "--nats", "nats://"+g.l.Addr().String())
	n.deployAll(waitFn("hold", "20ms", map[string]string{"min": "2", "max": "2"}, nil))
	n.steady("hold", 2, "n1")
	inv, _ := n.inventory("n1")
	before := inv.Replicas
	l := n.load(4, "/function/hold", waited)
	l.turn()
	g.set(true)
	n.until(soon, "n1's replicas to be out of sight", func() bool { return len(n.events("hold", "out of sight")) == 2 })
	l.turn()
	if lasts := os.Getenv("NATS_OUTAGE"); lasts != "" {
		outage, err := time.ParseDuration(lasts)
		if err != nil {
			t.Fatal(err)
		}
		<-time.After(outage)
		l.turn()
	}
	kill9(t, before[1].PID)
	n.until(soon, "the dispatcher to see that one has ended", func() bool { return len(n.events("hold", "lost")) == 1 })
	l.turn()
	g.set(false)
	n.until(soon, "n1 to be back", func() bool { return len(n.events("hold", "back in sight")) == 1 })
	n.steady("hold", 2, "n1")
	l.turn()
	requests, wrong := l.end()
	for _, w := range wrong {
		t.Error(w)
	}
	if got := n.running("n1", "hold"); !slices.Contains(got, before[0].Name) {
		t.Errorf("n1 runs %v, want %s still", got, before[0].Name)
	}
	t.Logf("%d requests, slowest answer %v", requests, l.slowest)
}
