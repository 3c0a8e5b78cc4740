package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// Apply carries out p: it orders missing replicas and releases the replicas that p does not want.
// It returns at once; replicas start and stop later. It skips functions that were redeployed or
// removed since p's snapshot, because the next plan decides about them.
//
// The lines follow p's routing tables and ranks before any replica is released, so no task is sent
// to a lane whose replicas have just gone.
func (l *Local) Apply(_ context.Context, p plan.Plan) error {
	l.applying.Lock() // the lines get plans in the order in which they are applied
	defer l.applying.Unlock()
	l.mu.Lock()
	closed, late := l.closed, p.Rev < l.applied
	if !closed && !late && p.Epoch == l.cfg.Reign() {
		l.applied = p.Rev
	}
	l.mu.Unlock()
	switch {
	case closed:
		return ErrClosed
	case p.Epoch != l.cfg.Reign():
		return fmt.Errorf("plan of epoch %d, want %d: %w", p.Epoch, l.cfg.Reign(), plan.ErrStale)
	case late:
		return fmt.Errorf("a plan of a later snapshot was applied: %w", plan.ErrStale)
	}
	now := l.now()
	l.mu.Lock()
	p.Wants = unbatched(p.Wants, func(function string) bool {
		k := l.functions[pipeline.ParseKey(function)]
		if k == nil {
			return false
		}
		_, pinned := k.pin.at(now)
		return pinned
	})
	l.mu.Unlock()
	l.cfg.Lines.Publish(&p)
	failed, err := l.apply(p, l.cfg.Functions.Functions())
	if err != nil {
		return err
	}
	for _, f := range failed {
		if f.deployed {
			l.cfg.Lines.Fail(f.function, f.revision, f.cause)
		} else {
			l.cfg.Lines.NoReplica(f.function, f.revision, f.cause)
		}
	}
	return nil
}

// unbatched returns wants in which pinned functions have batches of all sizes, whatever a policy
// chose, because they are being measured.
func unbatched(wants []plan.Want, pinned func(function string) bool) []plan.Want {
	copied := false
	for i := range wants {
		if !pinned(wants[i].Function) {
			continue
		}
		if !copied {
			wants, copied = slices.Clone(wants), true
		}
		wants[i].Batch = math.MaxInt32 // the line knows the declared one
	}
	return wants
}

// failedFunction is a function whose waiting tasks are answered now, because no replica of a
// revision can be started.
type failedFunction struct {
	function pipeline.Key
	revision uint64
	deployed bool // the revision is the deployed one, so all tasks that may run on it fail
	cause    string
}

func (l *Local) apply(p plan.Plan, specs []FunctionSpec) (failed []failedFunction, err error) {
	now := l.now()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed { // meanwhile
		return nil, ErrClosed
	}
	l.gather(specs)
	defer l.scatter()
	for i := range p.Wants {
		w := p.Wants[i]
		key := pipeline.ParseKey(w.Function)
		k := l.functions[key]
		if k == nil || k.deployed == nil || k.deployed.Revision != w.Revision {
			continue
		}
		spec := k.deployed
		if pin, ok := k.pin.at(now); ok {
			w.CPUMilli = pin.CPUMilli
		}
		never := ""
		if len(w.Slots) == 0 && w.Short != "" && !w.Denied {
			never = lackText(l.lacking(&spec.Function, now))
		}
		missing := l.reconcile(p.Rev, w, k.mine, never != "")
		all := k.mine
		if len(k.hidden) > 0 {
			all = slices.Concat(all, k.hidden)
		}
		failure := &k.failure
		failure.follow(spec.Revision)
		cause := nowhere(w, k.bars.now(now), never)
		k.plannedAs(p.Rev, w, cause)
		if cause != "" && !alive(all) {
			failed = append(failed, failedFunction{function: key, revision: spec.Revision, deployed: true, cause: fmt.Sprintf("function %q %s", key, cause)})
		}
		if now.Before(failure.Until) {
			if cause := gaveUpCause(*spec, failure, all); cause != "" {
				failed = append(failed, failedFunction{function: key, revision: spec.Revision, deployed: true, cause: cause})
			}
			continue
		}
		if failure.Count > 0 { // one replica at a time is enough to find out whether starts work again
			trying := slices.ContainsFunc(k.mine, func(r *replica) bool { return r.state == plan.Starting && !r.released })
			missing = missing[:min(len(missing), 1)]
			if trying {
				missing = nil
			}
		}
		for _, slot := range missing {
			l.order(p.Rev, *spec, w, slot)
		}
	}
	failed = append(failed, l.revive(p.Rev)...)
	l.warmAll(p)
	return failed, nil
}

