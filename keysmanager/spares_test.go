package keysmanager

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// holds is a Runtime whose processes can be held, as those of containers. It runs the same program
// in place of theirs.
type holds struct {
	*sandbox.Spawner
	init string

	mu   sync.Mutex
	held int // how many were asked for
	fail error
}

// Start implements sandbox.Runtime.
func (h *holds) Start(ctx context.Context, c sandbox.Command) (sandbox.Process, error) {
	if !c.Held {
		return h.Spawner.Start(ctx, c)
	}
	h.mu.Lock()
	h.held++
	fail := h.fail
	h.mu.Unlock()
	if fail != nil {
		return nil, fail
	}
	env := map[string]string{}
	for name, value := range c.Env {
		env["HELD_"+name] = value
	}
	c.Held, c.Env = false, env
	c.Argv = append([]string{h.init, "hold", strconv.Itoa(2 + len(c.Files)), filepath.Join(c.Dir, "stage")}, c.Args()...)
	return h.Spawner.Start(ctx, c)
}

func (h *holds) asked() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.held
}

func (h *holds) failing(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.fail = err
}

// newHolding returns a node that may have a spare for each function.
func newHolding(t *testing.T) (*rig, *gauge, *holds) {
	t.Helper()
	h := &holds{Spawner: sandbox.NewSpawner(), init: filepath.Join(t.TempDir(), "stagecoach-init")}
	cmd := exec.Command("go", "build", "-o", h.init, "../cmd/stagecoach-init")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	w := warden.InProcess(h)
	t.Cleanup(w.Close)
	n, g := newGauged(t, func(c *Config) {
		c.Warden, c.Spares, c.spareRests, c.sampleEvery = w, 1, time.Hour, 10*time.Millisecond
	})
	return n, g, h
}

// alone is a function without a model that asks for a spare.
func alone() node.Spec {
	return node.Spec{Function: "f.ns", Namespace: "ns", Image: "test/wait:1", Env: map[string]string{"wait_mean": "1ms"}, Options: node.Options{Spares: 3}}
}

// awaitSpares waits until a function has this many spares, and returns the process of one.
func (n *rig) awaitSpares(want int) (pid int) {
	n.t.Helper()
	proctest.Until(n.t, "spares", func() bool {
		for _, p := range n.spares.pids() {
			pid = p
		}
		return n.Inventory().Spares["f.ns"] == want
	})
	return pid
}

// TestSparesAreOfTheirRevision starts replicas with spares. One of another spec or with other
// secrets is not used.
func TestSparesAreOfTheirRevision(t *testing.T) {
	n, _, _ := newHolding(t)
	s := alone()
	s.Secrets = t.TempDir()
	if r := n.start("a", s); r.Path != PathProcess {
		t.Errorf("path %s, want %s", r.Path, PathProcess)
	}
	pid := n.awaitSpares(1) // the node's bound, and not the function's
	r := n.start("b", s)
	if r.Path != PathSpare || r.PID != pid {
		t.Errorf("process %d on path %s, want the spare %d on %s", r.PID, r.Path, pid, PathSpare)
	}
	env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", r.PID))
	if all := strings.Split(string(env), "\x00"); err != nil || !slices.Contains(all, wire.EnvReplica+"=b") || !slices.Contains(all, "wait_mean=1ms") {
		t.Errorf("the replica has %q, %v, want its name", all, err)
	}
	n.awaitSpares(1)
	if err := os.WriteFile(filepath.Join(s.Secrets, "key"), []byte("new"), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := n.start("c", s); r.Path != PathProcess {
		t.Errorf("path %s after a change of the secrets, want %s", r.Path, PathProcess)
	}
	pid = n.awaitSpares(1)
	next := s
	next.Env = map[string]string{"wait_mean": "2ms"}
	if r := n.start("d", next); r.Path != PathProcess {
		t.Errorf("path %s of another revision, want %s", r.Path, PathProcess)
	}
	proctest.Gone(t, pid)
	pid = n.awaitSpares(1)
	n.Deployed(next)
	if n.awaitSpares(1) != pid {
		t.Error("a deploy of the same revision ends its spare")
	}
	n.Deployed(s)
	proctest.Gone(t, pid)
	n.start("e", next)
	pid = n.awaitSpares(1)
	n.Forget("f.ns")
	proctest.Gone(t, pid)
	n.start("f", next)
	pid = n.awaitSpares(1)
	next.Options.Spares = 0
	n.start("g", next)
	proctest.Gone(t, pid)
}

// TestSparesEndWhenTheyAreNotUsed lets the last replica of a function end.
func TestSparesEndWhenTheyAreNotUsed(t *testing.T) {
	n, _, _ := newHolding(t)
	n.start("a", alone())
	pid := n.awaitSpares(1)
	n.spares.mu.Lock()
	n.cfg.spareRests = time.Nanosecond
	n.spares.mu.Unlock()
	n.spares.tend()
	if n.awaitSpares(1) != pid {
		t.Error("a spare ends although its function has a replica")
	}
	if err := n.Stop(t.Context(), "a", time.Minute); err != nil {
		t.Fatal(err)
	}
	proctest.Gone(t, pid)
}

// TestNoSparesWhileMemoryIsShort takes memory away, and gives it back.
func TestNoSparesWhileMemoryIsShort(t *testing.T) {
	n, g, h := newHolding(t)
	n.start("a", alone())
	pid := n.awaitSpares(1)
	n.press(g, 90*gb)
	proctest.Gone(t, pid)
	for _, used := range []int64{90 * gb, 85*gb - spareBytes/2} {
		n.press(g, used)
		before := h.asked()
		for range 100 {
			n.spares.tend()
		}
		n.spares.mu.Lock()
		making := n.spares.sets["f.ns"].making
		n.spares.mu.Unlock()
		if making || h.asked() != before {
			t.Errorf("a spare is made with %d bytes in use", used)
		}
	}
	n.press(g, gb)
	n.awaitSpares(1)
}

// TestSparesAreMadeAgain kills a spare, and then lets no other one start.
func TestSparesAreMadeAgain(t *testing.T) {
	n, _, h := newHolding(t)
	n.start("a", alone())
	pid := n.awaitSpares(1)
	h.failing(errors.New("no spare today"))
	killed := time.Now()
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	n.awaitSpares(0)
	proctest.Until(t, "an attempt", func() bool { return h.asked() >= 2 })
	proctest.Until(t, "its failure", func() bool {
		n.spares.mu.Lock()
		defer n.spares.mu.Unlock()
		return n.spares.sets["f.ns"].failures >= 2
	})
	n.spares.mu.Lock()
	set := n.spares.sets["f.ns"]
	if after := set.next.Sub(killed); after < (2+4)*spareRetry {
		t.Errorf("the next attempt comes %v after the first failure, want a longer pause after each", after)
	}
	set.next = time.Time{}
	n.spares.mu.Unlock()
	h.failing(nil)
	if r := n.start("b", alone()); r.Path != PathProcess {
		t.Errorf("path %s without a spare, want %s", r.Path, PathProcess)
	}
	n.awaitSpares(1)
}
