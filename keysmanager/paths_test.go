package keysmanager

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// onPath returns withModel with the annotation stagecoach.dev/start.
func onPath(start string) node.Spec {
	s := withModel
	s.Function, s.Start = start+".ns", start
	return s
}

// threadedORT builds an ONNX Runtime library that starts a thread, so that no zygote of it can be
// forked.
func threadedORT(t *testing.T) string {
	t.Helper()
	t.Setenv("THREADED_ORT", proctest.Built(t, "ort", "libonnxruntime.so.1"))
	lib := filepath.Join(t.TempDir(), "libthreaded.so")
	cc := exec.CommandContext(t.Context(), "cc", "-shared", "-fPIC", "-DTHREADED_ORT=\""+os.Getenv("THREADED_ORT")+"\"", "-o", lib,
		"../stage/zygote/testdata/threaded.c", "-ldl", "-lpthread")
	if out, err := cc.CombinedOutput(); err != nil {
		t.Fatalf("cc, which the build of a stage needs anyway: %v: %s", err, out)
	}
	return lib
}

// hello reads a replica's hello.
func (n *rig) hello(r *startedReplica) wire.Hello {
	n.t.Helper()
	if err := r.Conn.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		n.t.Fatal(err)
	}
	f, err := wire.NewConn(r.Conn).Read()
	if err != nil || f.Type != wire.FrameHello {
		n.t.Fatalf("%s: %v, %v, want Hello", r.Name, f.Type, err)
	}
	h, err := wire.DecodeHello(f.Payload)
	if err != nil {
		n.t.Fatal(err)
	}
	return h
}

func names(all []node.Phase) (out []string) {
	for _, p := range all {
		out = append(out, p.Name)
	}
	return out
}

// TestStartsAreOnTheirPath asks for each path by name, twice, because the first start may have to
// load.
func TestStartsAreOnTheirPath(t *testing.T) {
	n := newNode(t, func(c *Config) { c.Cache, c.Threads = t.TempDir(), 3 })
	for _, tc := range []struct {
		start, path   string
		first, second []string
	}{
		{"auto", PathFork, []string{"order", "load", "fork"}, []string{"order", "fork"}},
		// This case uses the zygote of the case before.
		{"fork", PathFork, []string{"order", "fork"}, []string{"order", "fork"}},
		{"heap", PathHeap, []string{"order", "load", "fork"}, []string{"order", "fork"}},
		{"map", PathMap, []string{"order", "load", "spawn"}, []string{"order", "spawn"}},
		{"cold", PathCold, []string{"order", "spawn"}, []string{"order", "spawn"}},
	} {
		t.Run(tc.start, func(t *testing.T) {
			first := n.start(tc.start+"-1", onPath(tc.start))
			o := node.Order{Replica: tc.start + "-2", Spec: onPath(tc.start), CPUMilli: 1500}
			second, err := n.Start(t.Context(), o)
			if err != nil {
				t.Fatal(err)
			}
			n.t.Cleanup(func() { _ = second.Conn.Close() })
			if first.Path != tc.path || second.Path != tc.path {
				t.Errorf("paths %s and %s, want %s", first.Path, second.Path, tc.path)
			}
			if got := names(first.Phases); !slices.Equal(got, tc.first) {
				t.Errorf("the first's phases %v, want %v", got, tc.first)
			}
			if got := names(second.Phases); !slices.Equal(got, tc.second) {
				t.Errorf("the second's phases %v, want %v", got, tc.second)
			}
			if h := n.hello(second); h.Threads != 2 {
				t.Errorf("1.5 cores of 3: %d threads, want 2", h.Threads)
			}
			n.answers(first)
		})
	}
	forms := map[string]int{}
	for _, z := range n.Inventory().Zygotes {
		forms[z.Path] += z.Replicas
		if z.Bytes < 1<<20 {
			t.Errorf("%s takes %d bytes", z.Path, z.Bytes)
		}
	}
	if len(forms) != 3 || forms[PathFork] != 4 || forms[PathHeap] != 2 || forms[PathMap] != 2 {
		t.Errorf("replicas by what they started from: %v, want 4, 2 and 2", forms)
	}
}

