package cluster

import (
	"cmp"
	"context"
	crand "crypto/rand"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// ErrClosed is the error of a Local that is closing.
var ErrClosed = errors.New("cluster: closed")

// Config configures a [Local].
type Config struct {
	Functions Functions
	Lines     Lines
	Replicas  Replicas
	Nodes     []Node   // initial nodes; others join
	Joining   Joining  // whether nodes may join later
	Cordons   *Cordons // nodes that take no new replicas; nil: none
	// Largest number of replicas of all functions together; 0: as many as the nodes hold.
	Budget int
	Epoch  uint64 // epoch of this owner, higher than that of any earlier owner
	// Reign returns the epoch of an owner that gets new ones, instead of Epoch; nil: it has one.
	Reign func() uint64
	// Returns the last part of a replica's name: short, random, safe in file names; nil: five
	// letters and digits.
	NewID func() string
	// CPU returns the present CPU use of each function, in thousandths of a core, as the sum over
	// its replicas. It leaves out functions that it cannot measure. It is called only for functions
	// that scale by CPU. Nil means that no function can be measured.
	CPU func(functions []pipeline.Key) map[pipeline.Key]float64
	// Expected returns, per function, how many requests are still in earlier stages of its
	// pipelines and have yet to reach it. It is called only while some function is idle. Nil means
	// that no function expects requests.
	Expected func() map[string]int
	// Called when control should tick again, because a replica became ready or ended. It must not
	// block, and may be nil.
	Changed func()
	// Gets each event of the timelines, in order. It must not block or call back, and may be nil.
	Event func(Event)
	// random number in [0, 1) for the jitter of back-offs; nil: a built-in generator.
	Chance  func() float64
	Log     *slog.Logger
	Metrics prometheus.Registerer

	StartTimeout time.Duration // of a start, including loading; 0: 60 s
	// How long a replica may take to finish its calls; 0: 30 s. If its requests' deadlines are
	// later, it may take until then.
	DrainTimeout time.Duration
	Grace        time.Duration // between SIGTERM and SIGKILL; 0: 2 s
}

// Joining says whether nodes may join a [Local].
type Joining uint8

// The values of Joining.
const (
	NoNodesJoin Joining = iota
	NodesJoin
	// Nodes that join may have replicas of an earlier owner. They take part when they have said
	// what they run.
	NodesJoinWithReplicas
)

// Local manages the replicas of functions on nodes. [New] makes one, and [Local.Close] ends it.
type Local struct {
	cfg     Config
	nodes   map[string]*member
	metrics metrics
	clock   clock
	begun   time.Time       // when New was called
	seed    maphash.Seed    // of fingerprints
	ctx     context.Context // of all replicas and nodes; canceled when the context of Close ends
	abort   context.CancelCauseFunc
	group   sync.WaitGroup

	applying sync.Mutex // held while a plan is applied; taken before mu

	mu        sync.Mutex // never held during calls to other packages, except cfg.Event
	closed    bool
	observed  uint64 // Rev of the latest Snapshot
	applied   uint64 // Rev of the latest Plan
	replicas  map[string]*replica
	past      map[string]past
	byName    []*replica // the values of replicas, sorted; nil: sorted on demand
	functions map[pipeline.Key]*function
	known     map[string]knownNode   // present nodes and recently lost ones
	targets   map[string]plan.Target // as in the latest Snapshot, by function
}

// function is what is known about a function beyond its spec.
type function struct {
	failure      failure
	parameters   parameters
	bars         bars
	slots, batch int // reported by its latest replica; 0: no replica yet
	declared     int // largest batch, as of the latest Snapshot
	timeline     timeline
	wish         *wish
	pin          *Pin
	starts       starts
	planned      planned
	least        int                // smallest number of replicas, as in the latest Snapshot
	observed     uint64             // Rev of the latest Snapshot with the function or a replica of it
	replicas     int                // in the latest Snapshot, those out of sight included
	mine, hidden []*replica         // replicas while a plan is applied: in its sight, and out of it
	deployed     *FunctionSpec      // spec while a plan is applied; nil: it is not deployed
	formers      map[uint64]*former // by revision
	asked        bool               // one of the formers may be wanted
}

// New returns a Local without replicas.
func New(cfg Config) (*Local, error) {
	cfg.StartTimeout = cmp.Or(cfg.StartTimeout, time.Minute)
	cfg.DrainTimeout = cmp.Or(cfg.DrainTimeout, 30*time.Second)
	cfg.Grace = cmp.Or(cfg.Grace, 2*time.Second)
	if cfg.Changed == nil {
		cfg.Changed = func() {}
	}
	if cfg.Event == nil {
		cfg.Event = func(Event) {}
	}
	if cfg.NewID == nil {
		cfg.NewID = func() string { return strings.ToLower(crand.Text()[:5]) }
	}
	if cfg.Chance == nil {
		cfg.Chance = rand.Float64
	}
	l := &Local{cfg: cfg, clock: newClock(time.Now()), nodes: map[string]*member{}, replicas: map[string]*replica{}, past: map[string]past{}, functions: map[pipeline.Key]*function{}, known: map[string]knownNode{}}
	if cfg.Reign == nil {
		l.cfg.Reign = func() uint64 { return cfg.Epoch }
	}
	l.begun, l.seed = l.now(), maphash.MakeSeed()
	l.metrics = newMetrics(l)
	if err := l.metrics.register(cfg.Metrics); err != nil {
		return nil, fmt.Errorf("cluster: %w", err)
	}
	l.ctx, l.abort = context.WithCancelCause(context.Background())
	for _, n := range cfg.Nodes {
		l.join(n, n.Inventory().Name, false)
	}
	return l, nil
}

// Observe returns the present state of the cluster.
func (l *Local) Observe(context.Context) (plan.Snapshot, error) {
	now := time.Now()
	s := plan.Snapshot{At: l.clock.at(now), Epoch: l.cfg.Reign(), Budget: l.cfg.Budget}
	for _, n := range l.present() {
		s.Nodes = append(s.Nodes, n.Inventory())
		l.cfg.Cordons.apply(&s.Nodes[len(s.Nodes)-1])
	}
	slices.SortFunc(s.Nodes, func(a, b plan.Node) int { return cmp.Compare(a.Name, b.Name) })
	pipelines := l.cfg.Functions.Pipelines()
	s.Pipelines = slices.Grow(s.Pipelines, len(pipelines))[:len(pipelines)]
	for i := range pipelines {
		s.Pipelines[i] = pipe(&pipelines[i])
	}
	slices.SortFunc(s.Pipelines, func(a, b plan.Pipeline) int { return cmp.Compare(a.Name, b.Name) })
	specs := l.cfg.Functions.Functions()
	s.Functions = slices.Grow(s.Functions, len(specs))[:len(specs)]
	for i := range specs {
		spec := &specs[i]
		s.Functions[i] = spec.Function
		s.Functions[i].Slots = 1 // fill sets the rest
		l.measured(&s.Functions[i], l.cfg.Lines.Signals(spec.Key, now))
	}
	sort.Sort(byName(s.Functions))
	l.expect(&s)
	targets := l.aim(&s)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return plan.Snapshot{}, ErrClosed
	}
	l.observed++
	s.Rev, l.targets = l.observed, targets
	l.remember(s.Nodes, s.At)
	l.fill(&s)
	l.forget(s.Rev)
	return s, nil
}

