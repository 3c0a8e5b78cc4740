package dispatch

import (
	"cmp"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/task"
)

// pin keeps tasks of one request, of which there are several, to replicas of one revision while any of them waits or runs here.
// What the request knows of earlier ones comes with its tasks, see task.Task.
type pin struct {
	revision uint64 // 0: none of them has been placed
	tasks    int    // that wait or run
}

// linger is how long the last replicas of a revision wait, once idle, after they answered one task of several: what its
// coordinator sends next for the same request is on its way.
const linger = 500 * time.Millisecond

const redeployed = "the function was redeployed, and no replica is left of the revision that the request began with"

// join makes the item one of its request's.
func (c *Core) join(it *item) {
	if it.task.Together || it.task.Revision != 0 {
		p := c.pins[it.task.Request]
		if p == nil {
			p = &pin{}
			c.pins[it.task.Request] = p
		}
		p.tasks++
		p.revision = cmp.Or(p.revision, it.task.Revision)
		it.pin = p
	}
	if r := it.revision(); r != 0 && r != c.only {
		c.strict = true
	}
}

// part ends what join began.
func (c *Core) part(now time.Time, it *item) {
	if it.batch != nil {
		it.batch.replica.together = now
	}
	if it.pin.tasks--; it.pin.tasks == 0 {
		delete(c.pins, it.task.Request)
	}
	it.pin = nil
}

// revision returns the one that a waiting item must have; 0: any.
func (it *item) revision() uint64 {
	if it.task.Revision != 0 || it.pin == nil {
		return it.task.Revision
	}
	return it.pin.revision
}

// survey looks, after replicas came, went or began to drain, whether it matters which task goes to which replica, and ends
// tasks that no replica will ever run.
func (c *Core) survey(now time.Time) {
	c.only, c.strict = 0, len(c.replicas) > 0 && c.draining == len(c.replicas)
	for _, r := range c.replicas {
		c.only = c.replicas[0].revision
		c.strict = c.strict || r.revision != c.only
	}
	var ends []*item
	for _, it := range c.line.items {
		r := it.revision()
		c.strict = c.strict || r != 0 && r != c.only
		if c.gone(r) {
			ends = append(ends, it)
		}
	}
	slices.SortFunc(ends, func(a, b *item) int { return cmp.Compare(a.seq, b.seq) })
	for _, it := range ends {
		c.end(now, it, task.Redeployed, redeployed)
	}
}

// gone says that there is no replica of a revision and will be none.
func (c *Core) gone(revision uint64) bool {
	return revision != 0 && revision != c.cfg.Revision &&
		!slices.ContainsFunc(c.replicas, func(r *replica) bool { return r.revision == revision })
}

// serving says that some replica of a revision does not drain.
func (c *Core) serving(revision uint64) bool {
	for i, r := range c.replicas {
		if r.revision == revision && !c.view.Replicas[i].Draining {
			return true
		}
	}
	return false
}

// fits says whether a task that must have a revision, or any for 0, may go to the i-th replica. One that drains takes those that
// have nowhere else to go.
func (c *Core) fits(revision uint64, i int) bool {
	if c.replicas[i].full {
		return false
	}
	draining := c.view.Replicas[i].Draining
	if revision == 0 {
		return !draining
	}
	return c.replicas[i].revision == revision && (!draining || !c.serving(revision))
}

// needed says whether requests may still have tasks for the i-th replica, which drains and is idle.
func (c *Core) needed(now time.Time, i int) bool {
	r := c.replicas[i]
	if r.full || c.serving(r.revision) {
		return false
	}
	for _, p := range c.pins {
		if p.revision == r.revision && p.revision != 0 {
			return true
		}
	}
	until := r.together.Add(linger)
	if r.together.IsZero() || r.revision == 0 || !until.After(now) {
		return false
	}
	c.lingers = earlier(c.lingers, until)
	return true
}

// vacant says whether some replica has a free slot.
func (c *Core) vacant() bool {
	return slices.ContainsFunc(c.view.Replicas, func(r task.Replica) bool { return r.Busy < r.Slots })
}

// first returns the first in the line of a revision that is not blocked, and that fits the i-th replica unless i is negative; nil:
// there is none. It looks no further than it must: where nothing is pinned, at the head alone.
func (c *Core) first(i int) *item { return c.search(0, i, nil) }

// search is first below a place in the line's heap, if that is before best.
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

// mask is the view of a task that must have a revision: replicas that it does not fit seem to drain, and others do not.
func (c *Core) mask(revision uint64) *task.View {
	replicas := append(c.masked.Replicas[:0], c.view.Replicas...)
	c.masked = c.view
	for i := range replicas {
		replicas[i].Draining = !c.fits(revision, i)
	}
	c.masked.Replicas = replicas
	return &c.masked
}
