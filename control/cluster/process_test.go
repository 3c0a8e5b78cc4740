package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/control"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/dispatch"
	"github.com/stagecoach-serving/stagecoach/request/queue"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// TestMain makes the test binary a stage when it is started as one.
func TestMain(m *testing.M) {
	if os.Getenv(wire.EnvStageFD) != "" {
		stage.Main(stage.Hooks{Infer: stage.Each(func(c *stage.Call) (tensor.Activation, error) {
			in := c.Items()
			for i := range in {
				in[i].Bytes = bytes.ToUpper(in[i].Bytes)
			}
			return in, nil
		})})
	}
	goleak.VerifyTestMain(m)
}

// processNode is a Node that starts this test binary as replicas.
type processNode struct {
	lost func(replica, cause string)

	mu      sync.Mutex
	running map[string]*process
}

type process struct {
	cmd   *exec.Cmd
	ended chan struct{}
}

func (n *processNode) Start(_ context.Context, o node.Order, _ func(node.Phase)) (node.Started, error) {
	if o.Spec.Image != "stage" {
		return node.Started{}, fmt.Errorf("image %q: not there", o.Spec.Image)
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return node.Started{}, err
	}
	near, far := os.NewFile(uintptr(fds[0]), "near"), os.NewFile(uintptr(fds[1]), "far")
	defer near.Close()
	defer far.Close()
	conn, err := wire.OpenSocket(near)
	if err != nil {
		return node.Started{}, err
	}
	p := &process{exec.Command(os.Args[0]), make(chan struct{})}
	p.cmd.Env = append(os.Environ(), wire.EnvStageFD+"=3", wire.EnvFunction+"="+o.Spec.Function, wire.EnvReplica+"="+o.Replica)
	p.cmd.ExtraFiles = []*os.File{far}
	if err := p.cmd.Start(); err != nil {
		_ = conn.Close()
		return node.Started{}, err
	}
	n.mu.Lock()
	n.running[o.Replica] = p
	n.mu.Unlock()
	go func() {
		_ = p.cmd.Wait() // the state says how it ended
		n.lost(o.Replica, p.cmd.ProcessState.String())
		close(p.ended)
	}()
	return node.Started{PID: p.cmd.Process.Pid, Conn: conn, Path: "cold"}, nil
}

