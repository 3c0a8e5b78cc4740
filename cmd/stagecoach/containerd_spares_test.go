package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// own returns the inventory of up's own node.
func (r *rig) own() (n node.Inventory) {
	r.t.Helper()
	var all []node.Inventory
	if err := json.Unmarshal(r.must(http.StatusOK, http.MethodGet, "/system/nodes", "").Body, &all); err != nil || len(all) != 1 {
		r.t.Fatalf("%d nodes, %v, want one", len(all), err)
	}
	return all[0]
}

// awaitSpare waits until a function has a spare container, and returns that.
func (r *rig) awaitSpare(name string) (c node.Container) {
	r.t.Helper()
	r.until(late, "a spare container of "+name, func() bool {
		n := r.own()
		i := slices.IndexFunc(n.Containers, func(c node.Container) bool {
			return c.Function == name+".openfaas-fn" && strings.HasPrefix(c.Replica, "spare-")
		})
		if i >= 0 {
			c = n.Containers[i]
		}
		return i >= 0 && n.Spares[name+".openfaas-fn"] == 1
	})
	return c
}

// awaitStart waits until a function has had this many starts, and returns the path of the last one
// and the process of the program.
func (r *rig) awaitStart(name string, n int) (path string, pid int) {
	r.t.Helper()
	r.until(late, fmt.Sprintf("start %d of %s", n, name), func() bool {
		all := r.events(name, "started")
		if len(all) < n || r.shows(name).AvailableReplicas != 1 {
			return false
		}
		path, pid = all[len(all)-1].Path, 0
		for _, c := range r.own().Containers {
			if c.Function == name+".openfaas-fn" && c.Replica == all[len(all)-1].Replica {
				pid = c.PID
			}
		}
		return pid != 0
	})
	return path, pid
}

// spared returns f with an annotation for spare containers.
func spared(f fn, n string) fn {
	f.annotations = map[string]string{"spares": n}
	return f
}

// surroundings describes what a process has on this machine, without what differs for each replica.
func surroundings(t *testing.T, pid int) string {
	t.Helper()
	var b strings.Builder
	fmt.Fprintf(&b, "blocked signals: %x\n", blockedSignals(t, pid))
	for _, name := range []string{"environ", "cmdline", "status", "limits", "cgroup", "mountinfo", "oom_score_adj"} {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
		if err != nil {
			t.Fatal(err)
		}
		switch name {
		case "environ":
			all := bytes.Split(text, []byte{0})
			slices.SortFunc(all, bytes.Compare)
			text = bytes.Join(all, []byte("\n"))
		case "status":
			text = bytes.Join(regexp.MustCompile(`(?m)^(Uid|Gid|Groups|Umask|NoNewPrivs|Seccomp|Cap\w+|SigIgn):.*$`).FindAll(text, -1), []byte("\n"))
		case "mountinfo":
			text = bytes.Join(regexp.MustCompile(`(?m)^\S+ \S+ \S+ (\S+ \S+ \S+) .*$`).FindAll(text, -1), []byte("\n"))
			text = regexp.MustCompile(`(?m)^\S+ \S+ \S+ |(master|shared):\d+ `).ReplaceAll(text, nil)
		}
		fmt.Fprintf(&b, "%s:\n%s\n", name, differs.ReplaceAll(text, nil))
	}
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		t.Fatal(err)
	}
	at := regexp.MustCompile(`(?m)^\d+:memory:(.*)$`).FindSubmatch(groups)
	if at == nil {
		t.Skip("no cgroups of version 1 for memory")
	}
	cpu := regexp.MustCompile(`(?m)^\d+:(?:cpu|cpu,cpuacct|cpuacct,cpu):(.*)$`).FindSubmatch(groups)
	for _, file := range []string{"memory" + string(at[1]) + "/memory.limit_in_bytes", "cpu" + string(cpu[1]) + "/cpu.cfs_quota_us"} {
		limit, err := os.ReadFile("/sys/fs/cgroup/" + file)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&b, "%s: %s", filepath.Base(file), limit)
	}
	return b.String()
}

