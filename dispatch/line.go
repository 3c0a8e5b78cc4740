package dispatch

import (
	"time"

	"github.com/stagecoach-serving/stagecoach/task"
)

// stage of an item's life.
type state uint8

const (
	waiting state = iota
	running       // on a replica
	ended         // replied to, but the replica has not answered: its slot is still taken
)

// item is a task that the Core knows.
type item struct {
	task     *task.Task
	seq      uint64    // order of arrival
	key      float64   // its place in the line; lower first
	until    time.Time // when the key expires; zero: never
	due      time.Time // when the timers look at it next
	limit    time.Time // when its call has to have ended, set when it is sent; zero: never
	pos      [2]int32  // index in each heap plus 1; 0: not in it
	state    state
	reserved bool   // a replica is reserved for it, or runs it alone
	batch    *batch // while running or ended
	call     int
	pin      *pin // of its request; nil: the task may run on any revision
}

// batch is what a replica runs in one slot.
type batch struct {
	id      uint64
	replica *replica
	items   []*item // nil once answered
	left    int     // calls without an answer
	sent    time.Time
	whole   bool // no call was cut short, and none was made to measure, so its time says how long the work takes

	oneItem [1]*item // memory of items and of the tasks that are sent, when there is one
	oneTask [1]*task.Task
}

// The two orders in which items are kept.
const (
	byKey = iota // the waiting line
	byDue        // timers
)

// heap is a binary heap of items that knows where each of them is, so that any can be removed or moved.
type heap struct {
	by    int
	items []*item
}

func (h *heap) less(a, b *item) bool {
	if h.by == byKey {
		return a.key < b.key || a.key == b.key && a.seq < b.seq
	}
	c := a.due.Compare(b.due)
	return c < 0 || c == 0 && a.seq < b.seq
}

func (h *heap) len() int { return len(h.items) }

// set puts the item where its order says, whether it is in the heap or not.
func (h *heap) set(it *item) {
	i := int(it.pos[h.by]) - 1
	if i < 0 {
		h.items = append(h.items, it)
		i = len(h.items) - 1
	}
	h.settle(it, i)
}

// drop takes the item out, if it is in.
func (h *heap) drop(it *item) {
	i := int(it.pos[h.by]) - 1
	if i < 0 {
		return
	}
	it.pos[h.by] = 0
	last := len(h.items) - 1
	moved := h.items[last]
	h.items[last] = nil
	h.items = h.items[:last]
	if i < last {
		h.settle(moved, i)
	}
}

// settle places it at i or, to keep the order, above or below.
func (h *heap) settle(it *item, i int) {
	for i > 0 {
		up := (i - 1) / 2
		if !h.less(it, h.items[up]) {
			break
		}
		h.put(h.items[up], i)
		i = up
	}
	for {
		down := 2*i + 1
		if down >= len(h.items) {
			break
		}
		if right := down + 1; right < len(h.items) && h.less(h.items[right], h.items[down]) {
			down = right
		}
		if !h.less(h.items[down], it) {
			break
		}
		h.put(h.items[down], i)
		i = down
	}
	h.put(it, i)
}

func (h *heap) put(it *item, i int) {
	h.items[i] = it
	it.pos[h.by] = int32(i + 1)
}
