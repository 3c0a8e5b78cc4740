package nodes

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/control"
	"github.com/stagecoach-serving/stagecoach/control/cluster"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/dispatch"
	"github.com/stagecoach-serving/stagecoach/request/queue"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// plane is a control plane with the parts that `stagecoach up` has for nodes: an embedded NATS that
// listens, a directory of nodes, dispatchers, a cluster and a control loop.
type plane struct {
	nats      *queue.Server
	token     string // keys of NATS, as text
	bus       *counted
	directory *node.Directory
	lines     *dispatch.Shell
	local     *cluster.Local
	loop      *control.Loop
	ticks     *ticks
	deployed  deployed
	closers   []func()
	group     sync.WaitGroup

	mu   sync.Mutex
	left map[string]time.Time // nodes that have left, and when
}

// deployed is what is deployed on a plane.
type deployed struct {
	mu        sync.Mutex
	functions []cluster.FunctionSpec
	pipelines []pipeline.Pipeline
}

// Functions implements cluster.Functions.
func (d *deployed) Functions() []cluster.FunctionSpec {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.functions)
}

// Pipelines implements cluster.Functions.
func (d *deployed) Pipelines() []pipeline.Pipeline {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.pipelines
}

// Has implements cluster.Functions.
func (d *deployed) Has(function pipeline.Key) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.ContainsFunc(d.functions, func(f cluster.FunctionSpec) bool { return f.Key == function })
}

// openPlane starts a control plane without nodes and functions. adapt makes a client of a daemon a
// node of the cluster.
func openPlane(dir string, adapt func(*node.Client) cluster.Node, log *slog.Logger) (p *plane, err error) {
	p = &plane{left: map[string]time.Time{}}
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	keys, err := queue.NewKeys()
	if err != nil {
		return p, err
	}
	text, err := keys.MarshalText()
	if err != nil {
		return p, err
	}
	p.token = string(text)
	metrics := prometheus.NewRegistry()
	if p.nats, err = queue.StartServer(queue.ServerConfig{Dir: filepath.Join(dir, "nats"), Log: log, Listen: "127.0.0.1:0", Keys: keys}); err != nil {
		return p, err
	}
	p.closers = append(p.closers, p.nats.Close)
	tasks, err := p.nats.Connect("dispatch")
	if err != nil {
		return p, err
	}
	p.closers = append(p.closers, tasks.Close)
	links, err := p.nats.Connect("nodes")
	if err != nil {
		return p, err
	}
	p.closers = append(p.closers, links.Close)
	store, err := tensor.OpenDir(filepath.Join(dir, "blobs"), 1<<30)
	if err != nil {
		return p, err
	}
	if p.lines, err = dispatch.New(dispatch.Config{
		Bus: queue.NewBus(tasks), Store: store, Logger: log, Registerer: metrics,
		Dropped: func(_ pipeline.Key, replica string, death task.Death) { p.local.Lost(replica, death) },
	}); err != nil {
		return p, err
	}
	p.closers = append(p.closers, p.lines.Close)
	if p.local, err = cluster.New(cluster.Config{
		Functions: &p.deployed, Lines: p.lines, Replicas: p.lines, Joining: cluster.NodesJoin, Epoch: 1, Changed: func() { p.loop.Poke() }, Log: log, Metrics: metrics,
	}); err != nil {
		return p, err
	}
	p.ticks = &ticks{Local: p.local}
	if p.loop, err = control.New(p.ticks, p.ticks, control.Config{}, log, metrics); err != nil {
		return p, err
	}
	p.bus = &counted{Bus: queue.NewLink(links)}
	if p.directory, err = node.OpenDirectory(p.directoryConfig(adapt, log)); err != nil {
		return p, err
	}
	p.closers = append(p.closers, p.directory.Close, func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel() // replicas are stopped, and not drained
		_ = p.local.Close(ctx)
	})
	ctx, cancel := context.WithCancel(context.Background())
	p.group.Go(func() { _ = p.loop.Run(ctx) }) // returns when ctx ends
	p.closers = append(p.closers, func() { cancel(); p.group.Wait() })
	return p, nil
}

func (p *plane) directoryConfig(adapt func(*node.Client) cluster.Node, log *slog.Logger) node.DirectoryConfig {
	boot, _ := node.BootID() // of the nodes, too
	return node.DirectoryConfig{
		Bus: p.bus, Boot: boot, Log: log,
		Joined: func(c *node.Client) { p.local.Join(adapt(c)) },
		Left: func(name, _ string) {
			p.mu.Lock()
			p.left[name] = time.Now()
			p.mu.Unlock()
			p.local.Leave(name)
		},
		Heard: func(c *node.Client) {
			inv := c.Inventory()
			running := make([]string, len(inv.Replicas))
			for i := range inv.Replicas {
				running[i] = inv.Replicas[i].Name
			}
			p.local.Running(inv.Name, running)
		},
		Event: func(string, node.Event) {}, Line: func(string, node.Line) {},
	}
}

