package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// causeWait is how long a node has to report how a process ended after its connection broke.
const causeWait = time.Second

// replica is one replica of a function, from its order to its end.
type replica struct {
	name         string
	function     pipeline.Key
	of           string    // function, as plans have it
	home         *function // what is known of the function; kept while it has replicas
	spec         FunctionSpec
	node, device string
	host         *member // node; kept while it has replicas
	ordered      uint64  // Rev of the plan that wanted it
	begun        time.Time

	alive        context.Context // ends when the replica is lost or l is aborted
	lose         context.CancelCauseFunc
	wanted       context.Context // ends when the replica is released, or with alive
	cancelWanted context.CancelCauseFunc
	gone         chan struct{} // closed at its end
	kick         chan struct{} // cpuWant was changed
	back         bool          // released before it was ready; used by its goroutine only
	// something else ended it before it was stopped; used by its goroutine only.
	outside bool
	// Started by revive, for requests that began on its revision. Set before Local.mu is released
	// after its order.
	revived bool

	// The fields below are guarded by Local.mu.
	hidden    bool   // its node is silent
	unfit     string // why it cannot stay on its devices, as of the latest Snapshot
	seen      uint64 // Rev of the first Snapshot with it since it became visible; 0: none yet
	cpuWant   int    // wanted CPU limit in thousandths of a core; 0: as declared
	cpu       int    // CPU limit, as far as the node was told
	unbounded bool   // its node said last that it cannot limit CPU
	path      string
	phases    []node.Phase
	total     time.Duration
	state     plan.State
	since     time.Time
	released  bool
	starved   bool   // it was out of memory on its device
	stuck     string // the call whose handler does not end; empty: none
	answer    firstAnswer

	handover
}

// firstAnswer is the first answer of a replica.
type firstAnswer struct {
	after time.Duration // since the order; 0: not yet
	call  time.Duration // duration of the call
}

// release marks the replica as no longer wanted. The caller holds Local.mu.
func (r *replica) release(cause error) {
	r.released = true
	r.cancelWanted(cause)
}

// order creates a replica and starts it. It returns nil if that is not possible. The caller holds
// l.mu.
func (l *Local) order(rev uint64, spec FunctionSpec, w plan.Want, slot plan.Slot) *replica {
	n := l.nodes[slot.Node]
	if !l.cfg.Cordons.open(n) {
		return nil // the next plan will not have that node
	}
	r := &replica{
		function: spec.Key, of: spec.Key.String(), home: l.of(spec.Key), spec: spec, node: slot.Node, device: slot.Device, host: n, ordered: rev,
		begun: l.now(), since: l.now(), gone: make(chan struct{}), kick: make(chan struct{}, 1),
		cpu: w.CPUMilli, cpuWant: w.CPUMilli,
	}
	for range 100 {
		if r.name = spec.Key.Name + "-" + l.cfg.NewID(); l.replicas[r.name] == nil {
			break
		}
	}
	if l.replicas[r.name] != nil {
		l.cfg.Log.Error("no name is free; NewID repeats itself", "function", spec.Key, "replica", r.name)
		return nil
	}
	o := node.Order{Replica: r.name, Spec: spec.Spec, Claim: node.Claim{Revision: spec.Revision}, Device: slot.Device, CPUMilli: w.CPUMilli}
	hands := n.hands
	register(l, n, r)
	l.group.Go(func() { l.live(n, r, func() error { return l.start(hands, r, o) }) })
	l.note(r, Event{Kind: Ordered, Cause: w.Why})
	r.home.remember(spec, slot)
	return r
}

// live takes a replica through its life, on the replica's only goroutine.
func (l *Local) live(n *member, r *replica, start func() error) {
	defer close(r.gone)
	defer r.lose(nil) // frees the contexts
	if err := start(); err != nil {
		// Read before the replica is stopped, because stopping ends alive.
		r.back = r.wanted.Err() != nil && r.alive.Err() == nil
		r.outside = endedFromOutside(r.alive)
		l.stop(n, r)
		l.end(n, r, false, afterwards(r, err))
		return
	}
	l.serve(n, r)
	if handOver(l, r) {
		l.end(n, r, false, nil)
		return
	}
	if r.alive.Err() == nil {
		l.drain(r)
	}
	busy := false
	r.outside = endedFromOutside(r.alive)
	if r.alive.Err() != nil {
		busy = l.cfg.Replicas.Lost(r.function, r.name, deathOf(context.Cause(r.alive)))
	}
	l.stop(n, r)
	l.end(n, r, busy, nil)
}

