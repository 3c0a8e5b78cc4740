package keysmanager

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/sandbox"
	"github.com/stagecoach-serving/stagecoach/tensor"
	"github.com/stagecoach-serving/stagecoach/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// node is a Manager with real images.
type node struct {
	*Manager
	t     *testing.T
	exits chan Exit
	mu    sync.Mutex
	lines map[string][]string // by replica
}

var built struct {
	once sync.Once
	dir  string
	err  error
}

// images builds the image test/wait:1 once: the function wait, with the recogniser's parameters.
func images(t *testing.T) sandbox.Images {
	t.Helper()
	model := proctest.Built(t, "models", "ocr", "rec.onnx")
	built.once.Do(func() {
		if built.dir, built.err = os.MkdirTemp("", "stagecoach-images-"); built.err != nil { //nolint:usetesting // shared by the tests
			return
		}
		for _, tag := range []string{"1", "2"} {
			dir := filepath.Join(built.dir, "test", "wait", tag)
			if built.err = os.MkdirAll(dir, 0o755); built.err != nil {
				return
			}
			if out, err := exec.Command("go", "build", "-o", filepath.Join(dir, "stage"), "../functions/wait").CombinedOutput(); err != nil {
				built.err = fmt.Errorf("%w: %s", err, out)
				return
			}
			if built.err = os.Symlink(model, filepath.Join(dir, "model.onnx")); built.err != nil {
				return
			}
		}
	})
	if built.err != nil {
		t.Fatal(built.err)
	}
	return sandbox.Images{Dir: built.dir}
}

func newNode(t *testing.T, change func(*Config)) *node {
	t.Helper()
	n := &node{t: t, exits: make(chan Exit, 100), lines: map[string][]string{}}
	cfg := Config{
		Node: "n1", Images: images(t), ORT: proctest.Built(t, "ort", "libonnxruntime.so.1"), Threads: 1,
		OnExit: func(e Exit) { n.exits <- e },
		Output: func(replica, _, line string) {
			n.mu.Lock()
			defer n.mu.Unlock()
			n.lines[replica] = append(n.lines[replica], line)
		},
		Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry(),
	}
	if change != nil {
		change(&cfg)
	}
	m, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	n.Manager = m
	t.Cleanup(m.Close)
	return n
}

var withModel = Spec{Function: "f.ns", Namespace: "ns", Image: "test/wait:1", Env: map[string]string{"STAGECOACH_MODEL": "model.onnx", "wait_mean": "1ms"}}

func (n *node) start(replica string, s Spec) *Replica {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), time.Minute)
	defer cancel()
	r, err := n.Start(ctx, Order{Replica: replica, Spec: s})
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { _ = r.Conn.Close() })
	return r
}

// answers makes the replica do one call.
func (n *node) answers(r *Replica) {
	n.t.Helper()
	c := wire.NewConn(r.Conn)
	if err := c.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		n.t.Fatal(err)
	}
	f, err := c.Read()
	if err != nil || f.Type != wire.FrameHello {
		n.t.Fatalf("%s: %v, %v, want Hello", r.Name, f.Type, err)
	}
	h, err := wire.DecodeHello(f.Payload)
	if err != nil || h.Replica != r.Name || h.PID != r.PID {
		n.t.Fatalf("%s of process %d says hello as %+v, %v", r.Name, r.PID, h, err)
	}
	b := wire.Batch{Calls: []wire.Call{{Input: tensor.Input{{Items: tensor.Activation{{Bytes: []byte("x")}}}}}}}
	for _, f := range []wire.Frame{
		{Type: wire.FrameWelcome, Payload: wire.Welcome{Version: 1}.Append(nil)},
		{Type: wire.FrameBatch, Batch: 1, Payload: b.Append(nil)},
	} {
		if err := c.Write(f); err != nil {
			n.t.Fatal(err)
		}
	}
	if f, err = c.Read(); err != nil || f.Type != wire.FrameResult {
		n.t.Fatalf("%s answers %v %q, %v", r.Name, f.Type, f.Payload, err)
	}
}

func (n *node) exit() Exit {
	n.t.Helper()
	select {
	case e := <-n.exits:
		return e
	case <-time.After(20 * time.Second):
		n.t.Fatal("no exit was reported")
		return Exit{}
	}
}

func (n *node) zygotePID() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.Manager.mu.Lock()
	defer n.Manager.mu.Unlock()
	for _, s := range n.slots.Values() {
		if s.zygote != nil {
			return s.zygote.cmd.Process.Pid
		}
	}
	return 0
}

