package main

import (
	"bufio"
	"context"
	"fmt"
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

// startSplit starts the cluster. Its control planes and daemons use one folder of images, and the
// daemons are reached over their unix sockets, because only the network is cut.
func startSplit(t *testing.T) *splitRig {
	t.Helper()
	n, m := netnstest.New(t, 8)
	s := &splitRig{t: t, net: n, servers: m[:3], nodes: m[6:], images: runsImages(t)}
	var hosts []natstest.Host
	for _, at := range s.servers {
		hosts = append(hosts, natstest.Host{IP: at.IP, Dial: at.Dial, Command: at.Command})
	}
	of := natstest.StartOn(t, hosts...)
	for i, at := range m[3:6] {
		r := &rig{t: t, log: &logFile{}, state: t.TempDir(), on: at}
		s.controls = append(s.controls, startRig(t, r, "--nats", of.String(), "--no-node", "--images", s.images, "--listen", "127.0.0.1:8080"))
		t.Cleanup(func() { s.keep(fmt.Sprint("control-", i), r.log) })
	}
	for i, at := range s.nodes {
		s.daemons = append(s.daemons, s.daemon(at, fmt.Sprint("n", i), of.String()))
	}
	t.Cleanup(n.Heal) // so that all processes end well
	return s
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
func (s *splitRig) daemon(at *netnstest.Machine, name, urls string) *splitDaemon {
	s.t.Helper()
	d := &splitDaemon{log: &logFile{}}
	var err error
	d.Process, err = child.StartProgram(context.Background(), "nsenter", d.log,
		"--net="+at.Namespace(), os.Args[0], "keysmanager", "--name", name, "--join", urls, "--nats-outside", "--state", s.t.TempDir(),
		"--memory", "1Gi", "--cpus", "1", "--devices", "none", "--images", s.images, "--ort", proctest.Built(s.t, "ort", "libonnxruntime.so.1"), "--log", "debug")
	if err != nil {
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
}

// fault draws a partition.
func (s *splitRig) fault(chance *rand.Rand) fault {
	i, j := chance.IntN(3), chance.IntN(3)
	if lead := s.leader(); lead >= 0 && chance.IntN(2) == 0 {
		i = lead // the others matter less
	}
	control, server, node := s.controls[i].on, s.servers[j], s.nodes[chance.IntN(2)]
	alone := func(some ...*netnstest.Machine) []netnstest.Cut {
		return netnstest.Between(some, s.net.Others(some...))
	}
	one := func(m *netnstest.Machine, out bool) []netnstest.Cut {
		return slices.DeleteFunc(alone(m), func(c netnstest.Cut) bool { return (c.From == m) != out })
	}
	all := []fault{
		{fmt.Sprintf("control plane %d alone", i), alone(control)},
		{fmt.Sprintf("server %d alone", j), alone(server)},
		{fmt.Sprintf("node %s alone", node.IP), alone(node)},
		{fmt.Sprintf("server %d from the other servers", j), netnstest.Between([]*netnstest.Machine{server}, s.servers)},
		{fmt.Sprintf("control plane %d from server %d", i, j), netnstest.Between([]*netnstest.Machine{control}, []*netnstest.Machine{server})},
		{fmt.Sprintf("what control plane %d sends", i), one(control, true)},
		{fmt.Sprintf("what control plane %d receives", i), one(control, false)},
		{fmt.Sprintf("what server %d sends", j), one(server, true)},
		{fmt.Sprintf("control plane %d and server %d from the rest", i, j), alone(control, server)},
		{fmt.Sprintf("control plane %d, server %d and node %s from the rest", i, j, node.IP), alone(control, server, node)},
		{"all servers from each other", netnstest.Between(s.servers, s.servers)},
	}
	return all[chance.IntN(len(all))]
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