// start starts the replica and waits until it is Ready.
func (l *Local) start(n Node, r *replica, o node.Order) error {
	begin := time.Now()
	ctx, cancel := context.WithTimeoutCause(r.wanted, l.cfg.StartTimeout, fmt.Errorf("not ready within %v", l.cfg.StartTimeout))
	defer cancel()
	started, err := n.Start(ctx, o, nil)
	if err != nil {
		return because(ctx, fmt.Errorf("start: %w", err))
	}
	began := time.Now()
	// The order's way and its wait in the node's queue: the time outside all other phases.
	phases := []node.Phase{{Name: "order", Took: began.Sub(begin)}}
	for _, p := range started.Phases {
		if p.Name != phases[0].Name {
			phases[0].Took = max(phases[0].Took-p.Took, 0)
			phases = append(phases, p)
		}
	}
	l.mu.Lock()
	r.path, r.phases = started.Path, phases
	l.note(r, Event{Kind: Process, Path: started.Path, Phases: started.Phases})
	l.mu.Unlock()
	hello, err := l.cfg.Replicas.Attach(ctx, r.function, r.name, r.spec.Revision, started.Conn)
	if err != nil {
		select { // a broken connection is noticed before the end of the process that explains it
		case <-ctx.Done():
		case <-time.After(causeWait):
		}
		if cause := context.Cause(ctx); errors.Is(err, cause) {
			return cause // the status begins with it, whichever of both was seen first
		}
		return because(ctx, err)
	}
	l.ready(r, hello, begin, began)
	l.cfg.Changed()
	return nil
}

// ready records that the replica is ready. It was ordered at begin, and its process ran from began.
func (l *Local) ready(r *replica, hello wire.Hello, begin, began time.Time) {
	now := time.Now()
	place := node.Phase{Name: "place", Took: now.Sub(began)}
	l.mu.Lock()
	defer l.mu.Unlock()
	if hello.Load > 0 { // the replica loaded them itself, because it has no zygote
		load := min(hello.Load, place.Took)
		if i := slices.IndexFunc(r.phases, func(p node.Phase) bool { return p.Name == "load" }); i >= 0 {
			r.phases[i].Took += load // taken from the earlier phase that included it
		} else {
			r.phases = append(r.phases, node.Phase{Name: "load", Took: load})
		}
		place.Took -= load
	}
	r.phases, r.total = append(r.phases, place), now.Sub(begin)
	for _, p := range r.phases {
		l.metrics.starts.WithLabelValues(p.Name, r.path).Observe(p.Took.Seconds())
	}
	l.metrics.starts.WithLabelValues("total", r.path).Observe(r.total.Seconds())
	r.state, r.since = plan.Ready, l.now()
	f := l.of(r.function)
	f.slots, f.batch = hello.Slots, hello.MaxBatch
	f.failure.became(r.spec.Revision)
	f.starts.add(r.path, r.total)
	if k := f.formers[r.spec.Revision]; k != nil {
		k.wanted, k.failed = false, 0
	}
	l.note(r, Event{Kind: Ready, Path: r.path, Phases: []node.Phase{{Name: "load", Took: hello.Load}, {Name: "place", Took: hello.Place}}})
}

// afterwards adds to err what the process printed while it was stopped. For example, a watchdog
// says where its program listens instead.
func afterwards(r *replica, err error) error {
	if cause := context.Cause(r.alive); cause != nil && !errors.Is(err, cause) {
		return fmt.Errorf("%w; when it was stopped: %w", err, cause)
	}
	return err
}

// because adds to err why ctx ended, if it did.
func because(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
		return fmt.Errorf("%w: %w", cause, err)
	}
	return err
}

