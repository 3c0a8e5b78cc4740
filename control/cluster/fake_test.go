package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// world is a fake of everything that a Local uses: specs, lines, dispatcher, and one or two nodes.
// Its mutex guards all of it.
type world struct {
	t testing.TB
	l *Local

	mu        sync.Mutex
	specs     []FunctionSpec
	pipelines []pipeline.Pipeline
	waiting   map[string]int
	last      map[string]time.Time
	signals   map[string]plan.Signals // without the two fields before
	usage     map[string]float64      // thousandths of a core
	measured  [][]pipeline.Key        // functions whose usage was requested
	// causes with which waiting tasks failed.
	failed   []string
	attached map[string]bool                              // attached replicas
	released []string                                     // left to the next owner
	lost     map[string]string                            // causes reported to the dispatcher
	busy     map[string]bool                              // replicas that have calls
	ends     map[string]task.End                          // reported to the dispatcher
	attach   func(ctx context.Context, name string) error // nil: at once
	drain    func(ctx context.Context, name string) error // nil: at once
	due      time.Time                                    // of all replicas
	// Revisions and causes passed to NoReplica.
	none     []string
	apart    time.Time                                     // latest argument of PauseMeasuring
	changed  int                                           // number of calls
	zygotes  []plan.Zygote                                 // of each node
	warmed   [][]node.Wanted                               // all warm lists, in order
	warm     func(ctx context.Context, n *fakeNode) error  // nil: at once
	start    func(ctx context.Context, o node.Order) error // nil: at once
	stop     func(ctx context.Context, replica string) error
	ids      int
	registry *prometheus.Registry
	nodes    map[string]*fakeNode
	events   []Event // all events, in order
	// plans that the lines follow, with the replicas that were wanted at that time
	published []string
	threads   map[string]int
	cpu       map[string]int             // by replica
	setCPU    func(replica string) error // nil: done
}

// fakeNode is a Node that only stores the names of its replicas.
type fakeNode struct {
	leaves  string // why it is leaving; empty: it is not
	patient bool
	w       *world
	name    string
	running map[string]bool
	starts  int
	devices []plan.Device
}

func (n *fakeNode) Start(ctx context.Context, o node.Order, _ func(node.Phase)) (node.Started, error) {
	n.w.mu.Lock()
	n.starts++
	start := n.w.start
	n.w.mu.Unlock()
	if start != nil {
		if err := start(ctx, o); err != nil {
			return node.Started{}, err
		}
	}
	n.w.mu.Lock()
	defer n.w.mu.Unlock()
	if n.running[o.Replica] {
		n.w.t.Errorf("replica %q started twice", o.Replica)
	}
	n.running[o.Replica] = true
	return node.Started{PID: n.starts, Conn: wire.NewSocket(new(net.UnixConn)), Path: "fork", Phases: []node.Phase{{Name: "fork", Took: time.Millisecond}}}, nil
}

func (n *fakeNode) Stop(ctx context.Context, replica string, _ time.Duration) error {
	n.w.mu.Lock()
	stop := n.w.stop
	n.w.mu.Unlock()
	if stop != nil {
		if err := stop(ctx, replica); err != nil {
			return err
		}
	}
	n.w.mu.Lock()
	defer n.w.mu.Unlock()
	if n.w.attached[replica] {
		n.w.t.Errorf("replica %q stopped while it has work", replica)
	}
	delete(n.running, replica)
	return nil
}

func (n *fakeNode) Warm(ctx context.Context, list []node.Wanted) error {
	n.w.mu.Lock()
	n.w.warmed = append(n.w.warmed, list)
	warm := n.w.warm
	n.w.mu.Unlock()
	if warm != nil {
		return warm(ctx, n)
	}
	return nil
}

func (n *fakeNode) SetCPU(_ context.Context, replica string, milli int) error {
	n.w.mu.Lock()
	defer n.w.mu.Unlock()
	if n.w.setCPU != nil {
		if err := n.w.setCPU(replica); err != nil {
			return err
		}
	}
	n.w.cpu[replica] = milli
	return nil
}

