package keysmanager

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
)

// after makes another Manager of the same warden.
func after(t *testing.T, c *warden.Client) *rig {
	return newNode(t, func(cfg *Config) { cfg.Warden = c })
}

// wardenOf returns a warden that ends with the test, after the test's managers.
func wardenOf(t *testing.T) *warden.Client {
	c := warden.InProcess(sandbox.NewSpawner())
	t.Cleanup(c.Close)
	return c
}

// names returns the names of a node's replicas.
func (n *rig) names() (out []string) {
	for _, r := range n.Inventory().Replicas {
		out = append(out, r.Name)
	}
	return out
}

func TestWhatIsDetachedIsAdopted(t *testing.T) {
	w := wardenOf(t)
	old := after(t, w)
	plain := node.Spec{Function: "g.ns", Namespace: "ns", Image: "test/wait:1"}
	all := []*startedReplica{old.start("a", withModel), old.start("b", withModel), old.start("p", plain)}
	want := old.Inventory()
	old.Detach()
	if _, err := old.Start(t.Context(), node.Order{Replica: "x", Spec: plain}); err == nil {
		t.Error("a detached manager starts")
	}
	n := after(t, w)
	got := n.Inventory()
	if len(got.Zygotes) != 1 || got.Zygotes[0].PID != want.Zygotes[0].PID || got.Zygotes[0].Bytes != want.Zygotes[0].Bytes ||
		got.Zygotes[0].Function != "f.ns" || got.Zygotes[0].Replicas != 2 || got.Zygotes[0].Load != want.Zygotes[0].Load {
		t.Errorf("adopted %+v, want %+v", got.Zygotes, want.Zygotes)
	}
	if len(got.Replicas) != 3 {
		t.Fatalf("adopted %+v, want %+v", got.Replicas, want.Replicas)
	}
	for i, g := range got.Replicas {
		w := want.Replicas[i]
		if g.Name != w.Name || g.Function != w.Function || g.PID != w.PID || g.Path != w.Path || !g.Started.Equal(w.Started) || !slices.Equal(g.Phases, w.Phases) {
			t.Errorf("adopted %+v, want %+v", g, w)
		}
	}
	for _, r := range all {
		n.answers(r)
	}
	if r := n.start("c", withModel); r.Path != PathHeap {
		t.Errorf("path %s, want a fork from the adopted zygote", r.Path)
	}
	for _, name := range []string{"a", "p", "c"} {
		if err := n.Stop(t.Context(), name, time.Minute); err != nil {
			t.Fatal(err)
		}
		if e := n.exit(); e.Replica != name {
			t.Errorf("exit %+v of %s", e, name)
		}
	}
	if got := n.names(); !slices.Equal(got, []string{"b"}) {
		t.Errorf("%v run, want b", got)
	}
	if len(old.exits) != 0 {
		t.Errorf("the detached manager is told of %+v", <-old.exits)
	}
}

// TestInvalidatedZygotesStayInvalidated checks that an adopted zygote with invalidated parameters
// keeps its replicas, and that no other replica starts from it.
func TestInvalidatedZygotesStayInvalidated(t *testing.T) {
	w := wardenOf(t)
	n := after(t, w)
	old := n.start("old", withModel)
	z := n.zygote()
	if _, err := n.Invalidate(t.Context(), "f.ns"); err != nil {
		t.Fatal(err)
	}
	n.Detach()
	n = after(t, w)
	if inv := n.Inventory(); len(inv.Zygotes) != 1 || inv.Zygotes[0].PID != z || inv.Zygotes[0].State != Retiring || inv.Zygotes[0].Replicas != 1 {
		t.Fatalf("adopted %+v, want the old zygote to retire", inv.Zygotes)
	}
	n.store.mu.Lock()
	if len(n.store.slots.Values()[0].zygote.Family.Waiting()) > 0 { // New may have forked one
		t.Error("it has a spare child, which nobody will ever want")
	}
	n.store.mu.Unlock()
	n.answers(old)
	r := n.start("new", withModel)
	i := slices.IndexFunc(n.Inventory().Zygotes, func(i ZygoteInfo) bool { return i.State == Ready })
	if inv := n.Inventory(); len(inv.Zygotes) != 2 || i < 0 || inv.Zygotes[i].PID == z || inv.Zygotes[i].Generation != 1 || inv.Zygotes[i].Replicas != 1 {
		t.Fatalf("zygotes %+v, want another one, of the next generation", inv.Zygotes)
	}
	n.answers(r)
	if err := n.Stop(t.Context(), "old", time.Minute); err != nil {
		t.Fatal(err)
	}
	proctest.Gone(t, z)
	got, err := n.Invalidate(t.Context(), "f.ns")
	if err != nil || got.Generation != 2 {
		t.Errorf("%+v, %v, want the generations to go on", got, err)
	}
}