func (n *processNode) Stop(ctx context.Context, replica string, grace time.Duration) error {
	n.mu.Lock()
	p := n.running[replica]
	delete(n.running, replica)
	n.mu.Unlock()
	if p == nil {
		return nil
	}
	_ = p.cmd.Process.Signal(unix.SIGTERM) // it may have ended
	force := time.AfterFunc(grace, func() { _ = p.cmd.Process.Kill() })
	defer force.Stop()
	select {
	case <-p.ended:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (n *processNode) Warm(context.Context, []node.Wanted) error { return nil }
func (n *processNode) SetCPU(context.Context, string, int) error { return errors.ErrUnsupported }
func (n *processNode) Inventory() plan.Node                      { return plan.Node{Name: "a", Memory: 1 << 30} }

// kill ends one of the running processes and returns its name.
func (n *processNode) kill(t *testing.T) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	for name, p := range n.running {
		if err := p.cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		return name
	}
	t.Fatal("nothing runs")
	return ""
}

type deployed []FunctionSpec

func (d deployed) Functions() []FunctionSpec      { return d }
func (d deployed) Pipelines() []pipeline.Pipeline { return nil }

func (d deployed) Has(function pipeline.Key) bool {
	return slices.ContainsFunc(d.Functions(), func(f FunctionSpec) bool { return f.Key == function })
}

const patience = time.Minute

// TestRealPartsWakeAnswerAndSleep uses real processes, NATS, the dispatcher and the control loop:
// wake, answer, survive a kill, sleep.
func TestRealPartsWakeAnswerAndSleep(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	server, err := queue.StartServer(queue.ServerConfig{Dir: t.TempDir(), Log: log})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	nc, err := server.Connect("test")
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	bus := queue.NewBus(nc)
	store, err := tensor.OpenDir(t.TempDir(), 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	var l *Local
	var loop *control.Loop
	changed := make(chan struct{}, 1)
	shell, err := dispatch.New(dispatch.Config{
		Bus: bus, Store: store, Logger: log, Registerer: prometheus.NewRegistry(),
		OnDemand:    func(pipeline.Key) { loop.Poke() },
		FirstAnswer: func(f dispatch.First) { l.Answered(f.Replica, f.After, f.Call) },
		Dropped:     func(_ pipeline.Key, replica string, death task.Death) { l.Lost(replica, death) },
	})
	if err != nil {
		t.Fatal(err)
	}
	defer shell.Close()
	asleep := pipeline.Scale{Max: 2, Zero: true, ZeroAge: 3 * time.Second}
	specs := deployed{
		spec("bad", 1),
		spec("f", 1),
	}
	for i, image := range []string{"no stage", "stage"} {
		specs[i].declare(asleep)
		specs[i].Spec.Image = image
	}
	host := &processNode{lost: func(replica, cause string) { l.Lost(replica, task.Death{Cause: cause}) }, running: map[string]*process{}}
	l, err = New(Config{
		Functions: specs, Lines: shell, Replicas: shell, Nodes: []Node{host}, Epoch: 1, Log: log, Metrics: prometheus.NewRegistry(),
		Changed: func() {
			loop.Poke()
			select {
			case changed <- struct{}{}:
			default:
			}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	if loop, err = control.New(l, l, control.Config{Tick: 100 * time.Millisecond}, log, prometheus.NewRegistry()); err != nil {
		t.Fatal(err)
	}
	for _, s := range specs {
		if err := shell.Ensure(dispatch.Spec{Function: s.Key, Revision: s.Revision, MaxReplicas: 2}); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- loop.Run(ctx) }()
	defer func() {
		cancel()
		<-ended
		if err := l.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}()

	replies := make(chan *task.Reply, 10)
	inbox, stop, err := bus.Inbox(func(msg []byte) {
		if r, err := wire.DecodeReply(msg); err == nil {
			replies <- r
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	submit := func(function, id string) {
		t.Helper()
		in := &task.Task{
			Key: task.Key{Request: id, Task: 1, Attempt: 1}, Function: function, ReplyTo: inbox,
			Input: tensor.Input{{Items: tensor.Activation{{ContentType: "text/plain", Bytes: []byte(id)}}}},
		}
		if err := bus.Submit(function, wire.AppendTask(nil, in)); err != nil {
			t.Fatal(err)
		}
	}
	answered := func(want string) *task.Reply {
		t.Helper()
		select {
		case r := <-replies:
			if r.Code != task.OK || len(r.Output) != 1 || string(r.Output[0].Bytes) != want {
				t.Fatalf("reply %+v, want %q", r, want)
			}
			return r
		case <-time.After(patience):
			t.Fatalf("no reply, want %q; timeline %+v", want, l.Events(pipeline.ParseKey("f.ns")))
			return nil
		}
	}
	until := func(what string, ok func() bool) {
		t.Helper()
		for deadline := time.After(patience); !ok(); {
			select {
			case <-changed:
			case <-deadline:
				t.Fatalf("not %s: %+v; timeline %+v", what, l.Replicas(pipeline.ParseKey("f.ns")), l.Events(pipeline.ParseKey("f.ns")))
			}
		}
	}

	submit("f.ns", "wake")
	first := answered("WAKE").Replica
	if killed := host.kill(t); killed != first {
		t.Errorf("killed %q, but %q had answered", killed, first)
	}
	until("lost", func() bool {
		return strings.Contains(fmt.Sprint(l.Events(pipeline.ParseKey("f.ns"))), string(Lost)+"  [] signal: killed")
	})
	// The line learns of it a moment later. Until then, a task sent there would be tried again by
	// its coordinator.
	proctest.Until(t, "the line without its replica", func() bool { return shell.Load(pipeline.ParseKey("f.ns")).Servers == 0 })
	submit("f.ns", "again")
	if second := answered("AGAIN").Replica; second == first {
		t.Errorf("%q answered after it was killed", second)
	}
	until("asleep", func() bool { return len(l.Replicas(pipeline.ParseKey("f.ns"))) == 0 })
	submit("f.ns", "up")
	answered("UP")

	submit("bad.ns", "waits in vain")
	select {
	case r := <-replies:
		if r.Code != task.Unavailable || !strings.HasPrefix(r.Message, `function "bad.ns": no replica starts, 3 failed in a row`) ||
			!strings.Contains(r.Message, `image "no stage": not there`) {
			t.Errorf("reply %+v, want unavailable with the cause", r)
		}
	case <-time.After(patience):
		t.Error("no reply, want the cause")
	}
	seen := map[Kind]bool{}
	for _, e := range l.Events(pipeline.ParseKey("f.ns")) {
		seen[e.Kind] = true
	}
	for _, k := range []Kind{Ordered, Process, Ready, Answered, Draining, Stopped, Lost} {
		if !seen[k] {
			t.Errorf("no event %q in %+v", k, l.Events(pipeline.ParseKey("f.ns")))
		}
	}
}