// byName sorts functions in place: they are large, and mostly sorted already.
type byName []plan.Function

func (f byName) Len() int           { return len(f) }
func (f byName) Less(i, j int) bool { return f[i].Name < f[j].Name }
func (f byName) Swap(i, j int)      { f[i], f[j] = f[j], f[i] }

// pipe returns the part of p that a policy needs.
func pipe(p *pipeline.Pipeline) plan.Pipeline {
	out := plan.Pipeline{Name: p.Key().String(), SLO: p.SLO, Edges: edges(p)}
	if len(p.Stages) > 0 {
		out.Stages = make([]string, len(p.Stages))
	}
	for i := range p.Stages {
		out.Stages[i] = p.Stages[i].Key().String()
		if p.Stages[i].Name == p.Entry {
			out.Chosen, out.MinAccuracy = plan.Chosen(p.Stages[i].Policies), p.Stages[i].MinAccuracy
		}
	}
	return out
}

// fill adds what l itself knows to s. Memory of starting replicas counts as used. The caller holds
// l.mu.
func (l *Local) fill(s *plan.Snapshot) {
	for _, n := range l.nodes {
		n.shown = nil
	}
	learnParameters(l.functions, s)
	for i := range s.Nodes {
		if n := l.nodes[s.Nodes[i].Name]; n != nil {
			n.shown = &s.Nodes[i]
		}
	}
	known, cpu := make([]*function, len(s.Functions)), make([]quota, len(s.Functions))
	for i := range s.Functions {
		f := &s.Functions[i]
		k := l.of(pipeline.ParseKey(f.Name))
		k.bars.follow(f.Revision)
		f.Bars = k.bars.now(s.At)
		k.parameters.follow(f.Revision)
		f.Parameters = k.parameters.bytes
		known[i], k.observed = k, s.Rev
	}
	l.place(s, known)
	find := s.Finder()
	for _, r := range l.sorted() {
		r.home.observed = s.Rev
		at, ok := find.Index(r.of)
		n := r.host.shown
		if !ok || r.hidden || n == nil {
			continue
		}
		f := &s.Functions[at]
		r.seen = cmp.Or(r.seen, s.Rev)
		f.Replicas = append(f.Replicas, plan.Replica{Name: r.name, Revision: r.spec.Revision, Node: r.node, Device: r.device, State: r.state, Since: r.since})
		cpu[at].add(r, f.CPULimit)
		if r.state == plan.Ready {
			r.home.failure.settled(r.spec.Revision, r.since, s.At)
		}
		r.unfit = n.Unfit(r.device)
		if r.state == plan.Starting && !r.adopted() {
			n.MemoryUsed += f.Memory
			promise(n, plan.Slot{Device: r.device}.Devices(), f.DeviceMemory)
		}
	}
	count := 0
	for _, k := range known {
		count += len(k.starts)
	}
	starts := make([]plan.Start, 0, count)
	for i := range s.Functions {
		f, k := &s.Functions[i], known[i]
		if len(f.Replicas) == 0 {
			f.Replicas = nil
		}
		k.failure.follow(f.Revision)
		f.Failing = k.failure.Failure
		f.Slots, f.Batch = max(k.slots, 1), max(f.Batch, 1)
		k.declared = max(f.Batch, f.AutoBatch)
		for _, most := range []int{k.batch, f.Survived} { // what the stage takes, and survives
			if most > 0 {
				f.Batch, f.AutoBatch = min(f.Batch, most), min(f.AutoBatch, most)
			}
		}
		k.grant(f, s.Rev)
		k.pinned(f, s.At)
		k.least, _ = f.Bounds()
		if n := len(starts); len(k.starts) > 0 {
			starts = append(starts, k.starts...)
			f.Starts = slices.Clip(starts[n:])
		}
		f.CPUNow = cpu[i].now
	}
}

