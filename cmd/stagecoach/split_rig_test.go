package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/child"
	"github.com/stagecoach-serving/stagecoach/internal/natstest"
	"github.com/stagecoach-serving/stagecoach/internal/netnstest"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity/outside"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// splitRig is a cluster of eight machines: three NATS servers, three control planes, and two nodes.
type splitRig struct {
	t        *testing.T
	net      *netnstest.Net
	servers  []*netnstest.Machine
	nodes    []*netnstest.Machine
	controls []*rig
	daemons  []*splitDaemon
	images   string
}

// splitDaemon is a node's daemon on its machine.
type splitDaemon struct {
	*child.Process
	log *logFile
}

// tunnelPort is the port on which nodes listen for control planes and for each other.
const tunnelPort = 7070

// startSplit starts the cluster. Its control planes and daemons use one folder of images. The
// daemons are reached over TLS alone. SPLIT_LINK=unix has them reached over their unix sockets,
// which no partition cuts, so that replicas outlive all partitions.
func startSplit(t *testing.T) *splitRig {
	t.Helper()
	n, m := netnstest.New(t, 8)
	s := &splitRig{t: t, net: n, servers: m[:3], nodes: m[6:], images: runsImages(t)}
	of, key := s.runServers()
	for i, at := range m[3:6] {
		r := &rig{t: t, log: &logFile{}, state: t.TempDir(), on: at}
		s.controls = append(s.controls, startRig(t, r, "--nats", of, "--cluster-key", key, "--cluster-listen", at.IP+":7444",
			"--no-node", "--images", s.images, "--listen", "127.0.0.1:8080"))
		t.Cleanup(func() { s.keep(fmt.Sprint("control-", i), r.log) })
	}
	token := s.token()
	for i, at := range s.nodes {
		s.daemons = append(s.daemons, s.daemon(at, fmt.Sprint("n", i), of, token))
	}
	t.Cleanup(n.Heal) // so that all processes end well
	return s
}

// runServers runs the NATS servers with the files of `stagecoach cluster init`. It returns their
// URLs and the file with the cluster key.
func (s *splitRig) runServers() (urls, key string) {
	s.t.Helper()
	dir := s.t.TempDir()
	var names, dirs []string
	var hosts []natstest.Host
	for _, at := range s.servers {
		names, dirs = append(names, at.IP), append(dirs, filepath.Join(dir, at.IP))
		hosts = append(hosts, natstest.Host{IP: at.IP, Dial: at.Dial, Command: at.Command})
	}
	if err := run(s.t.Context(), []string{"cluster", "init", "--dir", dir, "--servers", strings.Join(names, ",")}, io.Discard); err != nil {
		s.t.Fatal(err)
	}
	of := natstest.StartConfiguredOn(s.t, queue.OutsideConfig, dirs, hosts...)
	return of.String(), filepath.Join(dir, outside.KeyFile)
}

// token returns a file with a join token for all nodes.
func (s *splitRig) token() string {
	s.t.Helper()
	file := filepath.Join(s.t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(s.command(s.controls[0], "node", "token", "--uses", "2")), 0o600); err != nil {
		s.t.Fatal(err)
	}
	return file
}

// command runs a command of stagecoach on the machine of a control plane, and returns its output.
func (s *splitRig) command(r *rig, args ...string) string {
	s.t.Helper()
	cmd := r.on.Command(os.Args[0], append(args, "--gateway", r.Base)...)
	cmd.Env = append(os.Environ(), actAsMain+"=1")
	var fault strings.Builder
	cmd.Stderr = &fault
	out, err := cmd.Output()
	if err != nil {
		s.t.Fatalf("%q: %v\n%s", args, err, &fault)
	}
	return string(out)
}

// keep writes a log into the folder that SPLIT_LOGS names.
func (s *splitRig) keep(name string, log *logFile) {
	if dir := os.Getenv("SPLIT_LOGS"); dir != "" {
		if err := os.WriteFile(filepath.Join(dir, name+".log"), []byte(log.String()), 0o600); err != nil {
			s.t.Error(err)
		}
	}
}

// runsImages returns a folder of images that has test/runs:1.
func runsImages(t *testing.T) string {
	t.Helper()
	images := t.TempDir()
	if err := os.Chmod(images, 0o755); err != nil { //nolint:gosec // functions are users of their own
		t.Fatal(err)
	}
	folder := filepath.Join(images, "test", "runs", "1")
	if out, err := exec.Command("go", "build", "-o", filepath.Join(folder, "stage"), "./testdata/runs").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return images
}