// close ends the plane. Replicas are not drained.
func (p *plane) close() {
	for _, f := range slices.Backward(p.closers) {
		f()
	}
}

// deploy deploys functions with this many replicas each. As many replicas fit on each node.
func (p *plane) deploy(functions, replicas int) error {
	milli := nodeMilli / replicas
	specs := make([]cluster.FunctionSpec, functions)
	for i := range specs {
		key := pipeline.Key{Name: fmt.Sprintf("f%04d", i), Namespace: "scale"}
		specs[i] = cluster.FunctionSpec{
			Key:      key,
			Function: plan.Function{Name: key.String(), Revision: 1, Min: replicas, Max: 2 * replicas, Memory: 64 << 20, CPUMilli: milli, Batch: 1},
			Spec: node.Spec{
				Function: key.String(), Namespace: key.Namespace, Image: "registry.example.com/models/" + key.Name + "@sha256:" + rand.Text(), Memory: 64 << 20, CPUMilli: milli,
				Env: map[string]string{"STAGECOACH_MODEL": "model/weights.onnx", "OMP_NUM_THREADS": "1"},
			},
		}
		if err := p.lines.Ensure(dispatch.Spec{Function: key, Revision: 1, MaxReplicas: 2 * replicas}); err != nil {
			return err
		}
	}
	p.deployed.mu.Lock()
	p.deployed.functions, p.deployed.pipelines = specs, chains(specs)
	p.deployed.mu.Unlock()
	p.loop.Poke()
	return nil
}

// chains puts three functions in five into pipelines of five stages.
func chains(specs []cluster.FunctionSpec) (all []pipeline.Pipeline) {
	const stages = 5
	for i := 0; i+stages <= len(specs)*3/5; i += stages {
		p := pipeline.Pipeline{Name: fmt.Sprintf("p%04d", i), Namespace: "scale", SLO: 2 * time.Second, Entry: specs[i].Key.Name}
		for k := range stages {
			s := pipeline.Stage{Function: pipeline.Function{Name: specs[i+k].Key.Name, Namespace: "scale"}}
			if k < stages-1 {
				s.Next = []pipeline.Edge{{To: specs[i+k+1].Key.Name}}
			}
			p.Stages = append(p.Stages, s)
		}
		all = append(all, p)
	}
	return all
}

// ready returns how many replicas are ready.
func (p *plane) ready() (n int) {
	for _, c := range p.local.Counts() {
		n += c.Ready
	}
	return n
}

// silent returns how many nodes have left since a time, and when the last one did.
func (p *plane) silent(since time.Time) (n int, last time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, at := range p.left {
		if at.After(since) {
			n++
			if at.After(last) {
				last = at
			}
		}
	}
	return n, last
}

// counted is a bus that counts announcements.
type counted struct {
	node.Bus
	announcements, bytes atomic.Int64
}

// Listen implements node.Bus.
func (c *counted) Listen(name, kind string, f func(node, reply string, data []byte)) (stop func(), err error) {
	if kind != "inventory" {
		return c.Bus.Listen(name, kind, f)
	}
	return c.Bus.Listen(name, kind, func(node, reply string, data []byte) {
		c.announcements.Add(1)
		c.bytes.Add(int64(len(data)))
		f(node, reply, data)
	})
}

// ticks measures the parts of each tick.
type ticks struct {
	*cluster.Local

	mu                     sync.Mutex
	observed               time.Time
	observe, decide, apply []time.Duration
}

// Observe implements control.Observer.
func (t *ticks) Observe(ctx context.Context) (plan.Snapshot, error) {
	start := time.Now()
	s, err := t.Local.Observe(ctx)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.observed = time.Now()
	t.observe = append(t.observe, t.observed.Sub(start))
	return s, err
}

// Apply implements control.Applier.
func (t *ticks) Apply(ctx context.Context, p plan.Plan) error {
	start := time.Now()
	err := t.Local.Apply(ctx, p)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.decide = append(t.decide, start.Sub(t.observed))
	t.apply = append(t.apply, time.Since(start))
	return err
}

// take returns the times since the last call.
func (t *ticks) take() (observe, decide, apply []time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	observe, decide, apply = t.observe, t.decide, t.apply
	t.observe, t.decide, t.apply = nil, nil, nil
	return observe, decide, apply
}

var errTimeout = errors.New("it took too long")

// until waits for a condition.
func until(ctx context.Context, limit time.Duration, what string, done func() bool) error {
	deadline := time.Now().Add(limit)
	for !done() {
		if time.Now().After(deadline) {
			return fmt.Errorf("%s: %w: %v", what, errTimeout, limit)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
	return nil
}

func sortReplicas(all []node.Replica) {
	slices.SortFunc(all, func(x, y node.Replica) int { return cmp.Compare(x.Name, y.Name) })
}