func TestReplicasForkFromOneZygote(t *testing.T) {
	n := newNode(t, nil)
	first := n.start("a", withModel)
	second := n.start("b", withModel)
	if first.Path != "cold" || second.Path != "fork" {
		t.Errorf("paths %s and %s, want cold and fork", first.Path, second.Path)
	}
	n.answers(first)
	n.answers(second)
	inv := n.Inventory()
	if len(inv.Zygotes) != 1 || inv.Zygotes[0].Replicas != 2 || inv.Zygotes[0].Bytes < 1<<20 || inv.Zygotes[0].Function != "f.ns" {
		t.Errorf("inventory %+v", inv)
	}
	if _, err := n.Start(t.Context(), Order{Replica: "a", Spec: withModel}); err == nil || !strings.Contains(err.Error(), "runs already") {
		t.Errorf("a second replica a: %v", err)
	}
	if hits := testutil.ToFloat64(n.metrics.lookups.WithLabelValues("hit")); hits != 1 {
		t.Errorf("%v hits, want 1", hits)
	}
}

func TestTwentyStartsAtOnceLoadOnce(t *testing.T) {
	n := newNode(t, nil)
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			r, err := n.Start(t.Context(), Order{Replica: fmt.Sprint("r", i), Spec: withModel})
			if err != nil {
				t.Error(err)
				return
			}
			defer r.Conn.Close()
			n.answers(r)
		})
	}
	wg.Wait()
	if inv := n.Inventory(); len(inv.Zygotes) != 1 {
		t.Errorf("%d zygotes, want 1", len(inv.Zygotes))
	}
}

func TestWithoutModelAProcess(t *testing.T) {
	n := newNode(t, nil)
	s := withModel
	s.Env = map[string]string{"wait_mean": "1ms"}
	r := n.start("p", s)
	n.answers(r)
	if r.Path != "process" || len(n.Inventory().Zygotes) != 0 {
		t.Errorf("path %s, zygotes %+v", r.Path, n.Inventory().Zygotes)
	}
	if err := n.Stop(t.Context(), "p", time.Minute); err != nil {
		t.Fatal(err)
	}
	if e := n.exit(); e.Replica != "p" || e.Cause != "exited" {
		t.Errorf("exit %+v, want exited", e)
	}
	if err := n.Stop(t.Context(), "p", time.Minute); err != nil {
		t.Errorf("stopping what has ended: %v", err)
	}
}