// gather adds each function's spec and replicas to its entry in l.functions, until scatter removes
// them. It releases replicas of functions that are no longer deployed. The caller holds l.mu.
func (l *Local) gather(specs []FunctionSpec) {
	for i := range specs {
		l.of(specs[i].Key).deployed = &specs[i]
	}
	for _, r := range l.sorted() {
		switch k := r.home; {
		case k.deployed == nil:
			r.release(errRemoved)
		case r.hidden: // a plan knows nothing of it
			k.hidden = append(k.hidden, r)
		default:
			k.mine = append(k.mine, r)
		}
	}
}

// scatter ends what gather began; l.mu is held.
func (l *Local) scatter() {
	for _, k := range l.functions {
		clear(k.mine)
		k.mine, k.hidden, k.deployed = k.mine[:0], nil, nil
	}
}

// reconcile releases the function's replicas that w does not want, and returns the slots without a
// replica. never says that no node could hold a replica of w.
func (l *Local) reconcile(rev uint64, w plan.Want, have []*replica, never bool) (missing []plan.Slot) {
	for _, slot := range w.Slots {
		if slot.Replica == "" {
			missing = append(missing, slot)
		}
	}
	keep := keeping(w.Slots)
	waits := overlap(w, keep, have)
	// Replicas of revisions that w does not want:
	//   - The newest revision with a ready replica serves until w's revision has a ready replica.
	//     If w has no slots although a node could hold w's revision, the older replicas are
	//     released earlier, to make room.
	//   - Starting replicas are released, except revived ones, for which requests wait.
	//   - All other replicas are released. They finish their calls first.
	serving := newest(have)
	for _, r := range have {
		switch {
		case r.released:
		case keep.has(r.name):
			r.wantCPU(w.CPUMilli)
		case r.ordered < rev && (r.seen == 0 || r.seen > rev):
			// It came back into sight after the plan's snapshot.
		case r.spec.Revision != w.Revision:
			waitedFor := r.revived && r.state == plan.Starting
			if !waitedFor && (len(w.Slots) == 0 && !never || r.spec.Revision < serving || r.state == plan.Starting) {
				r.release(fmt.Errorf("replaced by revision %d", w.Revision))
			}
		case r.ordered >= rev: // ordered by this plan when it was applied before
			if i := slices.IndexFunc(missing, func(s plan.Slot) bool { return s.Node == r.node && s.Device == r.device }); i >= 0 {
				missing = slices.Delete(missing, i, i+1)
			}
		case waits > 0 && stays(l, r):
			waits-- // until a replica elsewhere is ready
		default:
			r.release(errors.New(cmp.Or(r.unfit, w.Why, "not wanted")))
		}
	}
	return missing
}

// kept are the replicas that slots are for.
type kept struct {
	slots []plan.Slot
	names map[string]bool // nil: slots are few
}

func keeping(slots []plan.Slot) kept {
	const few = 16
	k := kept{slots: slots}
	if len(slots) > few {
		k.names = make(map[string]bool, len(slots))
		for i := range slots {
			k.names[slots[i].Replica] = true
		}
	}
	return k
}

// has reports whether one of the slots is for a replica.
func (k kept) has(replica string) bool {
	if k.names != nil {
		return k.names[replica]
	}
	for i := range k.slots {
		if k.slots[i].Replica == replica {
			return true
		}
	}
	return false
}

// gaveUpCause returns why a function has no replica and will not have one soon, or "" if it has one
// or may have one soon.
func gaveUpCause(spec FunctionSpec, failing *failure, have []*replica) (cause string) {
	if !failing.givesUp() || alive(have) {
		return ""
	}
	return fmt.Sprintf("function %q: no replica starts, %d failed in a row, the next is tried at %s; the last one: %s",
		spec.Key, failing.Count, failing.Until.UTC().Format(time.TimeOnly), failing.Cause)
}