// drain lets the replica finish its calls, and those of requests that began on its revision. It
// waits for DrainTimeout, or until these requests' deadlines if they are later.
func (l *Local) drain(r *replica) {
	l.mu.Lock()
	r.state, r.since = plan.Draining, l.now()
	l.note(r, Event{Kind: Draining, Cause: context.Cause(r.wanted).Error()})
	l.mu.Unlock()
	var err error
	for wait := l.cfg.DrainTimeout; ; {
		ctx, cancel := context.WithTimeoutCause(r.alive, wait, fmt.Errorf("not drained within %v, nor by the deadlines of its requests", l.cfg.DrainTimeout))
		err = l.cfg.Replicas.Drain(ctx, r.function, r.name)
		if err != nil {
			err = because(ctx, err)
		}
		cancel()
		if err == nil || r.alive.Err() != nil {
			return
		}
		if wait = time.Until(l.cfg.Replicas.Due(r.function, r.name)); wait <= 0 {
			break
		}
	}
	l.cfg.Log.Warn("replica stopped with calls left; they are tried elsewhere", "function", r.function, "replica", r.name, "error", err)
	l.cfg.Replicas.Lost(r.function, r.name, deathOf(err))
}

// stopMargin is how long a node may take to stop a replica, beyond the grace.
const stopMargin = 5 * time.Second

// stop makes sure that no process is left, even if l is being aborted. On a node that is away,
// remaining processes are stopped when it returns.
func (l *Local) stop(n *member, r *replica) {
	hands := l.reach(n)
	if hands == nil {
		l.cfg.Log.Info("replica ends with its connection; its node is silent", "function", r.function, "replica", r.name, "node", r.node)
		l.mu.Lock()
		defer l.mu.Unlock()
		outlived(l, r)
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(l.ctx), l.cfg.Grace+stopMargin)
	defer cancel()
	err := hands.Stop(ctx, r.name, l.cfg.Grace)
	if err != nil {
		l.cfg.Log.Error("replica's process may still run", "function", r.function, "replica", r.name, "node", r.node, "error", err)
	}
	now := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.DeleteFunc(n.stopped, func(_ string, at time.Time) bool { return now.Sub(at) >= missingFor })
	n.stopped[r.name] = now
	if err != nil {
		outlived(l, r)
	}
}

var errRemoved = errors.New("the function was removed")

// end forgets the replica and records how it ended. busy is true if the replica had calls. failed
// is why it did not start, or nil.
func (l *Local) end(n *member, r *replica, busy bool, failed error) {
	removed := (failed != nil || r.alive.Err() != nil) && !l.cfg.Functions.Has(r.function)
	l.mu.Lock()
	at := l.now()
	e, cause := Event{Kind: Stopped}, ""
	switch {
	case r.left:
		e = Event{Kind: HandedOver}
	case l.ctx.Err() != nil:
		e.Cause = ErrClosed.Error()
	case removed: // the line was removed first, and the connection with it
		e.Cause = errRemoved.Error()
	case r.back: // not a failure
		e.Cause = context.Cause(r.wanted).Error()
	case failed != nil && r.adopted(): // says nothing about starts
		e = Event{Kind: Lost, Cause: failed.Error()}
	case failed != nil:
		e, cause = Event{Kind: Failed, Cause: failed.Error()}, failed.Error()
	case r.state == plan.Draining: // its process was meant to end
		if e.Cause = r.stuck; e.Cause == "" && r.alive.Err() != nil {
			e.Cause = context.Cause(r.alive).Error()
		}
	case r.alive.Err() != nil:
		e = Event{Kind: Lost, Cause: context.Cause(r.alive).Error()}
		// The end of a replica says nothing about the next start if the replica had calls, was
		// ready for a while, or was ended by something else.
		death, lived := deathOf(context.Cause(r.alive)), at.Sub(r.since)
		if !busy && !death.Busy && death.End == task.EndItself && lived < settle {
			cause = fmt.Sprintf("lost %v after it was ready: %s", lived.Round(time.Millisecond), e.Cause)
		}
	}
	delete(l.replicas, r.name)
	delete(n.runs, r.name)
	l.byName = nil
	l.dropLocked(n)
	l.note(r, e)
	f := l.of(r.function)
	f.parameters.refused(r.spec.Revision, failed)
	gaveUp, noRevival := "", ""
	if r.revived && e.Kind == Failed {
		noRevival = f.unrevived(r.spec.Revision, at, failed, !r.outside)
	}
	// The device is to blame, not the function.
	if short := memoryError(e, failed, r); r.device != "" && short != nil {
		l.bar(r, false, at, short)
		cause = ""
	}
	if cause != "" {
		f.failure.add(r, at, cause, r.outside, l.cfg.Chance())
		if r.spec.Revision == f.failure.revision && f.failure.givesUp() {
			gaveUp = gaveUpCause(r.spec, &f.failure, replicasOf(r.function, l.replicas))
		}
	}
	failures := f.failure.Count
	l.mu.Unlock()
	l.metrics.ends.WithLabelValues(string(e.Kind)).Inc()
	if cause != "" {
		l.cfg.Log.Warn("replica failed", "function", r.function, "replica", r.name, "node", r.node, "inARow", failures, "error", cause)
	}
	if noRevival != "" {
		l.cfg.Lines.NoReplica(r.function, r.spec.Revision, noRevival)
	}
	if gaveUp != "" {
		l.cfg.Lines.Fail(r.function, r.spec.Revision, gaveUp)
	}
	l.cfg.Changed()
}

