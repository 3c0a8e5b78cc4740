package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity/authority"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/provider/admin"
	"github.com/stagecoach-serving/stagecoach/request/queue"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// nodes has the nodes of a running stagecoach: its own KeysManager, if it has one, and the daemons
// that have joined.
type nodes struct {
	self   node.Identity                  // of this process
	keys   *keysmanager.Manager           // nil: this process is no node
	bus    *queue.Link                    // to daemons; nil: it does not listen for them
	joined atomic.Pointer[node.Directory] // nil: it does not listen for daemons
	far    *farNodes                      // reaches nodes on other machines; nil: it reaches none
	log    *slog.Logger
	shared *clusterKeys // shared by the control planes; nil: there is no cluster key
	// decides who may join; nil: it does not listen for daemons
	authority  *authority.Authority
	joinSecret *joinSecret // nil: none is kept
	// lists the containers of this process; nil: its functions run in none
	containers func() []node.Container
	sources    *nodeSources // of images, for daemons
	cordons    *cordons     // nil: none can be cordoned
	// hears daemons while another control plane leads; nil: none may
	standby *node.Listener

	ctx    context.Context // of messages to daemons that nobody waits for
	cancel context.CancelFunc
	group  sync.WaitGroup

	mu sync.Mutex
	// Nodes and functions with a forget order under way; see once, too.
	forgetting map[string]bool
	told       map[string]toldImages // by the node's name
}

// close stops listening to daemons.
func (n *nodes) close() {
	n.cancel()
	if n.standby != nil {
		n.standby.Close()
	}
	if d := n.joined.Load(); d != nil {
		d.Close()
	}
	n.group.Wait()
}

// clients returns those of the daemons that are heard.
func (n *nodes) clients() []*node.Client {
	if d := n.joined.Load(); d != nil {
		return d.Clients()
	}
	return nil
}

// runs reports whether a node's daemon is heard. It also returns true on a control plane that
// stands by, which hears no daemons.
func (n *nodes) runs(name string) bool {
	d := n.joined.Load()
	return d == nil || slices.ContainsFunc(d.Clients(), func(c *node.Client) bool { return c.Name() == name })
}

// announced returns the latest announcements of daemons.
func (n *nodes) announced() []node.Inventory {
	if d := n.joined.Load(); d != nil {
		return d.Inventories()
	}
	return nil
}

// Inventories implements admin.Nodes.
func (n *nodes) Inventories() []node.Inventory {
	var out []node.Inventory
	if d := n.joined.Load(); d != nil {
		out = d.Inventories()
	}
	if n.keys != nil {
		inv := n.keys.Inventory()
		own := inventoryOf(inv)
		own.Identity, own.Embedded = n.self, true
		if n.containers != nil {
			own.Containers = named(n.containers(), inv.Replicas)
		}
		out = append(out, own)
	}
	slices.SortFunc(out, func(a, b node.Inventory) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// Load loads parameters into the memory of a node. It returns their size in bytes.
func (n *nodes) Load(ctx context.Context, name string, spec node.Spec) (int64, error) {
	if n.keys != nil && name == n.self.Name {
		z, err := n.keys.Load(ctx, spec)
		return z.Bytes, err
	}
	return n.order(ctx, name, node.Order{Kind: node.OrderLoad, Spec: spec})
}

// Evict implements admin.Nodes.
func (n *nodes) Evict(ctx context.Context, name, what string) (int64, error) {
	if n.keys != nil && name == n.self.Name {
		return n.keys.Evict(ctx, what)
	}
	return n.order(ctx, name, node.Order{Kind: node.OrderEvict, Function: what})
}

// errorCodes are the codes of a KeysManager's errors that callers tell apart.
func errorCodes() node.Codes {
	return node.Codes{
		node.CodeUnsupported: errors.ErrUnsupported, node.CodeBusy: keysmanager.ErrBusy, node.CodeNoModel: keysmanager.ErrNoModel,
		node.CodeNoRoom: keysmanager.ErrNoRoom, node.CodeNotCached: keysmanager.ErrNotCached, node.CodeOldEpoch: node.ErrOldEpoch,
	}
}

// order sends an order to a daemon, and waits for the answer.
func (n *nodes) order(ctx context.Context, name string, o node.Order) (int64, error) {
	for _, c := range n.clients() {
		if c.Name() == name {
			if o.Kind == node.OrderLoad {
				o.Images = n.sources.of(c, o.Spec.Image)
			}
			return c.Do(ctx, o)
		}
	}
	return 0, &node.Error{Node: name, Err: fmt.Errorf("%w now", admin.ErrNoNode)}
}

// deployed tells this process's own node with which spec a function is deployed now.
func (n *nodes) deployed(spec node.Spec) {
	if n.keys != nil {
		n.keys.Deployed(spec)
	}
}

// forget tells this process's own node that a function is no longer deployed. A daemon is told
// later, when it announces that it still has the function.
func (n *nodes) forget(function string) {
	if n.keys != nil {
		n.keys.Forget(function)
	}
}

// forgetTimeout bounds an order to forget a function.
const forgetTimeout = 5 * time.Second

// forgetThere tells a daemon that a function is no longer deployed, unless such an order is under
// way.
func (n *nodes) forgetThere(c *node.Client, function string) {
	n.once(c.Name()+" "+function, func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, forgetTimeout)
		defer cancel()
		n.far.forgotten(c.Name(), function)
		// The next announcement of the daemon says whether it did.
		_, _ = c.Do(ctx, node.Order{Kind: node.OrderForget, Function: function})
	})
}