func (n *fakeNode) Inventory() plan.Node {
	n.w.mu.Lock()
	defer n.w.mu.Unlock()
	out := plan.Node{Name: n.name, Memory: 1 << 30, Devices: n.devices, Zygotes: n.w.zygotes}
	if n.leaves != "" {
		out.Unavailable, out.Leaving, out.Moving = n.leaves, true, n.patient
	}
	return out
}

func (w *world) Functions() []FunctionSpec {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.specs)
}

func (w *world) Has(function pipeline.Key) bool {
	return slices.ContainsFunc(w.Functions(), func(f FunctionSpec) bool { return f.Key == function })
}

func (w *world) Pipelines() []pipeline.Pipeline {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.pipelines
}

func (w *world) Signals(key pipeline.Key, _ time.Time) plan.Signals {
	w.mu.Lock()
	defer w.mu.Unlock()
	function := key.String()
	is := w.signals[function]
	is.Demand.Last, is.Waiting = w.last[function], is.Waiting+w.waiting[function]
	return is
}

// Publish implements Lines. It notes which replicas are wanted at this moment.
func (w *world) Publish(p *plan.Plan) {
	w.l.mu.Lock()
	var wanted []string
	for _, r := range w.l.sorted() {
		if !r.released {
			wanted = append(wanted, r.name)
		}
	}
	w.l.mu.Unlock()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.published = append(w.published, fmt.Sprintf("plan %d with %q", p.Rev, wanted))
}

func (w *world) PauseMeasuring(_ pipeline.Key, until time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.apart = until
}

func (w *world) Fail(function pipeline.Key, _ uint64, cause string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.failed = append(w.failed, cause)
	w.waiting[function.String()] = 0
}

func (w *world) Attach(ctx context.Context, _ pipeline.Key, replica string, _ uint64, conn wire.Socket) (wire.Hello, error) {
	w.mu.Lock()
	attach := w.attach
	w.mu.Unlock()
	if attach != nil {
		if err := attach(ctx, replica); err != nil {
			return wire.Hello{}, err
		}
	}
	if conn == nil {
		return wire.Hello{}, errors.New("no connection")
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.attached[replica] = true
	return wire.Hello{Slots: 2, MaxBatch: 8}, nil
}

func (w *world) Drain(ctx context.Context, _ pipeline.Key, replica string) error {
	w.mu.Lock()
	drain := w.drain
	w.mu.Unlock()
	if drain != nil {
		if err := drain(ctx, replica); err != nil {
			return err
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.attached, replica)
	return nil
}

func (w *world) Release(_ context.Context, _ pipeline.Key, replica string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.attached, replica)
	w.released = append(w.released, replica)
	return nil
}

func (w *world) Due(pipeline.Key, string) time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.due
}

func (w *world) NoReplica(_ pipeline.Key, revision uint64, cause string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.none = append(w.none, fmt.Sprintf("%d: %s", revision, cause))
}

func (w *world) Lost(_ pipeline.Key, replica string, death task.Death) (busy bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.attached, replica)
	w.lost[replica] = death.Cause
	w.ends[replica] = death.End
	return w.busy[replica]
}

func (w *world) Threads(_ pipeline.Key, replica string, n int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.attached[replica] {
		return errors.New("not attached")
	}
	w.threads[replica] = n
	return nil
}

// spec returns a function of namespace ns. Its image is its revision.
func spec(name string, revision uint64) FunctionSpec {
	key := pipeline.ParseKey(name + ".ns")
	s := FunctionSpec{Key: key, Spec: node.Spec{Function: key.String(), Namespace: "ns", Image: strconv.FormatUint(revision, 10)}}
	s.declare(pipeline.Scale{Min: 1, Max: 10, ZeroAge: time.Minute})
	s.Revision = revision
	return s
}

// declare replaces what s declares by a scale.
func (s *FunctionSpec) declare(scale pipeline.Scale) {
	revision := s.Revision
	s.Function = plan.Declared(pipeline.Function{Name: s.Key.Name, Namespace: s.Key.Namespace, Scale: scale})
	s.Revision = revision
}

// revisionOf returns the revision of the function that an order is for.
func revisionOf(o node.Order) int {
	n, err := strconv.Atoi(o.Spec.Image)
	if err != nil {
		panic(err) // of a spec that is not from spec
	}
	return n
}

