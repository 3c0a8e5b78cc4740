package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// Offer is a replica on a node that outlives its owner. If the owner has ended, the next one can
// take the replica over.
type Offer struct {
	Replica  string
	Function pipeline.Key
	Revision uint64 // of the function, from which it was started
	Home     string // for the [Adopter]: what it uses of its owner's machine
	Device   string
	CPUMilli int // its limit, in thousandths of a core
	Path     string
}

// Adopter is a [Node] whose replicas outlive their owners.
type Adopter interface {
	// Adopt takes the socket of a replica that runs already. The spec is that of its function, with
	// the replica's revision.
	Adopt(ctx context.Context, o Offer, spec FunctionSpec) (wire.Socket, error)
}

// handover is the part of a [replica] about earlier and later owners.
type handover struct {
	from Adopter // takes the replica over from an earlier owner; nil: this one has started it
	kept bool    // it outlives this owner; guarded by Local.mu
	left bool    // it was left to the next owner; used by its goroutine only
}

// adopted reports whether an earlier owner has started the replica.
func (h handover) adopted() bool { return h.from != nil }

// adoptable returns the specs of the functions of offers that are new to l, with the revisions of
// the offers. It leaves out functions that are not deployed.
func adoptable(l *Local, offers []Offer) map[string]FunctionSpec {
	l.mu.Lock()
	unknown := slices.ContainsFunc(offers, func(o Offer) bool { return l.replicas[o.Replica] == nil })
	l.mu.Unlock()
	if !unknown {
		return nil
	}
	deployed := map[pipeline.Key]FunctionSpec{}
	for _, f := range l.cfg.Functions.Functions() {
		deployed[f.Key] = f
	}
	out := map[string]FunctionSpec{}
	for _, o := range offers {
		if spec, ok := deployed[o.Function]; ok {
			out[o.Replica] = spec
		}
	}
	return out
}

// takeOver makes an offered replica one of l's. It returns false if the caller has to stop the
// replica instead. A replica of a revision that l does not know yet is left alone, until the next
// announcement. The caller holds l.mu.
func takeOver(l *Local, n *member, o Offer, spec FunctionSpec) bool {
	from, ok := n.hands.(Adopter)
	if !ok {
		return false
	}
	if o.Revision > spec.Revision {
		return true
	}
	latest := o.Revision == spec.Revision
	spec.Revision = o.Revision
	r := &replica{
		name: o.Replica, function: spec.Key, of: spec.Key.String(), home: l.of(spec.Key), spec: spec, node: n.name, device: o.Device, host: n,
		begun: l.now(), since: l.now(), gone: make(chan struct{}), kick: make(chan struct{}, 1),
		cpu: o.CPUMilli, cpuWant: o.CPUMilli, path: o.Path, handover: handover{from: from, kept: true},
	}
	register(l, n, r)
	l.group.Go(func() { l.live(n, r, func() error { return adopt(l, r, o) }) })
	if latest {
		r.home.remember(spec, plan.Slot{Node: n.name, Device: o.Device})
	}
	return true
}

// past is a replica that has ended for a Local, but whose process may still run. It is not taken
// over again, because it may have been stopped for a reason.
type past struct {
	node string
	at   time.Time // when it ended
}

// pastFor bounds how long a replica on a node that does not return is remembered. No daemon keeps
// it for that long.
const pastFor = 24 * time.Hour

// outlived remembers a replica that could not be stopped. The caller holds l.mu.
func outlived(l *Local, r *replica) {
	now := time.Now()
	maps.DeleteFunc(l.past, func(_ string, p past) bool { return now.Sub(p.at) >= pastFor })
	l.past[r.name] = past{r.node, now}
}

// forgetEnded forgets past replicas of a node that run no more. The caller holds l.mu.
func forgetEnded(l *Local, node string, now time.Time, there map[string]bool) {
	maps.DeleteFunc(l.past, func(name string, p past) bool {
		return p.node == node && !there[name] && now.Sub(p.at) >= missingFor
	})
}

// register adds a replica. The caller holds l.mu, and starts its goroutine.
func register(l *Local, n *member, r *replica) {
	r.alive, r.lose = context.WithCancelCause(l.ctx)
	r.wanted, r.cancelWanted = context.WithCancelCause(r.alive)
	l.replicas[r.name], n.runs[r.name], l.byName = r, r, nil
}

// adopt takes a replica over and waits until it is Ready.
func adopt(l *Local, r *replica, o Offer) error {
	begin := time.Now()
	ctx, cancel := context.WithTimeoutCause(r.wanted, l.cfg.StartTimeout, fmt.Errorf("not taken over within %v", l.cfg.StartTimeout))
	defer cancel()
	conn, err := r.from.Adopt(ctx, o, r.spec)
	if err != nil {
		return because(ctx, err)
	}
	hello, err := l.cfg.Replicas.Attach(ctx, r.function, r.name, r.spec.Revision, conn)
	if err != nil {
		return because(ctx, err)
	}
	l.mu.Lock()
	r.state, r.since, r.total = plan.Ready, l.now(), time.Since(begin)
	f := l.of(r.function)
	f.slots, f.batch = hello.Slots, hello.MaxBatch
	f.failure.became(r.spec.Revision)
	l.note(r, Event{Kind: Adopted, Path: r.path})
	l.mu.Unlock()
	l.cfg.Changed()
	return nil
}

// errClosing is the cause with which Close releases all replicas.
var errClosing = errors.New("the cluster is closed")

// handOver leaves a replica that outlives l to the next owner, once it has answered its calls. It
// returns false if the replica has to be drained and stopped.
func handOver(l *Local, r *replica) bool {
	l.mu.Lock()
	r.left = r.kept && errors.Is(context.Cause(r.wanted), errClosing)
	if r.left {
		r.state, r.since = plan.Draining, l.now()
	}
	l.mu.Unlock()
	if !r.left {
		return false
	}
	if err := l.cfg.Replicas.Release(r.alive, r.function, r.name); err != nil {
		l.cfg.Replicas.Lost(r.function, r.name, deathOf(err))
	}
	return true
}
