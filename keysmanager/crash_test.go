package keysmanager

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// load makes a replica answer calls until it is told to stop.
type load struct {
	stop, answered atomic.Int64
	done           sync.WaitGroup
	err            error
}

func (l *load) run(r *startedReplica) {
	b := wire.Batch{Calls: []wire.Call{{Input: tensor.Input{{Items: tensor.Activation{{Bytes: []byte("x")}}}}}}}
	l.done.Go(func() {
		c := wire.NewConn(r.Conn)
		_, l.err = c.Read() // Hello
		if l.err == nil {
			l.err = c.Write(wire.Frame{Type: wire.FrameWelcome, Payload: wire.Welcome{Version: 1}.Append(nil)})
		}
		for id := uint64(1); l.err == nil && l.stop.Load() == 0; id++ {
			_ = r.Conn.SetDeadline(time.Now().Add(time.Minute))
			if l.err = c.Write(wire.Frame{Type: wire.FrameBatch, Batch: id, Payload: b.Append(nil)}); l.err != nil {
				return
			}
			var f wire.Frame
			if f, l.err = c.Read(); l.err == nil && f.Type != wire.FrameResult {
				l.err = fmt.Errorf("answered with %v %q", f.Type, f.Payload)
			}
			l.answered.Add(1)
		}
	})
}

// more waits for more answered calls.
func (l *load) more(t *testing.T, name string) {
	t.Helper()
	from := l.answered.Load()
	proctest.Until(t, name+" to answer", func() bool { return l.answered.Load() > from+10 })
}