func TestEndsAreReportedWithTheirCause(t *testing.T) {
	n := newNode(t, nil)
	for name, s := range map[string]Spec{"forked": withModel, "spawned": {Function: "g.ns", Image: "test/wait:1"}} {
		r := n.start(name, s)
		n.answers(r)
		if err := syscall.Kill(r.PID, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if e := n.exit(); e.Replica != name || e.PID != r.PID || e.Function != s.Function || e.Cause != "killed by SIGKILL" {
			t.Errorf("exit %+v", e)
		}
	}
	bad := withModel
	bad.Env = maps.Clone(bad.Env)
	bad.Env["wait_mean"] = "soon"
	r := n.start("bad", bad)
	if e := n.exit(); e.Replica != "bad" || !strings.HasPrefix(e.Cause, "exit status 1: ") || !strings.Contains(e.Cause, `wait_mean="soon"`) {
		t.Errorf("exit of %d: %+v", r.PID, e)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if !slices.ContainsFunc(n.lines["bad"], func(l string) bool { return strings.Contains(l, "wait_mean") }) {
		t.Errorf("lines of the replica: %q", n.lines["bad"])
	}
}

func TestADeadZygoteTakesItsReplicasAndComesBack(t *testing.T) {
	n := newNode(t, nil)
	a, b := n.start("a", withModel), n.start("b", withModel)
	n.answers(a)
	if err := syscall.Kill(n.zygotePID(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	lost := []string{n.exit().Replica, n.exit().Replica}
	slices.Sort(lost)
	if !slices.Equal(lost, []string{"a", "b"}) {
		t.Errorf("lost %v, want a and b", lost)
	}
	var r *Replica
	refused := ""
	proctest.Until(t, 20*time.Second, "the zygote to be loaded again", func() bool {
		var err error
		if r, err = n.Start(t.Context(), Order{Replica: "c", Spec: withModel}); err != nil {
			refused = err.Error()
		}
		return err == nil
	})
	defer r.Conn.Close()
	if !strings.Contains(refused, "failed 1 times in a row") || !strings.Contains(refused, "SIGKILL") {
		t.Errorf("during the back-off: %q", refused)
	}
	proctest.Gone(t, a.PID)
	proctest.Gone(t, b.PID)
	n.answers(r)
}

func TestLoadingThatFailsSaysWhy(t *testing.T) {
	n := newNode(t, nil)
	for want, change := range map[string]func(*Spec){
		"nosuch.onnx": func(s *Spec) { s.Env["STAGECOACH_MODEL"] = "nosuch.onnx" },
		"no folder":   func(s *Spec) { s.Image = "test/nosuch:1" },
		"repository":  func(s *Spec) { s.Image = "../../etc" },
		"nosuchstage": func(s *Spec) { s.Process = "./nosuchstage" },
	} {
		s := withModel
		s.Env = maps.Clone(s.Env)
		change(&s)
		if _, err := n.Start(t.Context(), Order{Replica: "x", Spec: s}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
}

func TestARedeployRetiresTheOldZygote(t *testing.T) {
	n := newNode(t, nil)
	n.answers(n.start("old", withModel))
	next := withModel
	next.Image = "test/wait:2"
	n.answers(n.start("new", next))
	if z := n.Inventory().Zygotes; len(z) != 2 {
		t.Fatalf("%d zygotes while a replica of the old one runs, want 2", len(z))
	}
	if err := n.Stop(t.Context(), "old", time.Second); err != nil {
		t.Fatal(err)
	}
	proctest.Until(t, 10*time.Second, "the old zygote to end", func() bool { return len(n.Inventory().Zygotes) == 1 })
	if z := n.Inventory().Zygotes[0]; z.Replicas != 1 {
		t.Errorf("what is left: %+v", z)
	}
}

func TestNamespacesShareNoZygote(t *testing.T) {
	n := newNode(t, nil)
	other := withModel
	other.Namespace, other.Function = "other", "f.other"
	n.start("a", withModel)
	n.start("b", other)
	if z := n.Inventory().Zygotes; len(z) != 2 {
		t.Errorf("%d zygotes for two namespaces, want 2", len(z))
	}
}

func TestIdleZygotesGoWhenMemoryIsShort(t *testing.T) {
	n := newNode(t, func(c *Config) { c.Memory = 1 }) // everything is too much
	n.start("a", withModel)
	if z := n.Inventory().Zygotes; len(z) != 1 {
		t.Fatalf("a zygote with a replica was evicted: %+v", z)
	}
	if err := n.Stop(t.Context(), "a", time.Second); err != nil {
		t.Fatal(err)
	}
	proctest.Until(t, 10*time.Second, "the idle zygote to be evicted", func() bool { return len(n.Inventory().Zygotes) == 0 })
}

func TestWarmLoadsAhead(t *testing.T) {
	n := newNode(t, nil)
	if err := n.Warm(t.Context(), []Wanted{{Spec: withModel, Key: true}}); err != nil {
		t.Fatal(err)
	}
	if r := n.start("a", withModel); r.Path != "fork" {
		t.Errorf("path %s, want fork", r.Path)
	}
}

func TestCloseLeavesNothingBehind(t *testing.T) {
	n := newNode(t, nil)
	forked := n.start("a", withModel)
	spawned := n.start("b", Spec{Function: "g.ns", Image: "test/wait:1"})
	z := n.zygotePID()
	n.Close()
	for _, pid := range []int{forked.PID, spawned.PID, z} {
		proctest.Gone(t, pid)
	}
	if _, err := n.Start(t.Context(), Order{Replica: "c", Spec: withModel}); err == nil {
		t.Error("a closed manager starts")
	}
}

func TestEvict(t *testing.T) {
	k := func(s string) zygoteKey { return zygoteKey{digest: s} }
	all := []cached{
		{k("old key"), 40, false, true}, {k("busy"), 40, true, false}, {k("older"), 10, false, false}, {k("newer"), 30, false, false},
	}
	for limit, want := range map[int64][]string{
		120: nil,
		119: {"older"},
		110: {"older"},
		109: {"older", "newer"},
		79:  {"older", "newer", "old key"},
		0:   {"older", "newer", "old key"}, // what is busy stays
	} {
		var got []string
		for _, e := range evict(all, limit) {
			got = append(got, e.digest)
		}
		if !slices.Equal(got, want) {
			t.Errorf("limit %d: evicted %q, want %q", limit, got, want)
		}
	}
}

func TestBackoff(t *testing.T) {
	for n, want := range map[int]time.Duration{0: 0, 1: 500 * time.Millisecond, 3: 2 * time.Second, 100: 30 * time.Second} {
		if got := backoff(n); got != want {
			t.Errorf("backoff(%d) = %v, want %v", n, got, want)
		}
	}
}
