package main

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// startContainedNodes does the same as startNodes, with a containerd for daemons. It returns the
// flags that make daemons use it.
func startContainedNodes(t *testing.T) (*nodesRig, []string) {
	t.Helper()
	s, runtime := containerFlags(t)
	n := startNodes(t, "--no-node")
	n.ctr = s
	return n, runtime
}

// TestContainersOutliveDaemonAndContainerd kills a daemon, containerd, and both, under load. The
// replicas run on, and the next daemon adopts them. Then it kills a shim and the warden. Their
// replicas end and are started again. No request is lost, and nothing is left.
func TestContainersOutliveDaemonAndContainerd(t *testing.T) {
	t.Parallel()
	n, runtime := startContainedNodes(t)
	var d *keysDaemon
	t.Cleanup(func() { nothingContained(t, n.ctr, nodeID("n1", d.state)) }) // after the daemon's end
	d = n.daemon("n1", runtime...)
	n.deployAll(
		waitFn("hold", "20ms", map[string]string{"min": "3", "max": "3"}, nil),
		fn{"echo", "noop", map[string]string{"min": "1", "max": "1"}, nil, nil}, httpFn("web", one()),
	)
	all := map[string]int{"hold": 3, "echo": 1, "web": 1}
	steady := func() {
		t.Helper()
		for name, want := range all {
			n.steady(name, want, "n1")
		}
	}
	steady()
	holds := n.load(4, "/function/hold", waited)
	webs := n.load(2, "/function/web/status?code=200", func(_ string, a client.Answer) error {
		if a.Status != http.StatusOK {
			return fmt.Errorf("status %d: %s", a.Status, a.Body)
		}
		return nil
	})
	turn := func() { t.Helper(); holds.turn(); webs.turn() }
	turn()
	before := n.processes("n1")
	if len(before) != 6 {
		t.Fatalf("processes %+v, want a zygote and five replicas", before)
	}
	// same checks that the replicas are the ones of before.
	same := func() {
		t.Helper()
		turn()
		steady()
		if now := n.processes("n1"); !slices.Equal(now, before) {
			t.Errorf("the node runs %+v, want what it has run before: %+v", now, before)
		}
	}

	t.Log("the daemon is killed")
	kill9(t, d.Cmd.Process.Pid)
	<-d.Done
	turn()
	n.restartDaemon(d)
	same()

	t.Log("containerd is killed")
	n.ctr.Kill()
	turn()
	n.ctr.Run()
	same()

	t.Log("both are killed")
	n.ctr.Kill()
	kill9(t, d.Cmd.Process.Pid)
	<-d.Done
	turn()
	n.ctr.Run()
	n.restartDaemon(d)
	same()

	t.Log("the shim of the zygote is killed")
	zygote := before[0]
	shim := shimOf(t, zygote.pid)
	kill9(t, shim)
	gone(t, []process{zygote})
	turn()
	steady()
	turn()

	t.Log("the warden is killed")
	before = n.processes("n1")
	kill9(t, wardenOf(t, d.state))
	gone(t, before)
	turn()
	steady()
	turn()

	for _, l := range []*load{holds, webs} {
		requests, wrong := l.end()
		for _, w := range wrong {
			t.Error(w)
		}
		t.Logf("%d requests, slowest answer %v", requests, l.slowest)
	}
	if lost := n.events("hold", "lost"); len(lost) != 6 {
		t.Errorf("replicas lost: %+v, want three with the shim and three with the warden", lost)
	}
}

// shimOf returns the shim of the container in which a process is the program.
func shimOf(t *testing.T, pid int) int {
	t.Helper()
	p, err := readProcess(pid)
	if err == nil {
		p, err = readProcess(p.parent)
	}
	if err != nil {
		t.Fatal(err)
	}
	return p.parent
}

// wardenOf returns the warden of a daemon with a state folder.
func wardenOf(t *testing.T, state string) int {
	t.Helper()
	for _, p := range allProcesses() {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p.pid))
		if line := strings.Split(string(b), "\x00"); err == nil && slices.Contains(line, "warden") && slices.Contains(line, nodeID("n1", state)) {
			return p.pid
		}
	}
	t.Fatal("there is no warden")
	return 0
}

// TestKillAnyContainerProcess kills replicas, zygotes, spare children, first processes of
// containers, shims and containerd in turn, under load. No request is lost, and nothing is left at
// the end. KILL_ROUNDS is the number of kills.
func TestKillAnyContainerProcess(t *testing.T) {
	t.Parallel()
	rounds, seed := int(envNumber(t, "KILL_ROUNDS", 6)), envNumber(t, "KILL_SEED", rand.Uint64())
	t.Logf("seed %d", seed)
	chance := rand.New(rand.NewPCG(seed, 0))
	r := startContained(t)
	r.deployAll(diamond(waitFn("hold", "50ms", map[string]string{"min": "2", "max": "4"}, nil))...)
	r.must(http.StatusOK, http.MethodPost, "/function/diamond", "x")
	l := r.load(8, "/function/diamond", crossed)
	killed := map[string]int{}
	for round := range rounds {
		l.turn()
		kind := []string{"replica", "shim", "zygote", "containerd", "first", "spare"}[round%6]
		proctest.Until(t, "a process to kill: "+kind, func() bool { return r.killContained(kind, chance, l.turn) })
		killed[kind]++
	}
	l.turn()
	requests, wrong := l.end()
	for _, w := range wrong {
		t.Error(w)
	}
	t.Logf("%d requests, %d lost; killed %v; %v calls retried, slowest answer %v", requests, len(wrong), killed, r.value("stagecoach_flow_retries_total"), l.slowest)
}