// place makes room for the replicas of each function, in one piece of memory; l.mu is held.
func (l *Local) place(s *plan.Snapshot, known []*function) {
	for _, k := range known {
		k.replicas = 0
	}
	for _, r := range l.sorted() {
		r.home.replicas++
	}
	room := make([]plan.Replica, len(l.byName))
	for i, k := range known {
		s.Functions[i].Replicas, room = room[:0:k.replicas], room[k.replicas:]
	}
}

// promise counts bytes of n's devices as used, for a replica that has not reserved them yet. At the
// moment of the replica's start, the bytes may count twice.
func promise(n *plan.Node, devices []string, bytes int64) {
	if len(devices) == 0 {
		return
	}
	n.Devices = slices.Clone(n.Devices) // the original belongs to the node
	for i := range n.Devices {
		if d := &n.Devices[i]; slices.Contains(devices, d.ID) {
			d.MemoryUsed = min(d.MemoryUsed+plan.DeviceNeed(bytes, d.Memory), d.Memory)
		}
	}
}

// forget drops what is known of functions that were neither deployed nor had replicas in the
// Snapshot rev; l.mu is held.
func (l *Local) forget(rev uint64) {
	maps.DeleteFunc(l.functions, func(_ pipeline.Key, k *function) bool { return k.observed != rev })
}