// replicasOf returns the replicas of a function that are among others.
func replicasOf(function pipeline.Key, all map[string]*replica) []*replica {
	var own []*replica
	for _, r := range all {
		if r.function == function {
			own = append(own, r)
		}
	}
	return own
}

// note records an event of r. The caller holds l.mu.
func (l *Local) note(r *replica, e Event) {
	e.At, e.Function, e.Replica, e.Node = stamp(), r.function, r.name, r.node
	l.of(r.function).timeline.add(e)
	l.cfg.Event(e)
}

// memoryError returns the lack of device memory because of which r did not start or was lost, or
// nil.
func memoryError(e Event, failed error, r *replica) *task.MemoryError {
	if e.Kind == Lost {
		failed = context.Cause(r.alive)
	} else if e.Kind != Failed {
		return nil
	}
	var short *task.MemoryError
	errors.As(failed, &short)
	return short
}

// lost is the error of a replica that ended unexpectedly.
type lost struct{ task.Death }

// Error returns the cause.
func (l lost) Error() string { return l.Cause }

// Unwrap returns the lack of device memory that ended the replica, or nil.
func (l lost) Unwrap() error {
	if l.Memory == nil {
		return nil
	}
	return l.Memory
}

// endedFromOutside reports whether a replica's context has ended because something other than the
// replica ended its process.
func endedFromOutside(alive context.Context) bool {
	death := lost{}
	return errors.As(context.Cause(alive), &death) && death.End != task.EndItself
}

// deathOf returns how a replica ended, from the error of its context. Unless err is a [lost], the
// platform ended the replica.
func deathOf(err error) task.Death {
	if l := (lost{}); errors.As(err, &l) {
		return l.Death
	}
	return task.Death{Cause: err.Error(), End: task.EndShared}
}

// Lost reports that a replica's process ended or that its connection broke, and why. It returns at
// once. A second report, or one about an unknown replica, does nothing.
func (l *Local) Lost(replica string, death task.Death) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r := l.replicas[replica]; r != nil {
		r.lose(lost{death})
	}
}

// Answered records the first answer of a replica that this owner has started: how long after the
// attachment it came, and how long the call took.
func (l *Local) Answered(replica string, after, call time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r := l.replicas[replica]; r != nil && !r.adopted() {
		r.answer = firstAnswer{max(l.now().Sub(r.begun), 1), call}
		l.metrics.starts.WithLabelValues(firstInference, r.path).Observe(call.Seconds())
		l.of(r.function).failure.worked(r.spec.Revision, r.since)
		l.note(r, Event{Kind: Answered, Phases: []node.Phase{{Name: "since attached", Took: after}, {Name: firstInference, Took: call}}})
	}
}

// firstInference is the last phase of a start. It is not part of the total, because a replica may
// be idle for long before it.
const firstInference = "first inference"

// started returns the phases of the start so far. The caller holds Local.mu. The first answer may
// be known before the earlier phases.
func (r *replica) started() []node.Phase {
	all := slices.Clone(r.phases)
	if r.answer.after > 0 {
		all = append(all, node.Phase{Name: firstInference, Took: r.answer.call})
	}
	return all
}