// lockedLog is a buffer for the log of a Manager.
type lockedLog struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedLog) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.b.String(), text)
}

// TestWhatCannotForkMaps has a library that starts threads. The zygote reports that it cannot be
// forked, and the replicas map sealed memory instead.
func TestWhatCannotForkMaps(t *testing.T) {
	log := &lockedLog{}
	n := newNode(t, func(c *Config) {
		c.Cache, c.ORT, c.Log = t.TempDir(), threadedORT(t), slog.New(slog.NewTextHandler(log, nil))
	})
	first, second := n.start("a", withModel), n.start("b", withModel)
	if first.Path != PathMap || second.Path != PathMap || phase(first, "load") == 0 || phase(second, "load") != 0 {
		t.Errorf("paths %s %v and %s %v, want map, and a load for the first", first.Path, first.Phases, second.Path, second.Phases)
	}
	if got := log.count("level=WARN"); got != 1 || log.count("start on another path") != 1 || log.count("threads after loading") != 1 {
		t.Errorf("%d warnings, want one that says why:\n%s", got, log.b.String())
	}
	n.answers(first)
	n.answers(second)
	for _, r := range []*startedReplica{first, second} {
		maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", r.PID))
		if err != nil || !strings.Contains(string(maps), "/memfd:weights") {
			t.Errorf("%s maps no memory: %v", r.Name, err)
		}
	}
	for _, f := range n.store.slots.Values()[0].zygote.Memory() {
		if _, err := f.WriteAt([]byte("x"), 0); !errors.Is(err, syscall.EPERM) {
			t.Errorf("%s can be written to: %v", f.Name(), err)
		}
		if err := f.Truncate(1 << 30); !errors.Is(err, syscall.EPERM) {
			t.Errorf("%s can grow: %v", f.Name(), err)
		}
	}
	inv := n.Inventory()
	if len(inv.Zygotes) != 1 || inv.Zygotes[0].Path != PathMap || inv.Zygotes[0].Replicas != 2 || len(inv.Failures) != 0 {
		t.Errorf("inventory %+v", inv)
	}
	if _, err := n.Evict(t.Context(), "f.ns"); !errors.Is(err, ErrBusy) {
		t.Errorf("evicted under two replicas: %v", err)
	}
	for _, r := range []string{"a", "b"} {
		if err := n.Stop(t.Context(), r, time.Minute); err != nil {
			t.Error(err)
		}
	}
	before := descriptors(t, os.Getpid())
	if bytes, err := n.Evict(t.Context(), "f.ns"); err != nil || bytes != inv.Zygotes[0].Bytes {
		t.Errorf("evicted %d bytes, %v, want %d", bytes, err, inv.Zygotes[0].Bytes)
	}
	if now := descriptors(t, os.Getpid()); now >= before {
		t.Errorf("%d descriptors before and %d after the eviction of memory", before, now)
	}
	if r := n.start("c", withModel); r.Path != PathMap || log.count("start on another path") != 1 {
		t.Errorf("path %s, want map without trying a zygote again", r.Path)
	}
	if _, err := n.Invalidate(t.Context(), "f.ns"); err != nil {
		t.Error(err)
	}
	if r := n.start("d", withModel); r.Path != PathMap || log.count("start on another path") != 2 {
		t.Errorf("path %s, want a zygote to be tried again after an invalidation", r.Path)
	}
	forked := withModel
	forked.Function, forked.Start = "g.ns", "fork"
	if _, err := n.Start(t.Context(), node.Order{Replica: "e", Spec: forked}); err == nil || !strings.Contains(err.Error(), "threads after loading") {
		t.Errorf("fork was asked for by name: %v", err)
	}
}