// of returns what is known about a function, and creates the entry if necessary. The caller holds
// l.mu.
func (l *Local) of(name pipeline.Key) *function {
	f := l.functions[name]
	if f == nil {
		f = &function{}
		l.functions[name] = f
	}
	return f
}

// sorted returns the replicas by name. The slice must not be changed. The caller holds l.mu.
func (l *Local) sorted() []*replica {
	if l.byName == nil {
		l.byName = slices.SortedFunc(maps.Values(l.replicas), func(a, b *replica) int { return cmp.Compare(a.name, b.name) })
	}
	return l.byName
}

// Events returns up to 256 of a function's latest events, oldest first.
func (l *Local) Events(function pipeline.Key) []Event {
	l.mu.Lock()
	defer l.mu.Unlock()
	if f := l.functions[function]; f != nil {
		return f.timeline.list()
	}
	return nil
}

// LastFailure returns the latest event about a replica of the function that did not start, ended by
// itself, or had to be replaced. It returns false if there is none among the latest events.
func (l *Local) LastFailure(function pipeline.Key) (Event, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if f := l.functions[function]; f != nil {
		return f.timeline.failure()
	}
	return Event{}, false
}

// Replica is a replica as [Local.Replicas] shows it.
type Replica struct {
	plan.Replica
	Hidden   bool          // its node is silent
	Path     string        // start path, as in node.Started; empty: starting
	Phases   []node.Phase  // phases of its start so far, in order
	Total    time.Duration // from the order until it was ready; 0: not yet
	Answered time.Duration // from the order until the first answer; 0: not yet
}

// Replicas returns the replicas of a function, sorted by name, including those on silent nodes.
func (l *Local) Replicas(function pipeline.Key) []Replica {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []Replica
	for _, r := range l.sorted() {
		if r.function == function {
			out = append(out, Replica{
				plan.Replica{Name: r.name, Revision: r.spec.Revision, Node: r.node, Device: r.device, State: r.state, Since: r.since},
				r.hidden, r.path, r.started(), r.total, r.answer.after,
			})
		}
	}
	return out
}

// Count is the number of a function's replicas in each state. Replicas on silent nodes are Hidden,
// whatever their state.
type Count struct{ Starting, Ready, Draining, Hidden int }

// Counts returns the counts of all functions that have replicas.
func (l *Local) Counts() map[pipeline.Key]Count {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := map[pipeline.Key]Count{}
	for _, r := range l.replicas {
		c := out[r.function]
		switch {
		case r.hidden:
			c.Hidden++
		case r.state == plan.Starting:
			c.Starting++
		case r.state == plan.Ready:
			c.Ready++
		default:
			c.Draining++
		}
		out[r.function] = c
	}
	return out
}

// Failure returns how many starts of a function failed in a row, until when no other is tried, and
// the latest cause.
func (l *Local) Failure(function pipeline.Key) (count int, until time.Time, cause string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if f := l.functions[function]; f != nil {
		return f.failure.Count, l.told(f.failure.Until), f.failure.Cause
	}
	return 0, time.Time{}, ""
}

// Close drains all replicas and returns when they are gone. If ctx ends first, it stops them
// without draining. Replicas that outlive their owner are left for the next one. Later calls of
// Apply and Observe fail.
func (l *Local) Close(ctx context.Context) error {
	l.mu.Lock()
	l.closed = true
	for _, r := range l.sorted() {
		r.release(errClosing)
	}
	gone := l.goneLocked()
	l.mu.Unlock()
	var err error
	select {
	case <-gone:
	case <-ctx.Done():
		err = fmt.Errorf("cluster: replicas stopped before they were drained: %w", ctx.Err())
	}
	l.abort(ErrClosed)
	l.group.Wait()
	l.metrics.unregister(l.cfg.Metrics)
	return err
}

// goneLocked returns a channel that is closed when all present replicas have gone. The caller holds
// l.mu.
func (l *Local) goneLocked() <-chan struct{} {
	var waits []<-chan struct{}
	for _, r := range l.replicas {
		waits = append(waits, r.gone)
	}
	all := make(chan struct{})
	l.group.Go(func() {
		defer close(all)
		for _, w := range waits {
			<-w
		}
	})
	return all
}
