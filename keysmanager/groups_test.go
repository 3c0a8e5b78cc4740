package keysmanager

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/cgroup"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
)

// realGroups are this machine's cgroups, adapted as in cmd.
type realGroups struct{ *cgroup.Root }

type realGroup struct{ *cgroup.Group }

func (g realGroups) Create(name, _ string, l GroupLimits) (Group, error) {
	made, err := g.Root.Create(name, cgroup.Limits{Memory: l.Memory, CPUMilli: l.CPUMilli, PIDs: l.PIDs})
	return realGroup{made}, err
}

func (g realGroups) Adopt(name string) (Group, error) {
	found, err := g.Root.Adopt(name)
	return realGroup{found}, err
}

func (g realGroup) Enforce(int) error { return g.Group.Enforce() }

func (g realGroup) Usage() (GroupUsage, error) {
	u, err := g.Group.Usage()
	return GroupUsage(u), err
}

// groups returns this machine's cgroups. If there are none, it skips the test, or fails it where
// tests of real parts must run.
func groups(t *testing.T) realGroups {
	t.Helper()
	root, err := cgroup.Open("test-" + strings.ToLower(t.Name()))
	if err == nil && len(root.Lacks()) > 0 {
		err = fmt.Errorf("no controllers %v", root.Lacks())
	}
	if err != nil && os.Getenv("CI") == "true" {
		t.Fatalf("CI has to be where cgroups may be made: %v", err)
	}
	if err != nil {
		t.Skipf("no cgroups may be made here (root may, on most machines): %v", err)
	}
	t.Cleanup(func() {
		if names, err := root.Names(); err != nil || len(names) > 0 {
			t.Errorf("cgroups %v are left, %v, want none", names, err)
		}
		_ = root.Retain(nil)
		_ = root.Close()
	})
	return realGroups{root}
}

// grouped returns a node with cgroups. No cgroup may be left when the node is closed.
func grouped(t *testing.T) *rig {
	g := groups(t)
	return newNode(t, func(c *Config) { c.Groups = g })
}

// script returns a function without a model that runs a shell script.
func script(t *testing.T, text string) node.Spec {
	t.Helper()
	file := filepath.Join(t.TempDir(), "script")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return node.Spec{Function: "s.ns", Namespace: "ns", Image: "test/wait:1", Process: "/bin/sh " + file}
}

func TestAnEndNamesTheLimit(t *testing.T) {
	n := grouped(t)
	for name, tc := range map[string]struct {
		script string
		spec   node.Spec
		want   []string
	}{
		"eats":      {"exec dd if=/dev/zero of=/dev/null bs=256M count=1", node.Spec{Memory: 32 << 20}, []string{"killed: out of memory, its limit is 32 MiB (limits.memory)"}},
		"feeds":     {"dd if=/dev/zero of=/dev/null bs=256M count=1; exit 7", node.Spec{Memory: 32 << 20}, []string{"exit status 7, 1 of its processes killed: out of memory, its limit is 32 MiB"}},
		"bombs":     {"for i in $(seq 1500); do sleep 1000 & done", node.Spec{}, []string{"exit status 2, ", " starts of processes refused: its limit is 1024 processes and threads"}},
		"is killed": {"kill -9 $$", node.Spec{Memory: 32 << 20}, []string{"killed by SIGKILL"}},
	} {
		t.Run(name, func(t *testing.T) {
			n.t = t
			s := script(t, tc.script)
			s.Memory = tc.spec.Memory
			n.start(name, s)
			e := n.exit()
			for _, want := range tc.want {
				if !strings.Contains(e.Cause, want) {
					t.Errorf("%q, want %q in it", e.Cause, want)
				}
			}
			if name == "is killed" && strings.Contains(e.Cause, "memory") {
				t.Errorf("%q, want nothing of memory in it", e.Cause)
			}
		})
	}
}

