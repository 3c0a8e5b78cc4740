package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/plan"
)

// Apply brings the cluster to p. It orders missing replicas and releases those that p does not
// want. It returns at once; replicas start and stop later. Functions that were redeployed or
// removed since p's snapshot are left to the next plan.
func (l *Local) Apply(_ context.Context, p plan.Plan) error {
	all := l.cfg.Functions.Functions()
	specs := make(map[pipeline.Key]*FunctionSpec, len(all))
	for i := range all {
		specs[all[i].Key] = &all[i]
	}
	failed, err := l.apply(p, specs)
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

// hopelessFunction is a function whose waiting tasks are answered now, because no replica of a
// revision can be started.
type hopelessFunction struct {
	function pipeline.Key
	revision uint64
	deployed bool // the revision is the deployed one, so all tasks that may run on it fail
	cause    string
}

func (l *Local) apply(p plan.Plan, specs map[pipeline.Key]*FunctionSpec) (failed []hopelessFunction, err error) {
	now := l.now()
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
		return nil, ErrClosed
	case p.Epoch != l.cfg.Epoch:
		return nil, fmt.Errorf("plan of epoch %d, want %d: %w", p.Epoch, l.cfg.Epoch, plan.ErrStale)
	case p.Rev < l.applied:
		return nil, fmt.Errorf("a plan of a later snapshot was applied: %w", plan.ErrStale)
	}
	l.applied = p.Rev
	mine := map[pipeline.Key][]*replica{}
	hidden := map[pipeline.Key][]*replica{} // plans know nothing of these
	for _, r := range l.sorted() {
		switch _, ok := specs[r.function]; {
		case !ok:
			r.release(errRemoved)
		case r.hidden:
			hidden[r.function] = append(hidden[r.function], r)
		default:
			mine[r.function] = append(mine[r.function], r)
		}
	}
	for _, w := range p.Wants {
		key := pipeline.ParseKey(w.Function)
		spec, ok := specs[key]
		if !ok || spec.Revision != w.Revision {
			continue
		}
		if pin, ok := l.of(key).pin.at(now); ok {
			w.CPUMilli = pin.CPUMilli
		}
		never := ""
		if len(w.Slots) == 0 && w.Short != "" && !w.Denied {
			never = lackText(l.lacking(spec.resources(), now))
		}
		missing := l.reconcile(p.Rev, w, mine[key], never != "")
		all := mine[key]
		if out := hidden[key]; len(out) > 0 {
			all = slices.Concat(all, out)
		}
		bars, failure := &l.of(key).bars, &l.of(key).failure
		failure.follow(spec.Revision)
		cause := nowhere(w, bars.now(now), never)
		l.of(key).plannedAs(p.Rev, w, cause)
		if cause != "" && !alive(all) {
			failed = append(failed, hopelessFunction{function: key, revision: spec.Revision, deployed: true, cause: fmt.Sprintf("function %q %s", key, cause)})
		}
		if now.Before(failure.Until) {
			if cause := noHope(*spec, failure, all); cause != "" {
				failed = append(failed, hopelessFunction{function: key, revision: spec.Revision, deployed: true, cause: cause})
			}
			continue
		}
		// One replica at a time is enough to find out whether starts work again.
		if failure.Count > 0 {
			trying := slices.ContainsFunc(mine[key], func(r *replica) bool { return r.state == plan.Starting && !r.released })
			missing = missing[:min(len(missing), 1)]
			if trying {
				missing = nil
			}
		}
		for _, slot := range missing {
			l.order(p.Rev, *spec, w, slot)
		}
	}
	failed = append(failed, l.revive(p.Rev, specs)...)
	l.warmAll(p, specs)
	return failed, nil
}

// reconcile releases the function's replicas that w does not want, and returns the slots without a
// replica. never says that no node could hold a replica of w.
func (l *Local) reconcile(rev uint64, w plan.Want, have []*replica, never bool) (missing []plan.Slot) {
	keep := map[string]bool{}
	for _, slot := range w.Slots {
		if slot.Replica == "" {
			missing = append(missing, slot)
		}
		keep[slot.Replica] = true
	}
	// Until the wanted revision has a ready replica, the newest revision with a ready one serves.
	// If the wanted revision finds no room now, the older one makes room. Replicas of other
	// revisions only finish their calls; those that are not ready have none.
	serving := newest(have)
	for _, r := range have {
		switch {
		case r.released:
		case keep[r.name]:
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
		default:
			r.release(errors.New(cmp.Or(r.unfit, w.Why, "not wanted")))
		}
	}
	return missing
}

// noHope returns why a function has no replica and will not have one soon, or "" if it has one or
// may have one soon.
func noHope(spec FunctionSpec, failing *failure, have []*replica) (cause string) {
	if !failing.hopeless() || alive(have) {
		return ""
	}
	return fmt.Sprintf("function %q: no replica starts, %d failed in a row, the next is tried at %s; the last one: %s",
		spec.Key, failing.Count, failing.Until.UTC().Format(time.TimeOnly), failing.Cause)
}
