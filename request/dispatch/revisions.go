package dispatch

import (
	"cmp"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

const redeployed = "no replica is left of the revision that the request began with"

// join adds the item to its request's pin.
func (c *Core) join(it *item) {
	it.needs = it.task.Pinned(c.cfg.Function)
	if it.task.Together || it.needs != 0 {
		it.pin = c.pins.add(it.task, it.needs)
	}
	if r := it.revision(); r != 0 && r != c.only {
		c.strict = true
	}
}

// part undoes join.
func (c *Core) part(now time.Time, it *item, code task.Code) {
	c.pins.end(now, it.pin, it.task, code)
	it.pin = nil
}

// revision returns the revision that a waiting item needs; 0: any.
func (it *item) revision() uint64 {
	if it.needs != 0 || it.pin == nil {
		return it.needs
	}
	return it.pin.revision
}

// survey updates c.only and c.strict after replicas came, left or began to drain. It also handles
// tasks whose revision has no replica any more; see miss.
func (c *Core) survey() {
	c.only, c.strict = 0, len(c.replicas) > 0 && c.draining == len(c.replicas)
	for _, r := range c.replicas {
		c.only = c.replicas[0].revision
		c.strict = c.strict || r.revision != c.only
	}
	c.reviving = slices.DeleteFunc(c.reviving, func(r uint64) bool { return !c.absent(r) })
	for _, all := range c.lines() {
		for _, it := range all {
			c.miss(it)
			r := it.revision()
			c.strict = c.strict || r != 0 && r != c.only
		}
	}
}

// absent reports whether a revision has no replica and no plan will start one.
func (c *Core) absent(revision uint64) bool {
	return revision != 0 && revision != c.cfg.Revision &&
		!slices.ContainsFunc(c.replicas, func(r *replica) bool { return r.revision == revision })
}

// miss handles a waiting item whose revision is absent. If the item's request has used no answer of
// that revision, the item may run on any other. Otherwise miss asks for a replica of the revision.
func (c *Core) miss(it *item) {
	r := it.revision()
	if !c.absent(r) {
		return
	}
	if !it.pin.used {
		c.pins.fix(it.pin, 0)
		return
	}
	if !slices.Contains(c.reviving, r) {
		c.reviving = append(c.reviving, r)
		c.do(Revive{Revision: r})
	}
}

// none answers the tasks of a revision that has no replica and gets none.
func (c *Core) none(now time.Time, ev NoReplica) {
	if !c.absent(ev.Revision) {
		return
	}
	c.reviving = slices.DeleteFunc(c.reviving, func(r uint64) bool { return r == ev.Revision })
	for _, it := range c.waitingFor(ev.Revision) {
		c.end(now, it, task.Redeployed, redeployed+": "+ev.Cause)
	}
}

// waitingFor returns the items that wait for one of the revisions, in order of arrival. Without
// revisions, it returns all waiting items.
func (c *Core) waitingFor(revisions ...uint64) []*item {
	var found []*item
	for _, all := range c.lines() {
		for _, it := range all {
			if len(revisions) == 0 || slices.Contains(revisions, it.revision()) {
				found = append(found, it)
			}
		}
	}
	slices.SortFunc(found, func(a, b *item) int { return cmp.Compare(a.seq, b.seq) })
	return found
}

// serving reports whether a revision has a replica that does not drain.
func (c *Core) serving(revision uint64) bool {
	for i, r := range c.replicas {
		if r.revision == revision && !c.view.Replicas[i].Draining {
			return true
		}
	}
	return false
}

// fits reports whether a task that is not a suspect may go to the i-th replica. revision is the
// revision that the task needs; 0: any.
func (c *Core) fits(revision uint64, i int) bool {
	return c.replicas[i].suspect == nil && c.suits(revision, i)
}

// suits reports whether the i-th replica may run tasks that need the given revision; 0: any. A
// draining replica takes only tasks that no other replica can run.
func (c *Core) suits(revision uint64, i int) bool {
	if c.replicas[i].full {
		return false
	}
	draining := c.view.Replicas[i].Draining
	if revision == 0 {
		return !draining
	}
	return c.replicas[i].revision == revision && (!draining || !c.serving(revision))
}

// needed reports whether requests may still send tasks to the i-th replica, which is draining and
// idle.
func (c *Core) needed(i int) bool {
	r := c.replicas[i]
	return !r.full && c.pins.revisions[r.revision] > 0 && !c.serving(r.revision)
}

// Due returns the latest deadline of a replica's tasks, and of the requests that still need its
// revision. It returns zero if there are none.
func (c *Core) Due(name string) time.Time {
	i, ok := c.find(name)
	if !ok {
		return time.Time{}
	}
	due := time.Time{}
	if c.needed(i) {
		due = c.pins.due(c.replicas[i].revision)
	}
	for _, b := range c.replicas[i].batches {
		for _, it := range b.items {
			if it != nil && it.state == running && it.task.Deadline.After(due) {
				due = it.task.Deadline
			}
		}
	}
	return due
}

// vacant reports whether some replica has a free slot.
func (c *Core) vacant() bool {
	return slices.ContainsFunc(c.view.Replicas, func(r task.Replica) bool { return r.Busy < r.Slots })
}

// first returns the earliest item in the line that fits the i-th replica and whose revision is not
// in c.blocked, or nil. If i is negative, items need not fit. The search usually ends at the head
// of the line; only items that are pinned to revisions make it longer.
func (c *Core) first(i int) *item { return c.search(0, i, nil) }

// search does what first does, but only in the subtree of the heap whose root has the index at. It
// returns best unless it finds an earlier item.
func (c *Core) search(at, i int, best *item) *item {
	if at >= c.line.len() {
		return best
	}
	it := c.line.items[at]
	if best != nil && !c.line.less(it, best) {
		return best
	}
	if r := it.revision(); !slices.Contains(c.blocked, r) && (i < 0 || c.fits(r, i)) {
		return it
	}
	return c.search(2*at+2, i, c.search(2*at+1, i, best))
}

// mask returns the view for a task that needs a revision: replicas that do not fit look as if they
// drained, and all others as if they did not.
func (c *Core) mask(revision uint64) *task.View {
	replicas := append(c.masked.Replicas[:0], c.view.Replicas...)
	c.masked = c.view
	for i := range replicas {
		replicas[i].Draining = !c.fits(revision, i)
	}
	c.masked.Replicas = replicas
	return &c.masked
}
