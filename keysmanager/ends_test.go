package keysmanager

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/cache"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

func TestEndsAreReportedWithTheirCause(t *testing.T) {
	n := newNode(t, nil)
	for name, s := range map[string]node.Spec{"forked": withModel, "spawned": {Function: "g.ns", Image: "test/wait:1"}} {
		r := n.start(name, s)
		n.answers(r)
		if err := syscall.Kill(r.PID, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if e := n.exit(); e.Replica != name || e.PID != r.PID || e.Function != s.Function || e.Cause != "killed by SIGKILL" || e.End != task.EndUnclear {
			t.Errorf("exit %+v, want that nobody can tell", e)
		}
	}
	bad := withModel
	bad.Env = maps.Clone(bad.Env)
	bad.Env["wait_mean"] = "soon"
	r := n.start("bad", bad)
	if e := n.exit(); e.Replica != "bad" || !strings.HasPrefix(e.Cause, "exit status 1: ") || !strings.Contains(e.Cause, `wait_mean="soon"`) || e.End != task.EndItself {
		t.Errorf("exit of %d: %+v", r.PID, e)
	}
	n.printing.Lock()
	defer n.printing.Unlock()
	if !slices.ContainsFunc(n.lines["bad"], func(l string) bool { return strings.Contains(l, "wait_mean") }) {
		t.Errorf("lines of the replica: %q", n.lines["bad"])
	}
}

func TestADeadZygoteTakesItsReplicasAndComesBack(t *testing.T) {
	n := newNode(t, nil)
	a, b := n.start("a", withModel), n.start("b", withModel)
	n.answers(a)
	if err := syscall.Kill(n.zygote(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	var lost []string
	for range 2 {
		e := n.exit()
		if lost = append(lost, e.Replica); e.End != task.EndShared || !strings.HasPrefix(e.Cause, "its zygote ended: killed by SIGKILL") {
			t.Errorf("exit %+v, want the zygote's end", e)
		}
	}
	slices.Sort(lost)
	if !slices.Equal(lost, []string{"a", "b"}) {
		t.Errorf("lost %v, want a and b", lost)
	}
	r := n.start("c", withModel) // the zygote's end was no failed load, so nothing is refused
	proctest.Gone(t, a.PID)
	proctest.Gone(t, b.PID)
	n.answers(r)
}

// TestNoStartFailsForKilledZygotes kills several zygotes in turn, each during a start.
func TestNoStartFailsForKilledZygotes(t *testing.T) {
	n := newNode(t, nil)
	n.start("first", withModel)
	for i := range 4 {
		pid := n.zygote()
		started := make(chan error, 3)
		for j := range cap(started) {
			go func() {
				r, err := n.Start(t.Context(), node.Order{Replica: fmt.Sprint("r", i, "-", j), Spec: withModel})
				if err == nil {
					_ = r.Conn.Close()
				}
				started <- err
			}()
		}
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		for range cap(started) {
			if err := <-started; err != nil {
				t.Errorf("after kill %d: %v", i+1, err)
			}
		}
		n.start(fmt.Sprint("after", i), withModel)
		if next := n.zygote(); next == pid {
			t.Fatalf("kill %d: zygote %d still serves", i+1, pid)
		}
	}
}

// TestAStartWaitsForABackOff checks that a start waits for a back-off as long as its caller does.
func TestAStartWaitsForABackOff(t *testing.T) {
	n := newNode(t, nil)
	n.start("first", withModel)
	n.store.mu.Lock()
	for _, key := range n.store.slots.Keys() {
		for range 10 { // it ended soon after its load, several times
			n.store.step(cache.Ended[zygote.Key]{Key: key})
			n.store.step(cache.Loaded[zygote.Key]{Key: key, Bytes: 1})
		}
	}
	n.store.mu.Unlock()
	if err := syscall.Kill(n.zygote(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	n.exit()
	ctx, cancel := context.WithCancelCause(t.Context())
	waits := make(chan error, 1)
	go func() {
		_, err := n.Start(ctx, node.Order{Replica: "second", Spec: withModel})
		waits <- err
	}()
	proctest.Until(t, "the start to wait", func() bool {
		n.store.mu.Lock()
		defer n.store.mu.Unlock()
		return slices.ContainsFunc(n.store.slots.Keys(), func(key zygote.Key) bool {
			e := n.store.slots.Entry(key)
			return e.Holds > 0 && !e.Ready
		})
	})
	cancel(errors.New("nobody waits any more"))
	if err := <-waits; err == nil || !strings.Contains(err.Error(), "nobody waits any more") || !strings.Contains(err.Error(), "its zygote is not loaded again for ") ||
		!strings.Contains(err.Error(), "killed by SIGKILL") {
		t.Errorf("given up: %v", err)
	}
	n.answers(n.start("third", withModel))
}

func TestLoadingThatFailsSaysWhy(t *testing.T) {
	n := newNode(t, nil)
	for want, change := range map[string]func(*node.Spec){
		"nosuch.onnx": func(s *node.Spec) { s.Env["STAGECOACH_MODEL"] = "nosuch.onnx" },
		"no folder":   func(s *node.Spec) { s.Image = "test/nosuch:1" },
		"repository":  func(s *node.Spec) { s.Image = "../../etc" },
		"nosuchstage": func(s *node.Spec) { s.Process = "./nosuchstage" },
	} {
		s := withModel
		s.Env = maps.Clone(s.Env)
		change(&s)
		if _, err := n.Start(t.Context(), node.Order{Replica: "x", Spec: s}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
}

func TestLinesArriveUnderTheirReplica(t *testing.T) {
	n := newNode(t, nil)
	bad := func(text string) node.Spec {
		s := withModel
		s.Env = maps.Clone(s.Env)
		s.Env["wait_mean"] = text
		return s
	}
	talk := node.Spec{Function: "t.ns", Image: "test/wait:1", Process: "./talk"}
	for name, s := range map[string]node.Spec{"fork-1": bad("one"), "fork-2": bad("two"), "own-1": talk, "own-2": talk} {
		n.start(name, s)
	}
	for range 4 {
		e := n.exit()
		if word := map[string]string{"fork-1": "one", "fork-2": "two", "own-1": "err of own-1", "own-2": "err of own-2"}[e.Replica]; !strings.Contains(e.Cause, word) {
			t.Errorf("%+v, want %q in its cause", e, word)
		}
	}
	n.printing.Lock()
	defer n.printing.Unlock()
	for _, name := range []string{"own-1", "own-2"} {
		if got, want := slices.Sorted(slices.Values(n.lines[name])), []string{"stderr: err of " + name, "stdout: out of " + name}; !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	for name, other := range map[string]string{"fork-1": "two", "fork-2": "one"} {
		if all := strings.Join(n.lines[name], "\n"); !strings.Contains(all, "stderr: ") || strings.Contains(all, other) {
			t.Errorf("%s: %q, want lines of its own", name, all)
		}
	}
}

func TestStopSendsSIGTERMFirst(t *testing.T) {
	n := newNode(t, nil)
	n.start("stubborn", node.Spec{Function: "s.ns", Image: "test/wait:1", Process: "./stubborn"})
	n.printed("stubborn") // from now on it ignores SIGTERM
	r := n.start("forked", withModel)
	n.answers(r)
	for name, want := range map[string]string{"stubborn": "killed by SIGKILL", "forked": resources.ExitedWell} {
		grace := 20 * time.Millisecond
		if want == resources.ExitedWell {
			grace = time.Minute
		}
		if err := n.Stop(t.Context(), name, grace); err != nil {
			t.Fatal(err)
		}
		if e := n.exit(); e.Replica != name || !strings.HasPrefix(e.Cause, want) || e.End != task.EndShared {
			t.Errorf("exit %+v, want %s of %s, which the platform asked for", e, want, name)
		}
		if err := n.Stop(t.Context(), name, grace); err != nil {
			t.Errorf("a second time: %v", err)
		}
	}
	// The name is free again.
	n.start("stubborn", node.Spec{Function: "s.ns", Image: "test/wait:1", Process: "./stubborn"})
	n.printed("stubborn")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	// A cancelled context ends the grace period.
	if err := n.Stop(ctx, "stubborn", time.Hour); err != nil {
		t.Fatal(err)
	}
}

func TestProcessesOfAReplicaEndWithIt(t *testing.T) {
	n := newNode(t, nil)
	n.start("litter", node.Spec{Function: "l.ns", Image: "test/wait:1", Process: "./litter"})
	pid, err := strconv.Atoi(n.printed("litter"))
	if err != nil {
		t.Fatal(err)
	}
	if e := n.exit(); e.Cause != resources.ExitedWell {
		t.Errorf("exit %+v", e)
	}
	proctest.Gone(t, pid)
}

// TestAnOrderThatIsGivenUpLeavesNothing has a zygote that does not answer in time.
func TestAnOrderThatIsGivenUpLeavesNothing(t *testing.T) {
	n := newNode(t, nil)
	a := n.start("a", withModel)
	n.answers(a)
	z := n.zygote()
	n.spare(z)
	if err := syscall.Kill(z, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	spare := n.start("spare", withModel) // it needs no answer of the zygote
	n.answers(spare)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := n.Start(ctx, node.Order{Replica: "late", Spec: withModel}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want the context's end", err)
	}
	if err := syscall.Kill(z, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	b := n.start("late", withModel) // the name is free; this order comes after the other one
	n.answers(b)
	want := []int{a.PID, b.PID, spare.PID, n.spare(z)}
	slices.Sort(want)
	proctest.Until(t, "the child that nobody waited for to be gone", func() bool {
		return slices.Equal(slices.Sorted(slices.Values(proctest.Children(t, z))), want)
	})
	if inv := n.Inventory(); inv.Zygotes[0].Replicas != 3 || len(inv.Replicas) != 3 {
		t.Errorf("inventory %+v, want three replicas", inv)
	}
	if len(n.exits) != 0 {
		t.Errorf("exit %+v of what was never started", <-n.exits)
	}
}

func TestALoadOutlivesItsCaller(t *testing.T) {
	n := newNode(t, nil)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := n.Start(ctx, node.Order{Replica: "a", Spec: withModel}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want the context's end", err)
	}
	n.zygote()
	if r := n.start("a", withModel); r.Path != PathHeap {
		t.Errorf("path %s, want fork", r.Path)
	}
}

func TestCloseEndsALoad(t *testing.T) {
	n := newNode(t, nil)
	s := withModel
	s.Process = "./stubborn" // never ends its load
	failed := make(chan error, 1)
	go func() {
		_, err := n.Start(context.WithoutCancel(t.Context()), node.Order{Replica: "a", Spec: s})
		failed <- err
	}()
	proctest.Until(t, "the load to begin", func() bool {
		n.store.mu.Lock()
		defer n.store.mu.Unlock()
		return n.store.slots.Len() == 1
	})
	n.Close()
	if err := <-failed; !errors.Is(err, ErrClosed) {
		t.Errorf("got %v, want %v", err, ErrClosed)
	}
}

// TestReplicasOfADeafZygoteCanBeStopped checks that replicas can be stopped although their zygote
// reads no orders any more.
func TestReplicasOfADeafZygoteCanBeStopped(t *testing.T) {
	n := newNode(t, nil)
	a, b := n.start("a", withModel), n.start("b", withModel)
	n.answers(a)
	n.answers(b)
	z := n.zygote()
	if err := syscall.Kill(z, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Kill(z, syscall.SIGCONT) }()
	stopped := make(chan error, 2)
	for name, grace := range map[string]time.Duration{"a": 0, "b": time.Minute} {
		go func() { stopped <- n.Stop(context.WithoutCancel(t.Context()), name, grace) }()
	}
	proctest.Gone(t, a.PID)
	proctest.Gone(t, b.PID)
	if err := syscall.Kill(z, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := <-stopped; err != nil {
			t.Error(err)
		}
		if e := n.exit(); e.Cause != resources.ExitedWell && e.Cause != "killed by SIGKILL" {
			t.Errorf("exit %+v", e)
		}
	}
}
