package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/plan"
	"github.com/stagecoach-serving/stagecoach/task"
	"github.com/stagecoach-serving/stagecoach/wire"
)

// causeWait is how long a node has to say how a process ended whose connection broke.
const causeWait = time.Second

// replica is one copy of a function, from its order to its end.
type replica struct {
	name         string
	function     pipeline.Key
	of           string    // function, as plans have it
	home         *function // what is known of the function; kept while it has replicas
	spec         FunctionSpec
	node, device string
	host         *node  // node; kept while it has replicas
	ordered      uint64 // Rev of the plan that wanted it
	begun        time.Time

	alive   context.Context // until it is lost, or l is aborted
	lose    context.CancelCauseFunc
	wanted  context.Context // until it is released, or not alive
	letGo   context.CancelCauseFunc
	gone    chan struct{} // closed at its end
	kick    chan struct{} // cpuWant was changed
	back    bool          // it was taken back before it was ready; of its goroutine
	outside bool          // something else ended it before it was stopped; of its goroutine
	revived bool          // started by revive, for requests that have begun on its revision; written once, before Local.mu is released after its order

	// With Local.mu held:
	hidden    bool   // its node is silent
	unfit     string // why it cannot stay on its devices, as the latest Snapshot had them
	seen      uint64 // Rev of the first Snapshot that had it since it came into sight; 0: none has
	cpuWant   int    // thousandths of a core that it should be able to use; 0: as declared
	cpu       int    // that it may use, as far as the node was told
	unbounded bool   // its node does not limit CPU, as it said last
	path      string
	phases    []Phase
	total     time.Duration
	state     plan.State
	since     time.Time
	released  bool
	starved   bool          // it was out of memory on its device
	stuck     string        // the call whose handler does not end; empty: none
	answered  time.Duration // from its order to its first answer; 0: it has given none
	first     time.Duration // that its first call took
}

// release tells the replica that it is not wanted any more; Local.mu is held.
func (r *replica) release(cause error) {
	r.released = true
	r.letGo(cause)
}

// order makes a replica and starts it. It returns nil if that is not possible; l.mu is held.
func (l *Local) order(rev uint64, spec FunctionSpec, w plan.Want, slot plan.Slot) *replica {
	n, ok := l.nodes[slot.Node]
	if !ok || n.presence != here {
		return nil // the next plan will not have that node
	}
	r := &replica{
		function: spec.Key, of: spec.Key.String(), home: l.of(spec.Key), spec: spec, node: slot.Node, device: slot.Device, host: n, ordered: rev,
		begun: l.now(), since: l.now(), gone: make(chan struct{}), kick: make(chan struct{}, 1),
		cpu: w.CPUMilli, cpuWant: w.CPUMilli,
	}
	for range 100 {
		if r.name = spec.Declared.Name + "-" + l.cfg.NewID(); l.replicas[r.name] == nil {
			break
		}
	}
	if l.replicas[r.name] != nil {
		l.cfg.Log.Error("no name is free; NewID repeats itself", "function", spec.Key, "replica", r.name)
		return nil
	}
	r.alive, r.lose = context.WithCancelCause(l.ctx)
	r.wanted, r.letGo = context.WithCancelCause(r.alive)
	l.replicas[r.name], l.byName = r, nil
	l.note(r, Event{Kind: Ordered, Cause: w.Why})
	o := Order{Replica: r.name, Function: spec, Device: slot.Device, CPUMilli: w.CPUMilli}
	hands := n.hands
	l.group.Go(func() { l.live(n, hands, r, o) })
	r.home.remember(spec, slot)
	return r
}