func TestMissedEndsAreReportedOnce(t *testing.T) {
	w := wardenOf(t)
	old := after(t, w)
	killed, plain := old.start("killed", withModel), old.start("plain", node.Spec{Function: "g.ns", Image: "test/wait:1"})
	quits := old.start("quits", withModel)
	old.answers(quits)
	stays := old.start("stays", withModel)
	old.Detach()
	for _, pid := range []int{killed.PID, plain.PID} {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	_ = quits.Conn.Close() // so the replica ends by itself
	for _, pid := range []int{killed.PID, plain.PID, quits.PID} {
		proctest.Gone(t, pid)
	}
	n := after(t, w)
	causes := map[string]string{}
	for range 3 {
		e := n.exit()
		causes[e.Replica] = e.Cause
	}
	for name, want := range map[string]string{"killed": "killed by SIGKILL", "plain": "killed by SIGKILL", "quits": resources.ExitedWell} {
		if !strings.HasPrefix(causes[name], want) {
			t.Errorf("%s ended: %q, want %q", name, causes[name], want)
		}
	}
	if got := n.names(); !slices.Equal(got, []string{"stays"}) {
		t.Errorf("%v run, want stays", got)
	}
	n.answers(stays)
	n.Detach()
	next := after(t, w) // ends are reported once
	if got := next.names(); !slices.Equal(got, []string{"stays"}) || len(next.exits) != 0 {
		t.Errorf("%v run and %d exits, want stays and none", got, len(next.exits))
	}
}

func TestReplicasOfADeadZygoteAreReported(t *testing.T) {
	w := wardenOf(t)
	old := after(t, w)
	a, b := old.start("a", withModel), old.start("b", withModel)
	z := old.zygote()
	old.Detach()
	if err := syscall.Kill(b.PID, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	proctest.Gone(t, b.PID)
	proctest.Until(t, "the zygote to have told that, and to wait again", func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", z))
		return err == nil && strings.Contains(string(stat), ") S ")
	})
	if err := syscall.Kill(z, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for _, pid := range []int{z, a.PID} {
		proctest.Gone(t, pid)
	}
	n := after(t, w)
	causes := map[string]string{}
	for range 2 {
		e := n.exit()
		causes[e.Replica] = e.Cause
	}
	if got := causes["a"]; !strings.HasPrefix(got, "its zygote ended: killed by SIGKILL") {
		t.Errorf("a ended: %q", got)
	}
	if got := causes["b"]; strings.Contains(got, "zygote") {
		t.Errorf("b, which had ended before, ended: %q", got)
	}
	if inv := n.Inventory(); len(inv.Zygotes)+len(inv.Replicas) != 0 {
		t.Errorf("inventory %+v", inv)
	}
}

// TestPartlyStartedProcessesAreEnded leaves the entries of a daemon that was killed between two
// steps of a start. The next daemon must end them.
func TestPartlyStartedProcessesAreEnded(t *testing.T) {
	w := wardenOf(t)
	old := after(t, w)
	a, untold := old.start("a", withModel), old.start("untold", withModel)
	old.answers(a)
	born := old.zygote()
	old.store.mu.Lock()
	entry, half := old.store.processes["untold"].entry, old.store.slots.Values()[0].zygote
	old.store.mu.Unlock()
	old.Detach()
	kept, err := w.Attach(func(warden.Exit) {})
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range kept {
		for _, f := range k.Files {
			_ = f.Close()
		}
	}
	nobody, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer nobody.Close()
	loading := warden.Process{Name: "zygote-loading", Meta: encode(meta{Zygote: &zygote.Description{Function: "l.ns"}})}
	loading.Command.Argv = []string{"/bin/sleep", "600"}
	strange := loading
	strange.Name, strange.Meta = "zygote-strange", []byte(`{"version":99}`)
	var pids []int
	for _, p := range []warden.Process{loading, strange} {
		pid, err := w.Start(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	gone := &replicaMeta{Replica: "gone", Function: "f.ns", Started: time.Now(), Zygote: half.Entry, PID: 1 << 22}
	// It has ended and was reported, because another replica has its name.
	told := &replicaMeta{Replica: "a", Function: "f.ns", Started: time.Unix(1, 0), Zygote: half.Entry, PID: 1<<22 + 1}
	for _, err := range []error{
		w.Drop(entry), // as if the replica's own entry did not exist yet
		w.Put("replica-gone", encode(meta{Replica: gone}), nobody, nobody),
		w.Put("replica-told", encode(meta{Replica: told}), nobody, nobody),
		w.Put("replica-bad", encode(meta{Replica: &replicaMeta{Replica: "bad"}})),
		w.Put("replica-worse", []byte("{")),
		w.Release(),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	n := after(t, w)
	if e := n.exit(); e.Replica != "gone" || e.Cause != "ended "+zygote.Away {
		t.Errorf("exit %+v, want that of gone", e)
	}
	for _, pid := range append(pids, untold.PID) {
		proctest.Gone(t, pid)
	}
	if got := n.names(); !slices.Equal(got, []string{"a"}) || n.zygote() != born {
		t.Errorf("%v run, want a", got)
	}
	if len(n.exits) != 0 {
		t.Errorf("exit %+v, want no more", <-n.exits)
	}
	n.Close()
	proctest.Gone(t, born)
	kept, err = w.Attach(func(warden.Exit) {})
	if err != nil || len(kept) != 0 {
		t.Errorf("kept after the end of all: %+v, %v", kept, err)
	}
}

func TestOutputWhileNoManagerRuns(t *testing.T) {
	w, dir := wardenOf(t), t.TempDir()
	old := after(t, w)
	old.start("chatty", node.Spec{Function: "c.ns", Image: "test/wait:1", Process: "./chatty", Env: map[string]string{"FILES": dir}})
	old.printed("chatty")
	old.Detach()
	touch := func(name string) {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	touch("go")
	proctest.Until(t, "200 KB to be printed, three times what a pipe holds", func() bool {
		_, err := os.Stat(filepath.Join(dir, "done"))
		return err == nil
	})
	n := after(t, w)
	touch("on")
	lines := func(prefix string) (found string) {
		n.printing.Lock()
		defer n.printing.Unlock()
		for _, l := range n.lines["chatty"] {
			if strings.HasPrefix(l, prefix) {
				found = l
			}
		}
		return found
	}
	proctest.Until(t, "what it prints now", func() bool { return lines("stdout: after") != "" })
	var lost int
	if _, err := fmt.Sscanf(lines("stderr: "), "stderr: %d bytes of output were lost "+zygote.Away, &lost); err != nil || lost < 100_000 || lost > 200_001 {
		t.Errorf("it is said that %q: %v", lines("stderr: "), err)
	}
}

func TestDetachEndsALoad(t *testing.T) {
	w := wardenOf(t)
	old := after(t, w)
	failed := make(chan error, 1)
	go func() {
		_, err := old.Start(context.WithoutCancel(t.Context()), node.Order{Replica: "a", Spec: withModel})
		failed <- err
	}()
	proctest.Until(t, "the load to begin", func() bool {
		old.store.mu.Lock()
		defer old.store.mu.Unlock()
		return old.store.slots.Len() == 1
	})
	old.Detach()
	if err := <-failed; !errors.Is(err, ErrClosed) {
		t.Errorf("got %v, want %v", err, ErrClosed)
	}
	if kept, err := w.Attach(func(warden.Exit) {}); err != nil || len(kept) != 0 {
		t.Errorf("kept %+v, %v", kept, err)
	}
}