// TestAMemoryLimitExcludesSharedMemory forks a replica whose limit is below the memory of its
// zygote. The memory that they share counts only for the zygote.
func TestAMemoryLimitExcludesSharedMemory(t *testing.T) {
	n := grouped(t)
	s := withModel
	s.Memory, s.CPUMilli = 12<<20, 900
	r := n.start("a", s)
	n.answers(r)
	var inv Inventory
	proctest.Until(t, "measurements", func() bool {
		inv = n.Inventory()
		return len(inv.Zygotes) == 1 && inv.Zygotes[0].Usage != nil && len(inv.Replicas) == 1 && inv.Replicas[0].Usage != nil
	})
	z, own := inv.Zygotes[0].Usage.Memory, inv.Replicas[0].Usage.Memory
	if z <= s.Memory || own <= 0 || own > s.Memory {
		t.Errorf("the zygote takes %d bytes and the replica %d, want more and less than its limit of %d", z, own, s.Memory)
	}
	if inv.Replicas[0].CPUMilli != 900 {
		t.Errorf("the replica may use %dm, want 900m", inv.Replicas[0].CPUMilli)
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", r.PID))
	if in := strings.Count(string(b), "/stagecoach/test-"+strings.ToLower(t.Name())+"/family-zygote-"); err != nil || in < 3 {
		t.Errorf("the replica is in its group in %d hierarchies, %v, want 3 at least:\n%s", in, err, b)
	}
}

func TestSetCPUChangesAReplicasLimit(t *testing.T) {
	n := grouped(t)
	s := script(t, "echo on; while :; do :; done")
	s.CPUMilli = 400
	n.start("spins", s)
	n.printed("spins")
	milli := func() int { return n.Inventory().Replicas[0].CPUMilli }
	for _, tc := range []struct{ set, want int }{{200, 200}, {0, 400}, {150, 150}} {
		if err := n.SetCPU(t.Context(), "spins", tc.set); err != nil {
			t.Error(err)
		} else if got := milli(); got != tc.want {
			t.Errorf("SetCPU(%d): it may use %dm, want %dm", tc.set, got, tc.want)
		}
	}
	if err := n.SetCPU(t.Context(), "spins", -1); err == nil || milli() != 150 {
		t.Errorf("SetCPU(-1): %v, and %dm, want an error and 150m", err, milli())
	}
	if err := n.SetCPU(t.Context(), "nobody", 100); !errors.Is(err, ErrUnknown) {
		t.Errorf("SetCPU of what does not run: %v, want ErrUnknown", err)
	}
	proctest.Until(t, "throttling", func() bool {
		u := n.Inventory().Replicas[0].Usage
		return u != nil && u.Throttled > 0 && u.CPUMilli > 0
	})
	for _, want := range []string{"stagecoach_replica_cpu_seconds_total", "stagecoach_replica_memory_bytes", "stagecoach_replica_throttled_seconds_total"} {
		if c, err := testutil.GatherAndCount(n.registry, want); err != nil || c != 1 {
			t.Errorf("%s: %d series, %v, want one", want, c, err)
		}
	}
	if err := n.Stop(t.Context(), "spins", 0); err != nil {
		t.Error(err)
	}
	if u := n.used()["s.ns"]; u.CPU == 0 || u.Throttled == 0 || u.Memory != 0 {
		t.Errorf("after its end %+v, want what it has used, and no memory", u)
	}
	n.Forget("s.ns")
	if c, err := testutil.GatherAndCount(n.registry, "stagecoach_replica_cpu_seconds_total"); err != nil || c != 0 {
		t.Errorf("%d series of a function that is gone, %v, want none", c, err)
	}
	plain := newNode(t, nil)
	plain.start("p", script(t, "echo on; sleep 1000"))
	if err := plain.SetCPU(t.Context(), "p", 100); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("SetCPU without cgroups: %v, want ErrUnsupported", err)
	}
}

// TestGroupsOfAnEarlierDaemon adopts a replica with its group. Groups that a killed daemon has left
// must be removed.
func TestGroupsOfAnEarlierDaemon(t *testing.T) {
	g, w := groups(t), wardenOf(t)
	change := func(c *Config) { c.Groups, c.Warden = g, w }
	first := newNode(t, change)
	s := script(t, "echo on; while :; do :; done")
	s.CPUMilli = 300
	first.start("kept", s)
	first.printed("kept")
	if err := first.SetCPU(t.Context(), "kept", 250); err != nil {
		t.Fatal(err)
	}
	first.store.mu.Lock()
	kept := first.store.processes["kept"].entry
	first.store.mu.Unlock()
	first.Detach()
	if _, err := g.Create("left", "", GroupLimits{}); err != nil {
		t.Fatal(err)
	}
	second := newNode(t, change)
	if names, err := g.Names(); err != nil || !slices.Equal(names, []string{kept}) {
		t.Errorf("groups %v, %v, want the adopted one's", names, err)
	}
	if got := second.Inventory().Replicas[0].CPUMilli; got != 250 {
		t.Errorf("the adopted one may use %dm, want 250m as before", got)
	}
	if err := second.SetCPU(t.Context(), "kept", 0); err != nil {
		t.Error(err)
	}
	if got := second.Inventory().Replicas[0].CPUMilli; got != 300 {
		t.Errorf("the adopted one may use %dm as declared, want 300m", got)
	}
	if err := second.Stop(t.Context(), "kept", 0); err != nil {
		t.Error(err)
	}
}

// TestNoGroupIsLeft starts and stops replicas, and gives up starts.
func TestNoGroupIsLeft(t *testing.T) {
	n := grouped(t)
	n.answers(n.start("first", withModel))
	for i := range 100 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		if i%4 == 0 {
			cancel() // before the start has begun
		}
		name := fmt.Sprint("r", i)
		r, err := n.Start(ctx, node.Order{Replica: name, Spec: withModel})
		cancel()
		if err == nil {
			_ = r.Conn.Close()
			err = n.Stop(t.Context(), name, 0)
		} else if errors.Is(err, context.Canceled) {
			err = nil
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	proctest.Until(t, "the groups of the first replica, its zygote and a spare child alone", func() bool {
		n.spare(n.zygote())
		names, err := n.cfg.Groups.(realGroups).Names()
		return err == nil && len(names) == 3
	})
}