// named returns containers with the names of the replicas that they are for. One that was a spare
// has the name of its entry until then.
func named(all []node.Container, replicas []keysmanager.ReplicaInfo) []node.Container {
	names := map[string]string{}
	for _, r := range replicas {
		names[r.Entry] = r.Name
	}
	for i, c := range all {
		all[i].Replica = cmp.Or(names[c.Replica], c.Replica)
	}
	return all
}

// inventoryOf returns the inventory of a KeysManager in the node protocol's type. The caller adds
// the node's identity.
func inventoryOf(inv keysmanager.Inventory) node.Inventory {
	out := node.Inventory{
		V:        node.Version,
		Identity: node.Identity{Name: inv.Node},
		Memory:   node.Memory{Bound: inv.Bound, Total: inv.Memory, Used: inv.MemoryUsed, Threshold: inv.Threshold, Free: inv.Free},
		CPU:      node.CPU{Total: inv.CPUMilli},
		// JSON has empty lists here, not null.
		Devices: []node.Device{}, Zygotes: []node.Zygote{}, Failures: []node.Failure{}, Replicas: []node.Replica{}, Stock: node.Stock{Spares: inv.Spares},
		Counts: node.Counts{Hits: inv.Hits, Misses: inv.Misses, Evictions: inv.Evictions, Refused: inv.Refused, Evicted: node.Evicted(inv.Evicted)},
	}
	for _, z := range inv.Zygotes {
		out.Zygotes = append(out.Zygotes, node.Zygote{
			Function: z.Function, Namespace: z.Namespace, Digest: z.Digest, Model: z.Model, PID: z.PID, Bytes: z.Bytes, Path: z.Path,
			Replicas: z.Replicas, Key: z.Key, State: node.ZygoteState(z.State), Load: z.Load, LastUsed: z.LastUsed, Usage: usageOf(z.Usage), Generation: z.Generation,
			Worker: z.Worker, Device: z.Device,
		})
	}
	for _, f := range inv.Failures {
		out.Failures = append(out.Failures, node.Failure(f))
	}
	for _, r := range inv.Replicas {
		out.Replicas = append(out.Replicas, node.Replica{
			Name: r.Name, Function: r.Function, PID: r.PID, Path: r.Path, Device: r.Device, Phases: append([]node.Phase{}, r.Phases...), Started: r.Started,
			CPUMilli: r.CPUMilli, Usage: usageOf(r.Usage),
		})
		out.CPU.Used += r.CPUMilli
	}
	for _, d := range inv.Devices {
		out.Devices = append(out.Devices, node.Device{
			UUID: d.ID, Index: d.Index, Name: d.Name, Memory: d.Memory, Used: d.Used, Reserved: d.Reserved, Free: d.Free, Parked: d.Parked, ParkedFor: d.ParkedFor,
			Utilisation: d.Utilisation, Temperature: d.Temperature, Power: d.Power, Healthy: d.Unhealthy == "", Cause: d.Unhealthy,
		})
	}
	return out
}

func usageOf(u *keysmanager.Usage) *node.Usage {
	if u == nil {
		return nil
	}
	return &node.Usage{CPUMilli: int(u.CPUMilli), Memory: u.Memory, Throttled: u.Throttled}
}

// remoteNode is a daemon as a node of the cluster.
type remoteNode struct {
	*node.Client

	sources *nodeSources // nil: orders name none
	// returns an error if a function would start without its secrets; nil: it is not checked
	secrets func(node.Spec) error
}

// detailed adds a typed part to an error, for callers that use errors.As. The error's text already
// describes that part.
type detailed struct {
	error
	part error
}

// Unwrap returns the error and the part.
func (d detailed) Unwrap() []error { return []error{d.error, d.part} }

// Start implements cluster.Node.
func (n remoteNode) Start(ctx context.Context, o node.Order, progress func(node.Phase)) (node.Started, error) {
	if n.secrets != nil {
		if err := n.secrets(o.Spec); err != nil {
			return node.Started{}, err
		}
	}
	o.Images, o.Home = n.sources.of(n.Client, o.Spec.Image), homeOf(o.Spec, n.Client)
	r, err := n.Client.Start(ctx, o, progress)
	var short *node.MemoryError
	if errors.As(err, &short) {
		err = detailed{err, (*task.MemoryError)(short)}
	}
	return r, err
}

// Inventory implements cluster.Node.
func (n remoteNode) Inventory() plan.Node { return planned(n.Client.Inventory()) }

// planned returns a node in the form that policies read.
func planned(inv node.Inventory) plan.Node {
	out := plan.Node{Name: inv.Name, Memory: inv.Memory.Total, MemoryUsed: inv.Memory.Used, Threshold: inv.Memory.Threshold, CPUMilli: inv.CPU.Total}
	for _, z := range inv.Zygotes {
		switch z.State {
		case node.Retiring:
			continue // nothing starts from it
		case node.Loading:
			out.MemoryUsed += z.Bytes // the measured use lacks the bytes that it has loaded so far
		}
		if z.Worker != "" {
			continue // no parameters are kept in it
		}
		out.Zygotes = append(out.Zygotes, plan.Zygote{Function: z.Function, Digest: z.Digest, Bytes: z.Bytes, Idle: z.State == node.Ready && z.Replicas == 0})
	}
	for _, d := range inv.Devices {
		out.Devices = append(out.Devices, plan.Device{ID: d.UUID, Memory: d.Memory, MemoryUsed: d.Memory - d.Free, Unavailable: d.Cause})
	}
	if inv.Leaving {
		out.Unavailable, out.Leaving, out.Moving = "its KeysManager is being stopped", true, inv.Patient
	}
	return out
}