// killContained kills a process of a kind. It starts a killed containerd again after some load. It
// returns false if there was no such process, or if it had just ended.
func (r *rig) killContained(kind string, chance *rand.Rand, load func()) bool {
	var all []int
	switch kind {
	case "containerd":
		r.ctr.Kill()
		load()
		r.ctr.Run()
		return true
	case "shim":
		all = r.ctr.Shims()
	case "first":
		all = r.parents()[1:]
	default:
		return r.killOne([]string{kind}, chance) != ""
	}
	return len(all) > 0 && unix.Kill(all[chance.IntN(len(all))], unix.SIGKILL) == nil
}

// TestCyclesLeaveNothing deploys functions, sends a burst, kills a process and removes the
// functions, again and again. After each cycle everything that belongs to containers has gone, no
// replica runs, and the state folder has no new files. CYCLES is the number of cycles.
func TestCyclesLeaveNothing(t *testing.T) {
	needGroups(t)
	t.Parallel()
	cycles, seed := int(envNumber(t, "CYCLES", 3)), envNumber(t, "KILL_SEED", rand.Uint64())
	t.Logf("seed %d", seed)
	chance := rand.New(rand.NewPCG(seed, 0))
	images := answeringImages(t)
	if err := os.Symlink(proctest.Built(t, "images", "stagecoach"), filepath.Join(images, "stagecoach")); err != nil {
		t.Fatal(err)
	}
	r := startContained(t, "--images", images)
	node := nodeID(r.node(), r.state)
	kept := r.stateFiles()
	var seen, left []string // containers, and what a cycle has left
	defer func() {
		if t.Failed() {
			t.Logf("left: %s", strings.Join(left, ", "))
		}
	}()
	for cycle := range cycles {
		fns := []fn{
			answeringFn("leak-rooted", "rooted/template", map[string]string{"min": "1", "max": "1"}, "template_port", "5000", "upstream_url", "http://127.0.0.1:5000"),
			answeringFn("leak-folder", "test/template", map[string]string{"min": "1", "max": "1"}, "template_port", "5000", "upstream_url", "http://127.0.0.1:5000"),
			waitFn("leak-hold", "50ms", map[string]string{"min": "1", "max": "4"}, nil),
		}
		r.deployTogether(fns)
		r.settled(1, fns[:2])
		seen = append(seen, r.containers()...)
		if links, groups := r.links(), groupsBelow(t, node); len(links) == 0 || len(groups) == 0 {
			t.Errorf("links %v, groups %v, want some while functions run", links, groups)
		}
		l := r.load(4, "/function/leak-folder", func(string, client.Answer) error { return nil })
		l.turn()
		shims := r.ctr.Shims()
		switch cycle % 3 {
		case 0:
			_ = unix.Kill(shims[chance.IntN(len(shims))], unix.SIGKILL)
		case 1:
			kill9(t, r.descendants()[0].pid)
		case 2:
			r.ctr.Kill()
			r.ctr.Run()
		}
		l.turn()
		if _, wrong := l.end(); len(wrong) > 0 {
			t.Errorf("cycle %d: %v", cycle, wrong)
		}
		seen = append(seen, r.containers()...)
		for _, f := range fns {
			r.must(http.StatusAccepted, http.MethodDelete, "/system/functions", fmt.Sprintf(`{"functionName":%q}`, f.name))
		}
		proctest.Until(t, fmt.Sprintf("nothing to be left of cycle %d", cycle), func() bool {
			left = slices.Concat(inContainerd(t, r.ctr), containerFiles(t, node), r.links(), groupsOfContainers(t, seen))
			for _, p := range r.descendants() {
				left = append(left, fmt.Sprintf("process %d %s", p.pid, p.image))
			}
			for _, file := range r.stateFiles() {
				if !slices.Contains(kept, file) {
					left = append(left, file)
				}
			}
			return len(left) == 0
		})
	}
	t.Logf("%d cycles, %d containers, nothing left", cycles, len(slices.Compact(slices.Sorted(slices.Values(seen)))))
}

// groupsOfContainers returns the cgroups that containers with these ids have of their own.
func groupsOfContainers(t *testing.T, ids []string) (all []string) {
	t.Helper()
	for _, id := range ids {
		found, err := filepath.Glob("/sys/fs/cgroup/*/stagecoach." + id)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, found...)
	}
	return all
}
