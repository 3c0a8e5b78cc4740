package dispatch

import (
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

// A suspect is a task whose earlier replica ended (see task.Task.Alone). It runs in a batch of one
// on a replica that is reserved for it. From the reservation until the suspect's answer, the
// replica gets no other task. So if this replica ends too, no other call can have caused that.
//
// Suspects keep their places among the other tasks. When no other task comes before a suspect, it
// takes an idle replica. If no replica is idle, it reserves the replica with the fewest batches and
// waits until these batches are done. At most half of the replicas are reserved at a time, but at
// least one may always be. Draining replicas are counted separately, per revision, because they run
// only tasks of their revision.

// queue adds a waiting item to the line, or moves it if its key has changed.
func (q *line) queue(it *item) {
	if !it.task.Alone {
		q.put(it)
		return
	}
	q.suspects = slices.DeleteFunc(q.suspects, func(other *item) bool { return other == it })
	i, _ := slices.BinarySearchFunc(q.suspects, it, func(other, it *item) int {
		if q.less(other, it) {
			return -1
		}
		return 1
	})
	q.suspects = slices.Insert(q.suspects, i, it)
}

// unqueue removes a waiting item from the line and releases the replica reserved for it.
func (q *line) unqueue(f *fleet, it *item) {
	if !it.task.Alone {
		q.take(it)
		return
	}
	q.suspects = slices.DeleteFunc(q.suspects, func(other *item) bool { return other == it })
	if i := f.reservation(it); i >= 0 {
		f.unreserve(i)
	}
}

// reservation returns the index of the replica that is reserved for a suspect, or -1.
func (f *fleet) reservation(it *item) int {
	if !it.reserved {
		return -1
	}
	return slices.IndexFunc(f.replicas, func(r *replica) bool { return r.suspect == it })
}

func (f *fleet) reserve(i int, it *item) {
	f.replicas[i].suspect, it.reserved = it, true
	f.reserved++
}

// unreserve ends the reservation of the i-th replica, if it has one.
func (f *fleet) unreserve(i int) {
	if it := f.replicas[i].suspect; it != nil {
		f.replicas[i].suspect, it.reserved = nil, false
		f.reserved--
	}
}

// isolate reserves replicas for the suspects that come before head, and sends each suspect whose
// replica is idle. head is the first other task that could run now; nil: there is none. isolate
// reports whether it has reserved or sent anything.
func (l *Lane) isolate(now time.Time, head *item) bool {
	changed := false
	if l.fair != nil { // the places of applications have moved
		slices.SortStableFunc(l.suspects, func(a, b *item) int {
			if l.less(a, b) {
				return -1
			}
			return 1
		})
	}
	for k := 0; k < len(l.suspects); {
		it := l.suspects[k]
		at := l.reservation(it)
		if at < 0 && (head != nil && l.less(head, it) || l.reservationsFull(it.revision())) {
			k++ // a later suspect may already have a replica
			continue
		}
		i := l.leastBusy(it, at)
		if i != at {
			changed = true
			if at >= 0 {
				l.unreserve(at)
			}
			if i >= 0 {
				l.reserve(i, it)
			}
		}
		if i < 0 || l.view.Replicas[i].Busy > 0 {
			k++
			continue
		}
		l.suspects = slices.Delete(l.suspects, k, k+1)
		l.send(now, i, []*item{it})
		changed = true
	}
	return changed
}

// reservationsFull reports whether half of the replicas, but at least one, are reserved for
// suspects. revision is the revision that a suspect needs; 0: any. Draining replicas do not count.
// But if all replicas of the revision drain, only these replicas count.
func (f *fleet) reservationsFull(revision uint64) bool {
	draining := revision != 0 && !f.serving(revision)
	all, reserved := 0, 0
	for i, r := range f.replicas {
		if f.view.Replicas[i].Draining != draining || draining && r.revision != revision {
			continue
		}
		all++
		if r.suspect != nil {
			reserved++
		}
	}
	return reserved >= max(all/2, 1)
}

// leastBusy returns the index of the replica with the fewest batches among those that may run a
// suspect, or -1. at is the index of the replica that is reserved for the suspect, or -1. The
// suspect keeps that replica, unless another one is idle or the replica can no longer run the
// suspect.
func (f *fleet) leastBusy(it *item, at int) int {
	best, revision := -1, it.revision()
	if at >= 0 && f.view.Replicas[at].Slots > 0 && f.suits(revision, at) {
		best = at
	}
	for i := range f.replicas {
		r := &f.view.Replicas[i]
		if r.Slots == 0 || !f.fits(revision, i) {
			continue
		}
		if best < 0 || r.Busy < f.view.Replicas[best].Busy && (best != at || r.Busy == 0) {
			best = i
		}
	}
	return best
}

// blame returns what the loss of a replica means for each of its unanswered tasks.
func (r *replica) blame(code task.Code, end task.End) task.Blame {
	calls := 0
	for _, b := range r.batches {
		calls += int(b.left)
	}
	switch {
	case code != task.ReplicaLost:
		return task.BlameNone
	case end == task.EndShared, r.stuck != "":
		// The call that made the replica stuck is answered already.
		return task.BlameShared
	case calls > 1:
		return task.BlameCompany
	case end == task.EndItself:
		return task.BlameAlone
	default:
		return task.BlameUnclear
	}
}