// blockedSignals returns the signals that all threads of a process block. A single thread of a Go
// program may block more of them: os/signal gives its work to any thread.
func blockedSignals(t *testing.T, pid int) uint64 {
	t.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	if err != nil || len(threads) == 0 {
		t.Fatalf("threads of process %d: %v, %v", pid, threads, err)
	}
	all := ^uint64(0)
	for _, file := range threads {
		text, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue // the thread has ended
		}
		blocked := regexp.MustCompile(`(?m)^SigBlk:\s*(\S+)$`).FindSubmatch(text)
		if err != nil || blocked == nil {
			t.Fatalf("%s: %v, %q", file, err, text)
		}
		some, err := strconv.ParseUint(string(blocked[1]), 16, 64)
		if err != nil {
			t.Fatal(err)
		}
		all &= some
	}
	return all
}

// differs matches what differs between two replicas: names of replicas and containers, and users.
var differs = regexp.MustCompile(`(replica|spare)-[A-Z0-9]{20,}|\b(web|bare)-[0-9a-z]+(-[0-9a-z]+)*\b|\b[1-9][0-9]{5}\b`)

// TestSpareContainersTakeStarts compares replicas that were spares with replicas that were not. A
// spare is no replica, and another one is made for each that is taken.
func TestSpareContainersTakeStarts(t *testing.T) {
	needGroups(t)
	t.Parallel()
	r := startContained(t, "--spares", "1")
	web, bare := spared(httpFn("web", one(), "secretive", "value"), "1"), spared(fn{"bare", "noop", one(), nil, nil}, "1")
	for _, f := range []fn{web, bare} {
		d := f.deployment()
		d.Limits = &client.Resources{Memory: "256Mi", CPU: "500m"}
		if err := r.Deploy(t.Context(), d); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"web", "bare"} {
		path, first := r.awaitStart(name, 1)
		if path != keysmanager.PathProcess {
			t.Errorf("%s: the first start is on path %q, want %q", name, path, keysmanager.PathProcess)
		}
		want := surroundings(t, first)
		kept := r.awaitSpare(name)
		if n := r.shows(name); n.Replicas != 1 || n.AvailableReplicas != 1 {
			t.Errorf("%s: %d replicas, %d ready, want one: a spare is none", name, n.Replicas, n.AvailableReplicas)
		}
		if networkOf(t, kept.PID) == networkOf(t, first) {
			t.Errorf("%s: a spare is in the network of a replica", name)
		}
		kill9(t, first)
		path, second := r.awaitStart(name, 2)
		if path != keysmanager.PathSpare || second != kept.PID {
			t.Errorf("%s: the second start is process %d on path %q, want the spare %d on %q", name, second, path, kept.PID, keysmanager.PathSpare)
		}
		if got := surroundings(t, second); got != want {
			t.Errorf("%s: a replica that was a spare has\n%s\nwant\n%s", name, got, want)
		}
		r.must(http.StatusOK, http.MethodPost, "/function/"+name, "x")
		if next := r.awaitSpare(name); next.PID == second {
			t.Errorf("%s: process %d is a replica and a spare", name, second)
		}
	}
	r.must(http.StatusAccepted, http.MethodDelete, "/system/functions", `{"functionName":"web"}`)
	r.until(late, "no container of web", func() bool { return len(containersOf(t, r.ctr, "web")) == 0 })
}

// networkOf returns the network namespace of a process.
func networkOf(t *testing.T, pid int) string {
	t.Helper()
	name, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid))
	if err != nil {
		t.Error(err)
	}
	return name
}

