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
func (c *Core) queue(it *item) {
	if !it.task.Alone {
		c.line.set(it)
		return
	}
	c.suspects = slices.DeleteFunc(c.suspects, func(other *item) bool { return other == it })
	i, _ := slices.BinarySearchFunc(c.suspects, it, func(other, it *item) int {
		if c.line.less(other, it) {
			return -1
		}
		return 1
	})
	c.suspects = slices.Insert(c.suspects, i, it)
}

// unqueue removes a waiting item from the line and releases the replica reserved for it.
func (c *Core) unqueue(it *item) {
	if !it.task.Alone {
		c.line.drop(it)
		return
	}
	c.suspects = slices.DeleteFunc(c.suspects, func(other *item) bool { return other == it })
	if i := c.reservation(it); i >= 0 {
		c.unreserve(i)
	}
}

// lines returns the waiting items: first the line, then the suspects. They are not sorted.
func (c *Core) lines() [2][]*item { return [2][]*item{c.line.items, c.suspects} }

// reservation returns the index of the replica that is reserved for a suspect, or -1.
func (c *Core) reservation(it *item) int {
	if !it.reserved {
		return -1
	}
	return slices.IndexFunc(c.replicas, func(r *replica) bool { return r.suspect == it })
}

func (c *Core) reserve(i int, it *item) {
	c.replicas[i].suspect, it.reserved = it, true
	c.reserved++
}

// unreserve ends the reservation of the i-th replica, if it has one.
func (c *Core) unreserve(i int) {
	if it := c.replicas[i].suspect; it != nil {
		c.replicas[i].suspect, it.reserved = nil, false
		c.reserved--
	}
}

// isolate reserves replicas for the suspects that come before head, and sends each suspect whose
// replica is idle. head is the first other task that could run now; nil: there is none. isolate
// reports whether it has reserved or sent anything.
func (c *Core) isolate(now time.Time, head *item) bool {
	changed := false
	for k := 0; k < len(c.suspects); {
		it := c.suspects[k]
		at := c.reservation(it)
		if at < 0 && (head != nil && c.line.less(head, it) || c.reservationsFull(it.revision())) {
			k++ // a later suspect may already have a replica
			continue
		}
		i := c.leastBusy(it, at)
		if i != at {
			changed = true
			if at >= 0 {
				c.unreserve(at)
			}
			if i >= 0 {
				c.reserve(i, it)
			}
		}
		if i < 0 || c.view.Replicas[i].Busy > 0 {
			k++
			continue
		}
		c.suspects = slices.Delete(c.suspects, k, k+1)
		c.send(now, i, []*item{it})
		changed = true
	}
	return changed
}

// reservationsFull reports whether half of the replicas, but at least one, are reserved for
// suspects. revision is the revision that a suspect needs; 0: any. Draining replicas do not count.
// But if all replicas of the revision drain, only these replicas count.
func (c *Core) reservationsFull(revision uint64) bool {
	draining := revision != 0 && !c.serving(revision)
	all, reserved := 0, 0
	for i, r := range c.replicas {
		if c.view.Replicas[i].Draining != draining || draining && r.revision != revision {
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
func (c *Core) leastBusy(it *item, at int) int {
	best, revision := -1, it.revision()
	if at >= 0 && c.view.Replicas[at].Slots > 0 && c.suits(revision, at) {
		best = at
	}
	for i := range c.replicas {
		r := &c.view.Replicas[i]
		if r.Slots == 0 || !c.fits(revision, i) {
			continue
		}
		if best < 0 || r.Busy < c.view.Replicas[best].Busy && (best != at || r.Busy == 0) {
			best = i
		}
	}
	return best
}

// blame returns what the loss of a replica means for each of its unanswered tasks.
func (r *replica) blame(code task.Code, end task.End) task.Blame {
	calls := 0
	for _, b := range r.batches {
		calls += b.left
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