// live takes a replica through its life. It is the replica's only goroutine.
func (l *Local) live(n *node, hands Node, r *replica, o Order) {
	defer close(r.gone)
	defer r.lose(nil) // frees the contexts
	if err := l.start(hands, r, o); err != nil {
		r.back = r.wanted.Err() != nil && r.alive.Err() == nil // before it is stopped, which ends it
		r.outside = endedFromOutside(r.alive)
		l.stop(n, r)
		l.end(n, r, false, afterwards(r, err))
		return
	}
	l.serve(n, r)
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

// start brings the replica to Ready.
func (l *Local) start(n Node, r *replica, o Order) error {
	begin := time.Now()
	ctx, cancel := context.WithTimeoutCause(r.wanted, l.cfg.StartTimeout, fmt.Errorf("not ready within %v", l.cfg.StartTimeout))
	defer cancel()
	started, err := n.Start(ctx, o)
	if err != nil {
		return because(ctx, fmt.Errorf("start: %w", err))
	}
	began := time.Now()
	phases := []Phase{{"order", began.Sub(begin)}} // on its way and in the node's queue: what the other phases leave
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
		select { // a broken connection is seen before the end of the process that explains it
		case <-ctx.Done():
		case <-time.After(causeWait):
		}
		return because(ctx, err)
	}
	l.ready(r, hello, begin, began)
	l.cfg.Changed()
	return nil
}

// ready notes that the replica has said that it is; begin is when it was ordered, began when its process ran.
func (l *Local) ready(r *replica, hello wire.Hello, begin, began time.Time) {
	now := time.Now()
	place := Phase{"place", now.Sub(began)}
	l.mu.Lock()
	defer l.mu.Unlock()
	if hello.Load > 0 { // in the replica itself: it has no zygote
		load := min(hello.Load, place.Took)
		if i := slices.IndexFunc(r.phases, func(p Phase) bool { return p.Name == "load" }); i >= 0 {
			r.phases[i].Took += load // of what it maps, before
		} else {
			r.phases = append(r.phases, Phase{"load", load})
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
	l.note(r, Event{Kind: Ready, Path: r.path, Phases: []Phase{{"load", hello.Load}, {"place", hello.Place}}})
}

// afterwards adds what the process said when it was stopped because of err: a watchdog says then what its program listens on instead.
func afterwards(r *replica, err error) error {
	if cause := context.Cause(r.alive); cause != nil && !errors.Is(err, cause) {
		return fmt.Errorf("%w; when it was stopped: %w", err, cause)
	}
	return err
}

// because adds why ctx ended, if it did, to what that led to.
func because(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
		return fmt.Errorf("%w: %w", cause, err)
	}
	return err
}

// drain lets the replica finish its calls, and those that requests still send it because they have
// begun on its revision. It waits for DrainTimeout, or longer until the deadlines of these
// requests.
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
	l.cfg.Log.Warn("replica stopped with work left; it is tried elsewhere", "function", r.function, "replica", r.name, "error", err)
	l.cfg.Replicas.Lost(r.function, r.name, deathOf(err))
}

// stopMargin is how long a node may take to stop a replica, beyond the grace.
const stopMargin = 5 * time.Second

// stop makes sure that no process is left, also when l is being aborted. What may be left on a node that is away is stopped
// when it returns.
func (l *Local) stop(n *node, r *replica) {
	hands := l.reach(n)
	if hands == nil {
		l.cfg.Log.Info("replica ends with its connection; its node is silent", "function", r.function, "replica", r.name, "node", r.node)
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(l.ctx), l.cfg.Grace+stopMargin)
	defer cancel()
	if err := hands.Stop(ctx, r.name, l.cfg.Grace); err != nil {
		l.cfg.Log.Error("replica's process may still run", "function", r.function, "replica", r.name, "node", r.node, "error", err)
	}
	now := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.DeleteFunc(n.stopped, func(_ string, at time.Time) bool { return now.Sub(at) >= missingFor })
	n.stopped[r.name] = now
}

var errRemoved = errors.New("the function was removed")

// removed tells whether a function is not deployed any more.
func (l *Local) removed(function pipeline.Key) bool {
	return !slices.ContainsFunc(l.cfg.Functions.Functions(), func(f FunctionSpec) bool { return f.Key == function })
}