// TestSpareContainersAreOfOneRevision deploys another revision of a function that has a spare
// container. The spare ends, and the next start uses another one.
func TestSpareContainersAreOfOneRevision(t *testing.T) {
	t.Parallel()
	r := startContained(t, "--spares", "1")
	labels := map[string]string{"min": "0", "max": "1", "zero": "true", "zero-duration": "2s"}
	r.deployAll(spared(httpFn("web", labels, "revision", "one"), "1"))
	r.must(http.StatusOK, http.MethodPost, "/function/web", "x")
	old := r.awaitSpare("web")
	r.until(late, "no replica", func() bool { return r.shows("web").Replicas == 0 && len(r.own().Replicas) == 0 })
	r.awaitSpare("web") // it outlives the replicas
	r.deployAll(spared(httpFn("web", labels, "revision", "two"), "1"))
	r.until(late, "the spare to end", func() bool { return len(containersOf(t, r.ctr, "web")) == 0 })
	for start, path := range []string{keysmanager.PathProcess, keysmanager.PathSpare} {
		r.must(http.StatusOK, http.MethodPost, "/function/web", "x")
		all := r.events("web", "started")
		if got := all[len(all)-1]; got.Path != path {
			t.Errorf("start %d of the new revision is on path %q, want %q", start, got.Path, path)
		}
		for _, c := range r.own().Containers {
			env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", c.PID))
			if err == nil && !bytes.Contains(env, []byte("revision=two")) || c.PID == old.PID {
				t.Errorf("process %d of %s is not of the new revision", c.PID, c.Replica)
			}
		}
		r.awaitSpare("web")
		r.until(late, "no replica", func() bool { return len(r.own().Replicas) == 0 })
	}
	// Without the annotation there are none.
	r.deployAll(httpFn("web", labels, "revision", "two"))
	r.until(late, "the spare to end", func() bool { return len(containersOf(t, r.ctr, "web")) == 0 })
}