// TestWhatCannotBePackedStartsCold has a program that does not pack, and a library that cannot
// fork.
func TestWhatCannotBePackedStartsCold(t *testing.T) {
	log := &lockedLog{}
	n := newNode(t, func(c *Config) { c.ORT, c.Log = threadedORT(t), slog.New(slog.NewTextHandler(log, nil)) })
	s := withModel
	s.Process = "./unpackable"
	for _, name := range []string{"a", "b"} {
		r := n.start(name, s)
		if r.Path != PathCold {
			t.Errorf("path %s, want cold", r.Path)
		}
		n.answers(r)
	}
	if got := log.count("start on another path"); got != 2 || log.count("cannot be packed: exit status 9: it does not pack") != 1 {
		t.Errorf("%d warnings, want one to map and one to cold, with the cause:\n%s", got, log.b.String())
	}
	if inv := n.Inventory(); len(inv.Zygotes) != 0 || len(inv.Failures) != 0 || len(inv.Replicas) != 2 || inv.Misses != 2 {
		t.Errorf("inventory %+v", inv)
	}
}

func TestMappedReplicasAreAdopted(t *testing.T) {
	w := wardenOf(t)
	old := after(t, w)
	r := old.start("a", onPath("map"))
	want := old.Inventory()
	old.Detach()
	n := after(t, w)
	got := n.Inventory()
	if len(got.Zygotes) != 1 || got.Zygotes[0].Path != PathMap || got.Zygotes[0].Replicas != 1 || got.Zygotes[0].Bytes != want.Zygotes[0].Bytes {
		t.Fatalf("adopted %+v, want %+v", got.Zygotes, want.Zygotes)
	}
	n.answers(r)
	if r := n.start("b", onPath("map")); r.Path != PathMap || phase(r, "load") != 0 {
		t.Errorf("path %s with phases %v, want one that maps what was there", r.Path, r.Phases)
	}
	_ = r.Conn.Close()
	if e := n.exit(); e.Replica != "a" || e.Cause != "exited" {
		t.Errorf("exit %+v", e)
	}
	proctest.Until(t, "one replica to be left", func() bool { return n.Inventory().Zygotes[0].Replicas == 1 })
}

