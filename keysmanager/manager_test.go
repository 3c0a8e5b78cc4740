package keysmanager

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == actAs {
		act(os.Args[2], os.Args[3:])
		return
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if built.dir != "" {
			_ = os.RemoveAll(built.dir) // a temporary folder
		}
		os.Exit(code)
	}))
}

// node is a Manager with real images.
type rig struct {
	*Manager
	t        *testing.T
	registry *prometheus.Registry
	exits    chan Exit
	printing sync.Mutex
	lines    map[string][]string // by replica; guarded by printing
}

var built struct {
	once sync.Once
	dir  string
	err  error
}

// scripts are programs that functions without a model can name as their process.
var scripts = map[string]string{
	"talk":       "echo out of $STAGECOACH_REPLICA; echo err of $STAGECOACH_REPLICA >&2; exit 3\n",
	"stubborn":   "trap '' TERM; echo ready; while :; do sleep 600; done\n",
	"litter":     "sleep 600 & echo $!; exit 0\n",
	"unpackable": "if [ -n \"$STAGECOACH_PACK\" ]; then echo it does not pack >&2; exit 9; fi; exec ./stage\n",
	"packs":      "mkdir $STAGECOACH_PREPACKED/model.onnx.ort-1.prepacked.$$; exec sleep 600\n",
	"packs-some": "mkdir $STAGECOACH_PREPACKED/model.onnx.ort-1.prepacked.$$; kill -9 $$\n",
	"chatty":     "echo ready; until [ -e $FILES/go ]; do sleep 0.02; done; head -c 200000 /dev/zero | tr '\\0' x; echo; : >$FILES/done; until [ -e $FILES/on ]; do sleep 0.02; done; echo after; sleep 600\n",
}

// images builds the image test/wait:1 once: the function wait, with the recogniser's parameters.
func images(t *testing.T) sandbox.Images {
	t.Helper()
	model := proctest.Built(t, "models", "ocr", "rec.onnx")
	built.once.Do(func() {
		built.dir, built.err = os.MkdirTemp("", "stagecoach-images-") //nolint:usetesting // shared
		if built.err != nil {
			return
		}
		stage := filepath.Join(built.dir, "stage")
		if out, err := exec.Command("go", "build", "-o", stage, "../functions/wait").CombinedOutput(); err != nil {
			built.err = fmt.Errorf("%w: %s", err, out)
			return
		}
		for _, tag := range []string{"1", "2"} {
			dir := filepath.Join(built.dir, "test", "wait", tag)
			built.err = errors.Join(
				os.MkdirAll(dir, 0o755),
				os.Link(stage, filepath.Join(dir, "stage")),
				proctest.Copy(model, filepath.Join(dir, "model.onnx")),
				os.WriteFile(filepath.Join(dir, "only-in-"+tag), nil, 0o644),
			)
			for name, text := range scripts {
				built.err = errors.Join(built.err, os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+text), 0o755))
			}
			if built.err != nil {
				return
			}
		}
	})
	if built.err != nil {
		t.Fatal(built.err)
	}
	return sandbox.Images{Dir: built.dir}
}

func newNode(t *testing.T, change func(*Config)) *rig {
	t.Helper()
	n := &rig{t: t, exits: make(chan Exit, 100), lines: map[string][]string{}, registry: prometheus.NewRegistry()}
	cfg := Config{
		Node: "n1", Images: images(t), ORT: proctest.Built(t, "ort", "libonnxruntime.so.1"), Threads: 1,
		OnExit: func(e Exit) { n.exits <- e },
		Output: func(_, replica, stream, line string) {
			n.printing.Lock()
			defer n.printing.Unlock()
			n.lines[replica] = append(n.lines[replica], stream+": "+line)
		},
		Log: slog.New(slog.DiscardHandler), Metrics: n.registry,
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

var withModel = node.Spec{Function: "f.ns", Namespace: "ns", Image: "test/wait:1", Env: map[string]string{"STAGECOACH_MODEL": "model.onnx", "wait_mean": "1ms"}}

// startedReplica is a replica that a test has started.
type startedReplica struct {
	Name string
	node.Started
}

// Start starts a replica without watching its phases.
func (n *rig) Start(ctx context.Context, o node.Order) (*startedReplica, error) {
	started, err := n.Manager.Start(ctx, o, nil)
	return &startedReplica{o.Replica, started}, err
}

func (n *rig) start(replica string, s node.Spec) *startedReplica {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), time.Minute)
	defer cancel()
	r, err := n.Start(ctx, node.Order{Replica: replica, Spec: s})
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { _ = r.Conn.Close() })
	return r
}

