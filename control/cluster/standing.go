package cluster

import (
	"cmp"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// Standing is the status of the deployed revision of a function.
type Standing struct {
	Wanted int // wanted number of replicas
	Ready  int // its replicas that take requests
	Older  int // replicas of older revisions that take requests
	// consecutive failed starts of this revision, if one failed by itself; Until is wall clock
	// time.
	Failing plan.Failure
	// Why it has fewer replicas than wanted, as the latest plan says; empty: all have a place.
	Short string
	// Why there is no place for a replica now or soon; empty: there is or may be one.
	Nowhere string
}

// Standing returns the status of a revision of a function. scale is what its owner declared. The
// status is right from the deploy on, even before a plan knows the revision.
func (l *Local) Standing(key pipeline.Key, revision uint64, scale pipeline.Scale) Standing {
	l.mu.Lock()
	defer l.mu.Unlock()
	var none function
	k := cmp.Or(l.functions[key], &none)
	st := Standing{Wanted: k.wanted(revision, scale, l.now())}
	if k.planned.revision == revision {
		st.Short, st.Nowhere = k.planned.short, k.planned.nowhere
	}
	if k.failure.revision == revision && k.failure.same > 0 {
		st.Failing = k.failure.Failure
		st.Failing.Until = l.told(st.Failing.Until)
	}
	for _, r := range l.sorted() {
		switch {
		case r.function != key || r.state != plan.Ready || r.released:
		case r.spec.Revision == revision:
			st.Ready++
		default:
			st.Older++
		}
	}
	return st
}

// planned is the latest applied plan's decision for a function.
type planned struct {
	rev      uint64 // of the plan's Snapshot; 0: no plan knew the function
	revision uint64 // of the function
	count    int
	short    string
	nowhere  string
}

// plannedAs records a plan's decision for the function. nowhere says why the function has no place;
// empty: it has one.
func (k *function) plannedAs(rev uint64, w plan.Want, nowhere string) {
	k.planned = planned{rev, w.Revision, len(w.Slots), w.Short, nowhere}
	if w.Short != "" && !w.Denied { // replicas without a place are wanted too
		k.planned.count = max(len(w.Slots), k.least, 1)
	}
}

// wanted returns how many replicas the function should have, according to the latest plan. After a
// later deploy or wish, it returns what the next plan will say unless load asks for more.
func (k *function) wanted(revision uint64, s pipeline.Scale, now time.Time) int {
	if _, pinned := k.pin.at(now); pinned {
		return 1
	}
	p, w := k.planned, k.wish
	if w != nil && (w.revision != 0 && w.revision != revision || w.rev != 0 && w.rev <= p.rev) {
		w = nil // the wish ended with its revision, or the plan includes it
	}
	if p.revision == revision && w == nil {
		return p.count
	}
	f := plan.Function{Min: s.Min, Max: s.Max, Zero: s.Zero}
	least, most := f.Bounds()
	switch {
	case w != nil && w.replicas == 0:
		return 0
	case w != nil:
		least = max(s.Min, w.replicas)
	case !s.Zero:
	case p.rev == 0 && s.ZeroAge > 0: // it stays awake until it has been idle for ZeroAge
		least = s.Min
	case p.count == 0:
		return 0
	default:
		least = max(s.Min, 1)
	}
	return min(max(p.count, least), most)
}
