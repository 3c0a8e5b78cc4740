package dispatch

import (
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

const redeployed = "no replica is left of the revision that the request began with"

// join adds the item to its request's pin.
func (l *Lane) join(it *item) {
	it.needs = it.task.Pinned(l.name)
	if it.task.Together || it.needs != 0 {
		it.pin = l.pins.add(it.task, it.needs)
	}
	if r := it.revision(); r != 0 && r != l.only {
		l.strict = true
	}
}

// part undoes join.
func (l *Lane) part(now time.Time, it *item, code task.Code) {
	l.pins.end(now, it.pin, it.task, code)
	it.pin = nil
}

// revision returns the revision that a waiting item needs; 0: any.
func (it *item) revision() uint64 {
	if it.needs != 0 || it.pin == nil {
		return it.needs
	}
	return it.pin.revision
}

// survey updates l.only and l.strict after replicas came, left or began to drain. It also handles
// tasks whose revision has no replica any more; see miss.
func (l *Lane) survey() {
	l.only, l.strict = 0, len(l.replicas) > 0 && l.draining == len(l.replicas)
	for _, r := range l.replicas {
		l.only = l.replicas[0].revision
		l.strict = l.strict || r.revision != l.only
	}
	l.reviving = slices.DeleteFunc(l.reviving, func(r uint64) bool { return !l.absent(r) })
	if l.Waiting() == 0 {
		return
	}
	for it := range l.all {
		l.miss(it)
		r := it.revision()
		l.strict = l.strict || r != 0 && r != l.only
	}
}

// absent reports whether a revision has no replica and no plan will start one.
func (l *Lane) absent(revision uint64) bool {
	return revision != 0 && revision != l.revision && !l.has(revision)
}

// miss handles a waiting item whose revision is absent. If the item's request has used no answer of
// that revision, the item may run on any other. Otherwise miss asks for a replica of the revision.
func (l *Lane) miss(it *item) {
	r := it.revision()
	if !l.absent(r) {
		return
	}
	if !it.pin.used {
		l.pins.fix(it.pin, 0)
		return
	}
	if !slices.Contains(l.reviving, r) {
		l.reviving = append(l.reviving, r)
		l.core.do(Revive{Lane: l.name, Revision: r})
	}
}

// none answers the tasks of a revision that has no replica and gets none.
func (l *Lane) none(now time.Time, ev NoReplica) {
	if !l.absent(ev.Revision) {
		return
	}
	l.reviving = slices.DeleteFunc(l.reviving, func(r uint64) bool { return r == ev.Revision })
	for _, it := range l.waitingFor(ev.Revision) {
		l.core.end(now, it, task.Redeployed, redeployed+": "+ev.Cause)
	}
}

// needed reports whether requests may still send tasks to the i-th replica, which is draining and
// idle.
func (l *Lane) needed(i int) bool {
	r := l.replicas[i]
	return !r.full && !l.removed && l.pins.revisions[r.revision] > 0 && !l.serving(r.revision)
}

// Due returns the latest deadline of a replica's tasks, and of the requests that still need its
// revision. It returns zero if there are none.
func (l *Lane) Due(name string) time.Time {
	i, ok := l.find(name)
	if !ok {
		return time.Time{}
	}
	due := time.Time{}
	if l.needed(i) {
		due = l.pins.due(l.replicas[i].revision)
	}
	for _, b := range l.replicas[i].batches {
		for _, it := range b.items {
			if it != nil && it.state == running && it.task.Deadline.After(due) {
				due = it.task.Deadline
			}
		}
	}
	return due
}