// end forgets the replica and records how it ended. busy says that it had calls; failed is why it
// did not start, or nil.
func (l *Local) end(n *node, r *replica, busy bool, failed error) {
	removed := (failed != nil || r.alive.Err() != nil) && l.removed(r.function)
	l.mu.Lock()
	at := l.now()
	e, cause := Event{Kind: Stopped}, ""
	switch {
	case l.ctx.Err() != nil:
		e.Cause = ErrClosed.Error()
	case removed: // its line went first, and its connection with it
		e.Cause = errRemoved.Error()
	case r.back: // no failure
		e.Cause = context.Cause(r.wanted).Error()
	case failed != nil:
		e, cause = Event{Kind: Failed, Cause: failed.Error()}, failed.Error()
	case r.state == plan.Draining: // that its process ended is what was wanted
		if e.Cause = r.stuck; e.Cause == "" && r.alive.Err() != nil {
			e.Cause = context.Cause(r.alive).Error()
		}
	case r.alive.Err() != nil:
		e = Event{Kind: Lost, Cause: context.Cause(r.alive).Error()}
		// The end of a replica says nothing about the next start if it had calls, was ready for a
		// while, or was ended by something else.
		death, lived := deathOf(context.Cause(r.alive)), at.Sub(r.since)
		if !busy && !death.Busy && death.End == task.EndItself && lived < settle {
			cause = fmt.Sprintf("lost %v after it was ready: %s", lived.Round(time.Millisecond), e.Cause)
		}
	}
	delete(l.replicas, r.name)
	l.byName = nil
	l.dropLocked(n)
	l.note(r, e)
	f := l.of(r.function)
	noHopeWhy, noRevival := "", ""
	if r.revived && e.Kind == Failed {
		noRevival = f.unrevived(r.spec.Revision, at, failed, !r.outside)
	}
	why := cause
	if e.Kind == Lost {
		why = e.Cause
	}
	if r.device != "" && strings.Contains(why, wire.OutOfMemoryOn) { // the device's trouble, not the function's
		l.bar(r, false, at, why)
		cause = ""
	}
	if cause != "" {
		f.failure.add(r, at, cause, r.outside, l.cfg.Chance())
		var rest []*replica
		for _, other := range l.replicas {
			if other.function == r.function {
				rest = append(rest, other)
			}
		}
		if r.spec.Revision == f.failure.revision {
			noHopeWhy = noHope(r.spec, &f.failure, rest)
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
	if noHopeWhy != "" {
		l.cfg.Lines.Fail(r.function, r.spec.Revision, noHopeWhy)
	}
	l.cfg.Changed()
}

// note writes an event of r down; l.mu is held.
func (l *Local) note(r *replica, e Event) {
	e.At, e.Function, e.Replica, e.Node = stamp(), r.function, r.name, r.node
	l.of(r.function).timeline.add(e)
	l.cfg.Event(e)
}

// lost is the error of a replica that ended without an order to.
type lost struct{ task.Death }

// Error returns the cause.
func (l lost) Error() string { return l.Cause }

// endedFromOutside reports whether a replica's context has ended because something else than the
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

// Answered tells that a replica gave its first answer, some time after it was attached, and how long that call took.
func (l *Local) Answered(replica string, after, call time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r := l.replicas[replica]; r != nil {
		r.answered, r.first = max(l.now().Sub(r.begun), 1), call
		l.metrics.starts.WithLabelValues(firstInference, r.path).Observe(call.Seconds())
		l.of(r.function).failure.worked(r.spec.Revision, r.since)
		l.note(r, Event{Kind: Answered, Phases: []Phase{{"since attached", after}, {firstInference, call}}})
	}
}

// firstInference is the last phase of a start. It comes after the total, since a replica may have nothing to do for long.
const firstInference = "first inference"

// started returns the phases of the start as far as it has come; Local.mu is held. A first answer may be known before what came
// before it.
func (r *replica) started() []Phase {
	all := slices.Clone(r.phases)
	if r.answered > 0 {
		all = append(all, Phase{firstInference, r.first})
	}
	return all
}