// TestReplicasSurviveAKilledDaemon kills a daemon with eight replicas. The replicas go on
// answering, and another daemon adopts them.
func TestReplicasSurviveAKilledDaemon(t *testing.T) {
	folder, err := os.MkdirTemp("", "kept-") //nolint:usetesting // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(folder)
	cmd, replicas := daemon(t, folder)
	loads := map[string]*load{}
	for _, r := range replicas {
		loads[r.Name] = &load{}
		loads[r.Name].run(r)
	}
	for name, l := range loads {
		l.more(t, name)
	}
	if _, err := warden.Launch(t.Context(), launcherAt(folder)); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("process %d is the manager", cmd.Process.Pid)) {
		t.Errorf("a second manager: %v", err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	for name, l := range loads {
		l.more(t, name)
	}
	// Meanwhile two replicas are killed, one forked and one started by the warden, and one ends by
	// itself.
	for _, i := range []int{1, 7} {
		if err := syscall.Kill(replicas[i].PID, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		proctest.Gone(t, replicas[i].PID)
	}
	loads["r2"].stop.Store(1)
	loads["r2"].done.Wait()
	_ = replicas[2].Conn.Close()
	proctest.Gone(t, replicas[2].PID)

	c, err := warden.Launch(t.Context(), launcherAt(folder))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	n := after(t, c)
	causes := map[string]string{}
	for range 3 {
		e := n.exit()
		causes[e.Replica] = e.Cause
	}
	for name, want := range map[string]string{"r1": "killed by SIGKILL", "r7": "killed by SIGKILL", "r2": resources.ExitedWell} {
		if !strings.HasPrefix(causes[name], want) {
			t.Errorf("%s ended: %q, want %q", name, causes[name], want)
		}
	}
	inv := n.Inventory()
	if got, want := n.names(), []string{"r0", "r3", "r4", "r5", "r6"}; !slices.Equal(got, want) || len(inv.Zygotes) != 1 || inv.Zygotes[0].Replicas != 4 {
		t.Errorf("adopted %v and %+v, want %v", got, inv.Zygotes, want)
	}
	pids := []int{inv.Zygotes[0].PID}
	for _, r := range inv.Replicas {
		i := slices.IndexFunc(replicas, func(x *startedReplica) bool { return x.Name == r.Name })
		if replicas[i].PID != r.PID || replicas[i].Path != r.Path || !slices.Equal(replicas[i].Phases, r.Phases) {
			t.Errorf("adopted %+v, want %+v", r, replicas[i])
		}
		loads[r.Name].more(t, r.Name)
		pids = append(pids, r.PID)
	}
	if r := n.start("r9", withModel); r.Path == "cold" {
		t.Errorf("path %s, want one from the adopted zygote", r.Path)
	}
	for name, l := range loads {
		if l.stop.Store(1); name == "r1" || name == "r7" {
			continue
		}
		if l.done.Wait(); l.err != nil {
			t.Errorf("%s: %v", name, l.err)
		}
	}
	parent := resources.ParentOf(pids[0])
	n.Close()
	if left := proctest.Children(t, parent); len(left) != 0 {
		t.Errorf("the warden has children %v after the end of all", left)
	}
	c.Close()
	for _, pid := range append(pids, parent) { // the warden has nothing left to do
		proctest.Gone(t, pid)
	}
	for _, l := range loads {
		l.done.Wait()
	}
}

func TestADeadWardenIsReplaced(t *testing.T) {
	folder, err := os.MkdirTemp("", "kept-") //nolint:usetesting // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(folder)
	c, err := warden.Launch(t.Context(), launcherAt(folder))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	n := after(t, c)
	forked, own := n.start("forked", withModel), n.start("own", node.Spec{Function: "g.ns", Image: "test/wait:1"})
	n.answers(forked)
	z := n.zygote()
	if err := syscall.Kill(resources.ParentOf(z), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	causes := map[string]string{}
	for range 2 {
		e := n.exit()
		causes[e.Replica] = e.Cause
	}
	for _, name := range []string{"forked", "own"} {
		if !strings.Contains(causes[name], warden.ErrLost.Error()) {
			t.Errorf("%s ended: %q, want %q in it", name, causes[name], warden.ErrLost)
		}
	}
	for _, pid := range []int{z, forked.PID, own.PID} {
		proctest.Gone(t, pid)
	}
	n.answers(n.start("own", node.Spec{Function: "g.ns", Image: "test/wait:1"})) // by another warden
	proctest.Until(t, "the zygote to be loaded again", func() bool {
		r, err := n.Start(t.Context(), node.Order{Replica: "forked", Spec: withModel})
		if err != nil {
			return false
		}
		defer r.Conn.Close()
		n.answers(r)
		return true
	})
	next := resources.ParentOf(n.zygote())
	n.Close()
	c.Close()
	proctest.Gone(t, next)
	if _, err := unix.Wait4(next, nil, 0, nil); err != nil { // it was a child of this process
		t.Error(err)
	}
}

// TestDaemonsThatAreKilledAtAnyMoment kills four daemons, one after the other, each while it starts
// and stops replicas. The daemon has the other ends of the stage sockets, so its replicas end with
// it. The next daemon must find no replica and no process that was only partly started.
func TestDaemonsThatAreKilledAtAnyMoment(t *testing.T) {
	folder, err := os.MkdirTemp("", "kept-") //nolint:usetesting // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(folder)
	dir, ort := images(t).Dir, proctest.Built(t, "ort", "libonnxruntime.so.1")
	for _, lines := range []int{1, 7, 20, 41} {
		cmd := exec.CommandContext(t.Context(), "/proc/self/exe", actAs, "churn", dir, ort, folder)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		said := bufio.NewScanner(out)
		for range lines {
			if !said.Scan() {
				t.Fatalf("the daemon has ended: %v", cmd.Wait())
			}
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	c, err := warden.Launch(t.Context(), launcherAt(folder))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	n := after(t, c)
	proctest.Until(t, "all replicas to be gone", func() bool { return len(n.Inventory().Replicas) == 0 })
	z := n.zygote()
	for pid, want := range map[int]int{z: n.spare(z), resources.ParentOf(z): z} {
		proctest.Until(t, "its children to be those of the inventory", func() bool {
			return slices.Equal(proctest.Children(t, pid), []int{want})
		})
	}
	if r := n.start("last", withModel); r.Path == "cold" {
		t.Errorf("path %s, want one from the adopted zygote", r.Path)
	}
	n.Close()
	if kept, err := c.Attach(func(warden.Exit) {}); err != nil || len(kept) != 0 {
		t.Errorf("%d entries are kept after the end of all, %v: %+v", len(kept), err, kept)
	}
}

// TestAKilledDaemonLeavesNothingOfItsLoad kills a daemon during a load. Neither the loading process
// nor the files that it has written may be left.
func TestAKilledDaemonLeavesNothingOfItsLoad(t *testing.T) {
	folder, err := os.MkdirTemp("", "kept-") //nolint:usetesting // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(folder)
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", actAs, "loads", images(t).Dir, proctest.Built(t, "ort", "libonnxruntime.so.1"), folder)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	half := func() []string {
		found, err := filepath.Glob(filepath.Join(folder, "cache", "*", "*"))
		if err != nil {
			t.Fatal(err)
		}
		return found
	}
	proctest.Until(t, "half of a packed model", func() bool { return len(half()) == 1 })
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	pid, err := strconv.Atoi(strings.TrimPrefix(filepath.Ext(half()[0]), "."))
	if err != nil {
		t.Fatal(err)
	}
	c, err := warden.Launch(t.Context(), launcherAt(folder))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	n := newNode(t, func(cfg *Config) { cfg.Warden, cfg.Cache = c, filepath.Join(folder, "cache") })
	proctest.Gone(t, pid)
	if left := half(); len(left) != 0 {
		t.Errorf("left are %v, want nothing", left)
	}
	n.answers(n.start("a", withModel))
	n.Close()
	if kept, err := c.Attach(func(warden.Exit) {}); err != nil || len(kept) != 0 {
		t.Errorf("%d entries are kept after the end of all, %v: %+v", len(kept), err, kept)
	}
}