// bubble runs f in a synctest bubble with a Local over a world with node a and function f.ns, and
// closes the Local.
func bubble(t *testing.T, f func(t *testing.T, w *world, l *Local)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w, l := newWorld(t, "a")
		f(t, w, l)
		w.mu.Lock()
		w.attach, w.drain, w.start, w.stop, w.warm = nil, nil, nil, nil, nil
		w.mu.Unlock()
		if err := l.Close(t.Context()); err != nil {
			t.Error(err)
		}
		for name, n := range l.nodes {
			if n := n.hands.(*fakeNode); len(n.running) > 0 {
				t.Errorf("node %q still runs %v after Close", name, n.running)
			}
		}
		if len(w.attached) > 0 {
			t.Errorf("%v still have work after Close", w.attached)
		}
	})
}

func newWorld(t testing.TB, nodes ...string) (*world, *Local) {
	t.Helper()
	w := &world{
		t: t, specs: []FunctionSpec{spec("f", 1)}, waiting: map[string]int{}, last: map[string]time.Time{},
		attached: map[string]bool{}, lost: map[string]string{}, busy: map[string]bool{}, ends: map[string]task.End{}, threads: map[string]int{}, cpu: map[string]int{}, nodes: map[string]*fakeNode{},
	}
	w.registry = prometheus.NewRegistry()
	cfg := Config{
		Chance:    func() float64 { return 0 },
		Functions: w, Lines: w, Replicas: w, Epoch: 1, Log: slog.New(slog.DiscardHandler), Metrics: w.registry,
		NewID: func() string { w.ids++; return fmt.Sprintf("%05d", w.ids) },
		Event: func(e Event) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.events = append(w.events, e)
		},
		CPU: func(functions []pipeline.Key) map[pipeline.Key]float64 {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.measured = append(w.measured, functions)
			used := map[pipeline.Key]float64{}
			for function, milli := range w.usage {
				used[pipeline.ParseKey(function)] = milli
			}
			return used
		},
		Changed: func() {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.changed++
		},
	}
	for _, n := range nodes {
		cfg.Nodes = append(cfg.Nodes, w.node(n))
	}
	l, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	w.l = l
	return w, l
}

// want applies a plan with n replicas of f.ns on node a, which keeps existing ones.
func (w *world) want(n int) plan.Plan {
	w.t.Helper()
	p, s := w.plan(n)
	if err := p.Validate(s); err != nil {
		w.t.Fatal(err)
	}
	if err := w.l.Apply(w.t.Context(), p); err != nil {
		w.t.Fatal(err)
	}
	synctest.Wait()
	return p
}

func (w *world) plan(n int) (plan.Plan, plan.Snapshot) {
	w.t.Helper()
	s, err := w.l.Observe(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	p := plan.Plan{Epoch: s.Epoch, Rev: s.Rev, At: s.At}
	for _, f := range s.Functions {
		want := plan.Want{Function: f.Name, Revision: f.Revision, Why: fmt.Sprintf("want %d", n), Short: "maybe"}
		for _, r := range f.Replicas {
			if r.State != plan.Draining && r.Revision == f.Revision && len(want.Slots) < n {
				want.Slots = append(want.Slots, plan.Slot{Replica: r.Name, Node: r.Node, Device: r.Device})
			}
		}
		for len(want.Slots) < n {
			want.Slots = append(want.Slots, plan.Slot{Node: "a"})
		}
		if len(want.Slots) > 0 {
			want.Short = ""
		}
		p.Wants = append(p.Wants, want)
	}
	return p, s
}

// told returns all events so far.
func (w *world) told() []Event {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.events)
}

// states writes the replicas of f.ns as "name state".
func (w *world) states() string {
	var out []string
	for _, r := range w.l.Replicas(pipeline.ParseKey("f.ns")) {
		out = append(out, r.Name+" "+r.State.String())
	}
	return strings.Join(out, ", ")
}

// kinds writes the timeline of f.ns as "name kind".
func (w *world) kinds() string {
	var out []string
	for _, e := range w.l.Events(pipeline.ParseKey("f.ns")) {
		out = append(out, e.Replica+" "+string(e.Kind))
	}
	return strings.Join(out, ", ")
}

func (w *world) set(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
}

func (w *world) expect(what, got, want string) {
	w.t.Helper()
	if got != want {
		w.t.Errorf("%s: %q, want %q", what, got, want)
	}
}
