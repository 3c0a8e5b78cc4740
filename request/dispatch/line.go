package dispatch

import (
	"cmp"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

// state is a phase of an item's life.
type state uint8

const (
	waiting state = iota
	running       // on a replica
	ended         // replied to, but the replica has not answered: the slot is still taken
)

// item is a task that the Core knows.
type item struct {
	task     *task.Task
	lane     *Lane     // where it waits, or whose replica runs it; nil: no lane takes it
	home     *Lane     // the lane that the table chose, which may be another one; nil: as lane
	seq      uint64    // order of arrival
	key      float64   // place in the line; lower goes first
	until    time.Time // when the key expires; zero: never
	due      time.Time // when the timers look at it next
	limit    time.Time // when its call must end, set when it is sent; zero: never
	pos      [2]int32  // index in each heap plus 1; 0: not in it
	state    state
	reserved bool   // a replica is reserved for it or runs it alone
	call     int32  // index into the batch
	needs    uint64 // revision that its coordinator wants; 0: any
	batch    *batch // set while running or ended
	pin      *pin   // pin of its request; nil: the task may run on any revision
	flow     *flow  // of its application, in a line that is shared by application
}

// batch is what a replica runs in one slot.
type batch struct {
	id      uint64
	replica *replica
	items   []*item   // an entry is nil once answered
	sent    time.Time // when it was sent
	left    int32     // number of unanswered calls
	charge  float32   // seconds per task that the shares of applications were charged; 0: none
	// No call was cut short or ignored by measuring, so the batch's time counts as service time.
	whole bool

	oneItem [1]*item // backs items and the sent tasks if the batch has one task
	oneTask [1]*task.Task
}

// line holds the waiting tasks of a lane.
type line struct {
	sorted   heap     // waiting tasks that are not suspects, unless fair is set
	suspects []*item  // waiting suspects, in the order of the line
	fair     *fair    // shares the replicas between applications; nil: keys decide
	blocked  []uint64 // revisions whose tasks are held and may be passed; reused by dispatch
}

// Waiting returns the number of tasks that wait, suspects included.
func (q *line) Waiting() int {
	if q.fair != nil {
		return q.fair.waiting + len(q.suspects)
	}
	return q.sorted.len() + len(q.suspects)
}

// put adds a waiting item that is no suspect, or moves it if its key has changed.
func (q *line) put(it *item) {
	if q.fair != nil {
		q.fair.put(it)
		return
	}
	q.sorted.set(it)
}

// take removes an item that is no suspect, if it waits.
func (q *line) take(it *item) {
	if q.fair != nil {
		q.fair.take(it)
		return
	}
	q.sorted.drop(it)
}

// restore puts an item back that was taken and not sent.
func (q *line) restore(it *item) {
	if q.fair != nil {
		q.fair.restore(it)
		return
	}
	q.sorted.set(it)
}

// less reports whether a goes before b.
func (q *line) less(a, b *item) bool {
	if q.fair != nil {
		return q.fair.less(a, b)
	}
	return q.sorted.less(a, b)
}

// all returns the waiting items in no order.
func (q *line) all(yield func(*item) bool) {
	heaps := [][]*item{q.sorted.items, q.suspects}
	if q.fair != nil {
		for _, f := range q.fair.flows {
			heaps = append(heaps, f.line.items)
		}
	}
	for _, h := range heaps {
		for _, it := range h {
			if !yield(it) {
				return
			}
		}
	}
}

// waitingFor returns the items that wait for one of the revisions, in order of arrival. Without
// revisions, it returns all waiting items.
func (q *line) waitingFor(revisions ...uint64) []*item {
	var found []*item
	for it := range q.all {
		if len(revisions) == 0 || slices.Contains(revisions, it.revision()) {
			found = append(found, it)
		}
	}
	slices.SortFunc(found, func(a, b *item) int { return cmp.Compare(a.seq, b.seq) })
	return found
}

// oldest returns when the first of the waiting tasks came; zero: none waits. arrival says that the
// line is in order of arrival.
func (q *line) oldest(arrival bool) (since time.Time) {
	if arrival && q.sorted.len() > 0 {
		since = q.sorted.items[0].task.Entered
	} else if !arrival {
		for it := range q.all {
			since = earlier(since, it.task.Entered)
		}
	}
	for _, it := range q.suspects {
		since = earlier(since, it.task.Entered)
	}
	return since
}

// first returns the earliest item that fits the i-th replica and whose revision is not in
// q.blocked, or nil. If i is negative, items need not fit. Suspects do not count. The search
// usually ends at the head of the line; only items that are pinned to revisions make it longer.
func (q *line) first(f *fleet, i int) *item {
	if q.fair == nil {
		return q.search(f, &q.sorted, 0, i, nil)
	}
	for _, app := range q.fair.flows {
		if it := q.search(f, &app.line, 0, i, nil); it != nil {
			return it
		}
	}
	return nil
}

// search does what first does, but only in the subtree of a heap whose root has the index at. It
// returns best unless it finds an earlier item.
func (q *line) search(f *fleet, h *heap, at, i int, best *item) *item {
	if at >= h.len() {
		return best
	}
	it := h.items[at]
	if best != nil && !h.less(it, best) {
		return best
	}
	if r := it.revision(); !slices.Contains(q.blocked, r) && (i < 0 || f.fits(r, i)) {
		return it
	}
	return q.search(f, h, 2*at+2, i, q.search(f, h, 2*at+1, i, best))
}