// daemon starts a node. At the end of the test it is stopped.
func (s *splitRig) daemon(at *netnstest.Machine, name, urls, token string) *splitDaemon {
	s.t.Helper()
	d := &splitDaemon{log: &logFile{}}
	args := []string{
		"--net=" + at.Namespace(), os.Args[0], "keysmanager", "--name", name, "--join", urls, "--token", token, "--state", s.t.TempDir(),
		"--listen", fmt.Sprintf("%s:%d", at.IP, tunnelPort), "--memory", "1Gi", "--cpus", "1", "--devices", "none",
		"--images", s.images, "--ort", proctest.Built(s.t, "ort", "libonnxruntime.so.1"), "--log", "debug",
	}
	if os.Getenv("SPLIT_LINK") != "unix" {
		args = append(args, "--remote")
	}
	var err error
	if d.Process, err = child.StartProgram(context.Background(), "nsenter", d.log, args...); err != nil {
		s.t.Fatalf("%v\n%s", err, d.log)
	}
	s.t.Cleanup(func() {
		if err := d.Stop(); err != nil {
			s.t.Errorf("%s ended with %v, want exit status 0", name, err)
		}
		s.keep(name, d.log)
		if log := d.log.String(); s.t.Failed() || crashed(log) {
			s.t.Errorf("the end of %s's log:\n%s", name, log[max(0, len(log)-4000):])
		}
	})
	return d
}

// countRuns makes a named pipe for the stage "runs", and returns its path. The returned function
// ends the counting, and returns how often each request ran.
func (s *splitRig) countRuns() (path string, end func() map[string]int) {
	s.t.Helper()
	dir, err := os.MkdirTemp("/run", "stagecoach-test-runs-") // functions see no files in /tmp
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // functions are users of their own
		s.t.Fatal(err)
	}
	path = filepath.Join(dir, "pipe")
	if err := syscall.Mkfifo(path, 0o622); err != nil {
		s.t.Fatal(err)
	}
	if err := os.Chmod(path, 0o622); err != nil { //nolint:gosec // functions are users of their own
		s.t.Fatal(err)
	}
	pipe, err := os.OpenFile(path, os.O_RDWR, 0) // for both, so that it never ends
	if err != nil {
		s.t.Fatal(err)
	}
	counts := map[string]int{}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for lines := bufio.NewScanner(pipe); lines.Scan(); {
			id, _, _ := strings.Cut(lines.Text(), " ")
			counts[id]++
		}
	}()
	closed := sync.OnceFunc(func() { _ = pipe.Close(); <-done })
	s.t.Cleanup(closed)
	return path, func() map[string]int { closed(); return counts }
}

// leader returns the control plane that leads; -1: none says so.
func (s *splitRig) leader() int {
	for i, r := range s.controls {
		if v, err := r.Metric(context.Background(), "stagecoach_control_leading "); err == nil && v == 1 {
			return i
		}
	}
	return -1
}

// fault is a partition.
type fault struct {
	name string
	cuts []netnstest.Cut
	// node is the index of the node whose tunnel alone is cut; -1: no such cut.
	node int
}

// tunnels reports whether the fault cuts connections over TLS of nodes.
func (f fault) tunnels() bool { return f.cuts[0].Port == tunnelPort }

// fault draws a partition. only has a part of the names of partitions that may be drawn; empty: all
// may.
func (s *splitRig) fault(chance *rand.Rand, only string) fault {
	i, j, k := chance.IntN(3), chance.IntN(3), chance.IntN(2)
	if lead := s.leader(); lead >= 0 && chance.IntN(2) == 0 {
		i = lead // the others matter less
	}
	control, server, node := s.controls[i].on, s.servers[j], s.nodes[k]
	alone := func(some ...*netnstest.Machine) []netnstest.Cut {
		return netnstest.Between(some, s.net.Others(some...))
	}
	one := func(m *netnstest.Machine, out bool) []netnstest.Cut {
		return slices.DeleteFunc(alone(m), func(c netnstest.Cut) bool { return (c.From == m) != out })
	}
	all := []fault{
		{fmt.Sprintf("control plane %d alone", i), alone(control), -1},
		{fmt.Sprintf("server %d alone", j), alone(server), -1},
		{fmt.Sprintf("node %d alone", k), alone(node), -1},
		{fmt.Sprintf("server %d from the other servers", j), netnstest.Between([]*netnstest.Machine{server}, s.servers), -1},
		{fmt.Sprintf("control plane %d from server %d", i, j), netnstest.Between([]*netnstest.Machine{control}, []*netnstest.Machine{server}), -1},
		{fmt.Sprintf("what control plane %d sends", i), one(control, true), -1},
		{fmt.Sprintf("what control plane %d receives", i), one(control, false), -1},
		{fmt.Sprintf("what server %d sends", j), one(server, true), -1},
		{fmt.Sprintf("control plane %d and server %d from the rest", i, j), alone(control, server), -1},
		{fmt.Sprintf("control plane %d, server %d and node %d from the rest", i, j, k), alone(control, server, node), -1},
		{"all servers from each other", netnstest.Between(s.servers, s.servers), -1},
		{fmt.Sprintf("the tunnel of node %d", k), atPort(alone(node)), k},
		{fmt.Sprintf("the tunnel of node %d to control plane %d", k, i), atPort(netnstest.Between([]*netnstest.Machine{node}, []*netnstest.Machine{control})), k},
		{fmt.Sprintf("the tunnel of node %d, and control plane %d alone", k, i), append(atPort(alone(node)), alone(control)...), k},
		{fmt.Sprintf("control plane %d from all nodes", i), atPort(netnstest.Between([]*netnstest.Machine{control}, s.nodes)), -1},
		{fmt.Sprintf("what node %d sends over its tunnel", k), atPort(one(node, true)), k},
		{fmt.Sprintf("what node %d receives over its tunnel", k), atPort(one(node, false)), k},
	}
	all = slices.DeleteFunc(all, func(f fault) bool { return !strings.Contains(f.name, only) })
	if len(all) == 0 {
		s.t.Fatalf("no partition has %q in its name", only)
	}
	return all[chance.IntN(len(all))]
}

