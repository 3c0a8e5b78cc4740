package dispatch

// The two orders in which items are sorted.
const (
	byKey = iota // of the waiting line
	byDue        // of the timers
)

// heap is a binary heap of items. It knows the index of each item, so any item can be removed or
// moved.
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

// set adds the item or moves it to its place.
func (h *heap) set(it *item) {
	i := int(it.pos[h.by]) - 1
	if i < 0 {
		h.items = append(h.items, it)
		i = len(h.items) - 1
	}
	h.settle(it, i)
}

// drop removes the item if it is in the heap.
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

// schedule puts the item into the timers h under its due time.
func (h *heap) schedule(it *item) {
	if it.due.IsZero() {
		h.drop(it)
		return
	}
	h.set(it)
}

// settle puts the item at i, then moves it up or down to restore the order.
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