func descriptors(t *testing.T, pid int) int {
	t.Helper()
	all, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// TestAThousandOrdersAtOnce sends more orders than can be carried out at the same time. All
// replicas start, another function does not wait for them, and nothing of them is left.
func TestAThousandOrdersAtOnce(t *testing.T) {
	const orders = 1000
	var ended atomic.Int64
	n := newNode(t, func(c *Config) { c.Cache, c.OnExit = t.TempDir(), func(Exit) { ended.Add(1) } })
	other := onPath("heap")
	n.answers(n.start("warm", withModel))
	n.answers(n.start("other", other))
	zygote := n.Inventory().Zygotes[slices.IndexFunc(n.Inventory().Zygotes, func(z ZygoteInfo) bool { return z.Path == PathFork })].PID
	proctest.Until(t, "their ends", func() bool { return n.Stop(t.Context(), "warm", 0) == nil && ended.Load() == 1 })
	n.spare(zygote)
	ours, theirs := descriptors(t, os.Getpid()), descriptors(t, zygote)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	var done, most atomic.Int64
	var wg sync.WaitGroup
	errs := make(chan error, orders)
	for i := range orders {
		wg.Go(func() {
			r, err := n.Start(ctx, node.Order{Replica: fmt.Sprintf("r%d", i), Spec: withModel})
			if err != nil {
				errs <- err
				return
			}
			defer r.Conn.Close() // then the replica ends
			if open, err := os.ReadDir("/proc/self/fd"); err == nil {
				most.Store(max(most.Load(), int64(len(open))))
			}
			_ = r.Conn.SetReadDeadline(time.Now().Add(10 * time.Minute))
			if f, err := wire.NewConn(r.Conn).Read(); err != nil || f.Type != wire.FrameHello {
				errs <- fmt.Errorf("%s: %v, %w", r.Name, f.Type, err)
			}
			done.Add(1)
		})
	}
	proctest.Until(t, "the first to be up", func() bool { return done.Load() > 0 })
	_ = n.start("not in line", other).Conn.Close()
	if got := done.Load(); got > orders*9/10 {
		t.Errorf("%d of %d were up before a replica of another function was", got, orders)
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
	proctest.Until(t, "all ends to be reported", func() bool { return ended.Load() == orders+2 })
	if got := n.Inventory(); len(got.Replicas) != 1 || len(n.starter.gates) != 0 {
		t.Errorf("%d replicas and %d gates are left, want the other function's and none", len(got.Replicas), len(n.starter.gates))
	}
	proctest.Until(t, "descriptors and children to be gone", func() bool {
		spare := n.spare(zygote)
		return descriptors(t, os.Getpid()) <= ours && descriptors(t, zygote) == theirs && slices.Equal(proctest.Children(t, zygote), []int{spare})
	})
	t.Logf("at most %d descriptors open here", most.Load())
}

// TestAZygoteDiesInTheMiddle kills a zygote while orders are on their way. Either a start succeeds
// and the replica's end is reported later, or the start's error says why it failed.
func TestAZygoteDiesInTheMiddle(t *testing.T) {
	const orders = 40
	var mu sync.Mutex
	ends := map[string]string{}
	n := newNode(t, func(c *Config) {
		c.OnExit = func(e Exit) { mu.Lock(); ends[e.Replica] = e.Cause; mu.Unlock() }
	})
	n.start("first", withModel)
	pid := n.zygote()
	up := make(chan string, orders+1)
	up <- "first"
	failed := make(chan error, orders)
	var wg sync.WaitGroup
	var some sync.Once
	for i := range orders {
		wg.Go(func() {
			r, err := n.Start(t.Context(), node.Order{Replica: fmt.Sprintf("r%d", i), Spec: withModel})
			if err != nil {
				failed <- err
				return
			}
			_ = r.Conn.Close()
			up <- r.Name
			some.Do(func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
		})
	}
	wg.Wait()
	close(up)
	close(failed)
	for err := range failed {
		t.Errorf("a start failed with %v, want a fork of the next zygote", err)
	}
	for name := range up {
		proctest.Until(t, "the end of "+name, func() bool { mu.Lock(); defer mu.Unlock(); return ends[name] != "" })
	}
	if inv := n.Inventory(); len(inv.Replicas) != 0 {
		t.Errorf("left: %+v", inv.Replicas)
	}
	proctest.Until(t, "a start after it", func() bool {
		r, err := n.Start(t.Context(), node.Order{Replica: "again", Spec: withModel})
		if err == nil {
			_ = r.Conn.Close()
		}
		return err == nil
	})
}

// TestAChildDiesBeforeItsHello checks that the end of a child is reported with its cause, and that
// its siblings go on.
func TestAChildDiesBeforeItsHello(t *testing.T) {
	n := newNode(t, nil)
	n.start("a", withModel)
	for _, start := range []string{"auto", "map", "cold"} {
		r := n.start(start, onPath(start))
		// The replica sends nothing more, whether it has sent its hello or not.
		if err := syscall.Kill(r.PID, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(r.PID, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if e := n.exit(); e.Replica != start || e.PID != r.PID || e.Cause != "killed by SIGKILL" {
			t.Errorf("exit %+v, want %s killed by SIGKILL", e, start)
		}
		if _, err := io.Copy(io.Discard, r.Conn); err != nil && !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%s: its socket ends with %v", start, err)
		}
	}
	if inv := n.Inventory(); len(inv.Replicas) != 1 {
		t.Errorf("left: %+v", inv.Replicas)
	}
}