// atPort restricts cuts to the connections over TLS of nodes. Those to NATS stay.
func atPort(cuts []netnstest.Cut) []netnstest.Cut {
	for i := range cuts {
		cuts[i].Port = tunnelPort
	}
	return cuts
}

// answers returns when each control plane answers requests of all kinds, and how long that took.
func (s *splitRig) answers(limit time.Duration) (took time.Duration, wrong []string) {
	begun := time.Now()
	var mu sync.Mutex
	var asked sync.WaitGroup
	for i, r := range s.controls {
		for _, path := range []string{"/function/often", "/function/once", "/async-function/often"} {
			asked.Go(func() {
				for last := ""; ; time.Sleep(50 * time.Millisecond) {
					got, err := r.trySend(http.MethodPost, path, "probe", "X-Timeout", "5s")
					if err == nil && (got.Status == http.StatusOK || got.Status == http.StatusAccepted) {
						return
					}
					last = fmt.Sprintf("control plane %d, %s: status %d, %v: %.300s", i, path, got.Status, err, got.Body)
					if time.Since(begun) > limit {
						mu.Lock()
						wrong = append(wrong, last)
						mu.Unlock()
						return
					}
				}
			})
		}
	}
	asked.Wait()
	return time.Since(begun), wrong
}

// nodesOf returns the nodes as a control plane shows them, by name.
func nodesOf(r *rig) (map[string]schema.Node, error) {
	got, err := r.trySend(http.MethodGet, "/system/nodes", "")
	if err != nil {
		return nil, err
	}
	var all []schema.Node
	if err := json.Unmarshal(got.Body, &all); err != nil {
		return nil, fmt.Errorf("status %d: %w", got.Status, err)
	}
	out := map[string]schema.Node{}
	for _, n := range all {
		out[n.Name] = n
	}
	return out, nil
}

// told checks what the leader says of a node if it cannot connect to it: the node is unreachable,
// with the cause, and has no replica that counts as ready.
func (s *splitRig) told(f fault) {
	s.t.Helper()
	lead := s.leader()
	if lead < 0 || !slices.ContainsFunc(f.cuts, func(c netnstest.Cut) bool { return c.From == s.controls[lead].on || c.To == s.controls[lead].on }) {
		return
	}
	name := fmt.Sprint("n", f.node)
	all, err := nodesOf(s.controls[lead])
	if err != nil {
		s.t.Errorf("%s: %v", f.name, err)
		return
	}
	if n := all[name]; n.Status != schema.NodeUnreachable || !strings.Contains(n.Cause, "cannot be reached") {
		s.t.Errorf("%s: the leader says that %s is %q, %q; want unreachable, and why", f.name, name, n.Status, n.Cause)
	}
	for _, function := range []string{"often", "once"} {
		if text := s.command(s.controls[lead], "describe", function); strings.Contains(text, " on "+name+": ready") {
			s.t.Errorf("%s: a replica counts as ready on %s:\n%s", f.name, name, text)
		}
	}
}

// nodesReturn waits until the leader says that all nodes are ready, and returns how long that took.
func (s *splitRig) nodesReturn(limit time.Duration) time.Duration {
	s.t.Helper()
	begun := time.Now()
	for {
		var all map[string]schema.Node
		var err error
		ready := 0
		if lead := s.leader(); lead >= 0 {
			all, err = nodesOf(s.controls[lead])
			for _, n := range all {
				if n.Status == schema.NodeReady {
					ready++
				}
			}
		}
		if ready == len(s.nodes) {
			return time.Since(begun)
		}
		if time.Since(begun) > limit {
			s.t.Errorf("the nodes are not ready within %v: %v, %+v", limit, err, all)
			return limit
		}
		pause(100 * time.Millisecond)
	}
}