// answers makes the replica answer one call.
func (n *rig) answers(r *startedReplica) {
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

func (n *rig) exit() Exit {
	n.t.Helper()
	select {
	case e := <-n.exits:
		return e
	case <-time.After(time.Minute):
		n.t.Fatal("no exit was reported")
		return Exit{}
	}
}

// printed waits until a replica has printed a line on stdout and returns the first.
func (n *rig) printed(replica string) string {
	n.t.Helper()
	line := ""
	proctest.Until(n.t, replica+" to print a line", func() bool {
		n.printing.Lock()
		defer n.printing.Unlock()
		for _, l := range n.lines[replica] {
			if rest, ok := strings.CutPrefix(l, "stdout: "); ok && line == "" {
				line = rest
			}
		}
		return line != ""
	})
	return line
}

// zygote waits until there is one zygote and returns its process.
func (n *rig) zygote() int {
	n.t.Helper()
	var all []ZygoteInfo
	proctest.Until(n.t, "one zygote", func() bool { all = n.Inventory().Zygotes; return len(all) == 1 && all[0].State == Ready })
	return all[0].PID
}

// spare waits until a zygote has a spare child, and returns its process.
func (n *rig) spare(of int) (pid int) {
	n.t.Helper()
	proctest.Until(n.t, "a spare child", func() bool {
		n.store.mu.Lock()
		defer n.store.mu.Unlock()
		for _, s := range n.store.slots.Values() {
			if z := s.zygote; z != nil && z.PID == of {
				pid = z.Family.Waiting()[""].PID
			}
		}
		return pid != 0
	})
	return pid
}

// phase returns how long a part of a start took, or 0 if the start has no such part.
func phase(r *startedReplica, name string) time.Duration {
	for _, p := range r.Phases {
		if p.Name == name {
			return p.Took
		}
	}
	return 0
}

func TestReplicasForkFromOneZygote(t *testing.T) {
	n := newNode(t, nil)
	first := n.start("a", withModel)
	second := n.start("b", withModel)
	if first.Path != PathHeap || second.Path != PathHeap || phase(first, "load") == 0 || phase(second, "load") != 0 {
		t.Errorf("paths %s %v and %s %v, want both forked, and a load for the first", first.Path, first.Phases, second.Path, second.Phases)
	}
	n.answers(first)
	n.answers(second)
	inv := n.Inventory()
	if len(inv.Zygotes) != 1 || inv.Zygotes[0].Replicas != 2 || inv.Zygotes[0].Bytes < 1<<20 || inv.Zygotes[0].Function != "f.ns" {
		t.Errorf("inventory %+v", inv)
	}
	if inv.MemoryUsed < inv.Zygotes[0].Bytes || inv.Free <= 0 || inv.Threshold-inv.MemoryUsed != inv.Free || inv.Hits != 1 || inv.Misses != 1 || inv.Node != "n1" || len(inv.Failures) != 0 {
		t.Errorf("inventory %+v, want a hit and a miss", inv)
	}
	if len(inv.Replicas) != 2 || inv.Replicas[0].Name != "a" || inv.Replicas[0].Path != PathHeap || len(inv.Replicas[0].Phases) != 3 || inv.Replicas[1].PID != second.PID {
		t.Errorf("replicas %+v", inv.Replicas)
	}
	if _, err := n.Start(t.Context(), node.Order{Replica: "a", Spec: withModel}); !errors.Is(err, ErrRunning) {
		t.Errorf("a second replica a: %v, want %v", err, ErrRunning)
	}
}

func TestTwentyStartsAtOnceLoadOnce(t *testing.T) {
	n := newNode(t, nil)
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			r, err := n.Start(t.Context(), node.Order{Replica: fmt.Sprint("r", i), Spec: withModel})
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

func TestWithoutAModelThereIsNoZygote(t *testing.T) {
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
	proctest.Until(t, "the old zygote to end", func() bool { return len(n.Inventory().Zygotes) == 1 })
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

func TestCloseLeavesNothingBehind(t *testing.T) {
	n := newNode(t, nil)
	forked := n.start("a", withModel)
	spawned := n.start("b", node.Spec{Function: "g.ns", Image: "test/wait:1"})
	z := n.zygote()
	n.Close()
	for _, pid := range []int{forked.PID, spawned.PID, z} {
		proctest.Gone(t, pid)
	}
	if _, err := n.Start(t.Context(), node.Order{Replica: "c", Spec: withModel}); err == nil {
		t.Error("a closed manager starts")
	}
}