// TestSpareContainersAreReplaced kills spares in all ways while starts come, then up, then
// containerd. No start fails, and at the end nothing is left.
func TestSpareContainersAreReplaced(t *testing.T) {
	t.Parallel()
	r := startContained(t, "--spares", "1")
	r.deployAll(spared(httpFn("web", one()), "1"))
	starts := 1
	_, replica := r.awaitStart("web", starts)
	kept := r.awaitSpare("web")
	kill9(t, kept.PID) // the program that waits
	r.until(late, "another spare", func() bool { return r.awaitSpare("web").PID != kept.PID })
	kept = r.awaitSpare("web")
	kill9(t, watchdogOf(t, r, kept))
	proctest.Gone(t, kept.PID)
	r.until(late, "another spare", func() bool { return r.awaitSpare("web").PID != kept.PID })

	// A start comes at the moment when the spare is killed.
	kept = r.awaitSpare("web")
	kill9(t, kept.PID)
	kill9(t, replica)
	starts++
	_, replica = r.awaitStart("web", starts)
	r.must(http.StatusOK, http.MethodPost, "/function/web", "x")

	// The spare does not answer: the start goes on without it.
	kept = r.awaitSpare("web")
	stopped := watchdogOf(t, r, kept)
	if err := unix.Kill(stopped, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	kill9(t, replica)
	starts++
	path, replica := r.awaitStart("web", starts)
	if path != keysmanager.PathProcess {
		t.Errorf("the start is on path %q, want %q", path, keysmanager.PathProcess)
	}
	r.until(late, "the spare to be gone", func() bool { _, err := readProcess(stopped); return err != nil })

	// A start with a spare needs no containerd.
	kept = r.awaitSpare("web")
	r.ctr.Kill()
	kill9(t, replica)
	starts++
	path, _ = r.awaitStart("web", starts)
	if path != keysmanager.PathSpare {
		t.Errorf("the start without containerd is on path %q, want %q", path, keysmanager.PathSpare)
	}
	r.must(http.StatusOK, http.MethodPost, "/function/web", "x")
	r.ctr.Run()
	for _, e := range r.events("web", "failed") {
		t.Errorf("a start has failed: %s", e.Cause)
	}
	kept = r.awaitSpare("web")
	r.kill()
	proctest.Gone(t, kept.PID)
	r.restart()
	r.must(http.StatusOK, http.MethodPost, "/function/web", "x")
	r.awaitSpare("web")
}

// TestSpareContainersEndWithTheirDaemon kills a node's daemon. Its spares end, its replicas serve
// on, and the next daemon makes a spare after the next start. Then the function is removed.
func TestSpareContainersEndWithTheirDaemon(t *testing.T) {
	t.Parallel()
	s, flags := containerFlags(t)
	n := startNodes(t, "--no-node", "--runtime", "containerd", "--containerd-address", s.Address, "--containerd-namespace", s.Namespace, "--spares", "1")
	d := n.daemon("node-a", append(flags, "--spares", "1")...)
	const web = "web.openfaas-fn"
	awaitSpare := func() (c node.Container) {
		t.Helper()
		n.until(late, "a spare", func() bool {
			inv, _ := n.inventory("node-a")
			for _, one := range inv.Containers {
				if strings.HasPrefix(one.Replica, "spare-") {
					c = one
				}
			}
			return inv.Spares[web] == 1 && c.PID != 0
		})
		return c
	}
	n.deployAll(spared(httpFn("web", one()), "1"))
	n.must(http.StatusOK, http.MethodPost, "/function/web", "x")
	kept := awaitSpare()
	before := n.running("node-a", "web")
	if err := d.Cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-d.Done
	proctest.Gone(t, kept.PID)
	n.must(http.StatusOK, http.MethodPost, "/function/web", "x")
	n.restartDaemon(d)
	n.until(late, "the same replica", func() bool { return slices.Equal(before, n.running("node-a", "web")) })
	inv, _ := n.inventory("node-a")
	kill9(t, inv.Replicas[0].PID)
	n.until(late, "another replica", func() bool {
		now := n.running("node-a", "web")
		return len(now) == 1 && now[0] != before[0] && n.shows("web").AvailableReplicas == 1
	})
	// A replica that was a spare is adopted as others are.
	kept = awaitSpare()
	before = n.running("node-a", "web")
	inv, _ = n.inventory("node-a")
	kill9(t, inv.Replicas[0].PID)
	n.until(late, "the spare to be a replica", func() bool {
		now, _ := n.inventory("node-a")
		return len(now.Replicas) == 1 && now.Replicas[0].Name != before[0] && now.Replicas[0].Path == keysmanager.PathSpare && n.shows("web").AvailableReplicas == 1
	})
	before = n.running("node-a", "web")
	if err := d.Cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-d.Done
	n.restartDaemon(d)
	n.until(late, "the same replica", func() bool {
		now, _ := n.inventory("node-a")
		return slices.Equal(before, n.running("node-a", "web")) && slices.ContainsFunc(now.Containers, func(c node.Container) bool {
			return c.PID == kept.PID && c.Replica == before[0]
		})
	})
	n.must(http.StatusOK, http.MethodPost, "/function/web", "x")
	kill9(t, kept.PID)
	n.until(late, "another replica", func() bool {
		now := n.running("node-a", "web")
		return len(now) == 1 && now[0] != before[0] && n.shows("web").AvailableReplicas == 1
	})
	awaitSpare()
	n.must(http.StatusAccepted, http.MethodDelete, "/system/functions", `{"functionName":"web"}`)
	n.until(late, "no container of web", func() bool { return len(containersOf(t, s, "web")) == 0 })
}

// watchdogOf returns the watchdog of a container that waits.
func watchdogOf(t *testing.T, r *rig, c node.Container) int {
	t.Helper()
	for _, p := range r.descendants() {
		env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", p.pid))
		if err == nil && bytes.Contains(env, []byte("STAGECOACH_REPLICA="+c.Replica+"\x00")) {
			return p.pid
		}
	}
	t.Fatalf("no watchdog of %s", c.Replica)
	return 0
}

// TestOperatorsBoundSpareContainers deploys a function that asks for more than the operator allows.
// As a process it has none.
func TestOperatorsBoundSpareContainers(t *testing.T) {
	t.Parallel()
	r := start(t, "--spares", "1")
	for n, want := range map[string]string{"2": "at most 1: the operator allows no more (up --spares)", "many": "a number from 0 to 16", "17": "a number from 0 to 16"} {
		err := r.Deploy(t.Context(), spared(httpFn("web", one()), n).deployment())
		if err == nil || !strings.Contains(strings.ReplaceAll(err.Error(), `\"`, `"`), `annotations["stagecoach.dev/spares"]`) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", n, err, want)
		}
	}
	r.deployAll(spared(httpFn("web", one()), "1"))
	r.must(http.StatusOK, http.MethodPost, "/function/web", "x")
	if n := r.own(); len(n.Spares) != 0 {
		t.Errorf("spares %v of processes, want none", n.Spares)
	}
}
