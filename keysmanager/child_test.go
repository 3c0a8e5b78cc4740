package keysmanager

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
)

// only returns the only zygote of a node.
func (n *rig) only() *zygote.Zygote {
	n.t.Helper()
	n.zygote()
	n.store.mu.Lock()
	defer n.store.mu.Unlock()
	return n.store.slots.Values()[0].zygote
}

// waits reports whether a process is a child of a zygote that waits at its gate.
func waits(z *zygote.Zygote, pid int) bool {
	return slices.ContainsFunc(z.Family.Spares(), func(c resources.Copied) bool { return c.PID == pid })
}

// TestAStartTakesTheSpareChild checks that a start uses the spare child, which is in its cgroup
// already, and that another child takes its place.
func TestAStartTakesTheSpareChild(t *testing.T) {
	n := grouped(t)
	n.answers(n.start("first", withModel))
	z := n.zygote()
	spare := n.spare(z)
	before, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", spare))
	if err != nil || !strings.Contains(string(before), "/child-") {
		t.Errorf("the spare child is in\n%s%v, want a group of its own", before, err)
	}
	r := n.start("second", withModel)
	if r.PID != spare {
		t.Errorf("the replica is process %d, want the spare child %d", r.PID, spare)
	}
	n.answers(r)
	if next := n.spare(z); next == spare || !slices.Contains(proctest.Children(t, z), next) {
		t.Errorf("the next spare child is %d after %d, of children %v", next, spare, proctest.Children(t, z))
	}
	after, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", spare))
	if err != nil || string(after) != string(before) {
		t.Errorf("the replica is in\n%s%v, was as a spare child in\n%s", after, err, before)
	}
	proctest.Until(t, "the replica's use", func() bool {
		i := slices.IndexFunc(n.Inventory().Replicas, func(r ReplicaInfo) bool { return r.Name == "second" && r.Usage != nil })
		return i >= 0
	})
}

// TestAnEndedSpareChildIsReplaced checks that the end of a spare child is not reported as a
// replica's, leaves nothing behind, and does not fail the next start.
func TestAnEndedSpareChildIsReplaced(t *testing.T) {
	n := grouped(t)
	n.answers(n.start("first", withModel))
	z := n.only()
	for i := range 2 {
		spare := n.spare(z.PID)
		if err := syscall.Kill(spare, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		proctest.Until(t, "its end to be heard of", func() bool {
			return !waits(z, spare)
		})
		r := n.start(fmt.Sprint("next ", i), withModel)
		if r.PID == spare {
			t.Errorf("the replica is process %d, which has ended", spare)
		}
		n.answers(r)
	}
	select {
	case e := <-n.exits:
		t.Errorf("exit %+v, want none", e)
	default:
	}
	n.spare(z.PID)
	proctest.Until(t, "no group of those that ended", func() bool {
		names, err := n.cfg.Groups.(realGroups).Names()
		return err == nil && len(names) == 5 // a zygote, three replicas, a spare child
	})
}

// TestAStartNeedsASpareChildWithItsLimits checks that a start uses a spare child only if the child
// has the limits of the replica.
func TestAStartNeedsASpareChildWithItsLimits(t *testing.T) {
	n := grouped(t)
	s := withModel
	s.Memory = 64 << 20
	n.answers(n.start("first", s))
	z := n.only()
	spare := n.spare(z.PID)
	s.Memory = 96 << 20
	r := n.start("second", s)
	n.answers(r)
	if r.PID == spare {
		t.Error("a spare child with other limits became the replica")
	}
	proctest.Gone(t, spare)
	n.spare(z.PID)
	if got, want := z.Describe().Limits, limitsOf(s); got != want {
		t.Errorf("the next spare child is limited to %+v, want %+v as the latest replica", got, want)
	}
}

// TestSpareChildrenAreNotAdopted checks that spare children end with their manager, and that the
// next manager forks others.
func TestSpareChildrenAreNotAdopted(t *testing.T) {
	g, w := groups(t), wardenOf(t)
	change := func(c *Config) { c.Groups, c.Warden = g, w }
	old := newNode(t, change)
	s := withModel
	s.Memory = 64 << 20
	old.answers(old.start("kept", s))
	z := old.zygote()
	spare := old.spare(z)
	old.Detach()
	proctest.Gone(t, spare)
	n := newNode(t, change)
	next := n.spare(z)
	if r := n.start("new", s); r.PID != next {
		t.Errorf("the replica is process %d, want the spare child %d: its zygote's limits were kept", r.PID, next)
	}
	n.spare(z)
	proctest.Until(t, "the groups of a zygote, two replicas and a spare child", func() bool {
		names, err := g.Names()
		return err == nil && len(names) == 4
	})
}

func TestATooLongEnvironmentIsRefused(t *testing.T) {
	n := newNode(t, nil)
	s := withModel
	s.Env = map[string]string{"LONG": strings.Repeat("x", zygote.MaxOrder)}
	for k, v := range withModel.Env {
		s.Env[k] = v
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := n.Start(ctx, node.Order{Replica: "x", Spec: s}); err == nil || !strings.Contains(err.Error(), "want at most 65536") || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want the sizes", err)
	}
}
