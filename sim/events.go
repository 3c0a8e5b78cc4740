package sim

// kind is the kind of an event. i is the index of the pipeline or stage that the event is about.
type kind uint8

// The kinds of events.
const (
	arrives  kind = iota // a request of pipeline i
	submits              // data is the *task.Task that reaches the line of stage i
	expects              // a request that has begun reaches stage i later
	cancels              // data is the *cancel that reaches the line of stage i
	leaves               // data is the request that sends no more tasks to stage i
	ends                 // data is the *running batch of stage i that has ended
	replies              // data is the *task.Reply that reaches the coordinator of pipeline i
	deadline             // of requests; the coordinator of pipeline i asked to wake then
	wakes                // the line of stage i asked to wake then
	ready                // data is the *replica that has started
	dies                 // data is the *replica whose process ends
	loaded               // data is the *zygote whose parameters are loaded
	ticks                // control ticks
	samples              // a sample of the series over time
)

// event is something that will happen at an instant, in ns since the run began.
type event struct {
	at   int64
	seq  uint64 // order of scheduling
	data any    // a pointer, or nil
	i    int32
	kind kind
}

// events is a heap, ordered by time and then by order of scheduling. Each node has four children.
// So the heap is half as deep as a binary heap, and siblings share cache lines of the processor.
type events struct {
	heap []event
	seq  uint64
}

func (h *events) push(at int64, k kind, i int, data any) {
	h.seq++
	e := event{at: at, seq: h.seq, data: data, i: int32(i), kind: k}
	h.heap = append(h.heap, e)
	place := len(h.heap) - 1
	for place > 0 {
		up := (place - 1) / 4
		if p := &h.heap[up]; p.at <= at { // an event at the same time was scheduled before
			break
		}
		h.heap[place] = h.heap[up]
		place = up
	}
	h.heap[place] = e
}

// pop removes and returns the first event. The heap must not be empty.
func (h *events) pop() event {
	first := h.heap[0]
	last := len(h.heap) - 1
	e := h.heap[last]
	h.heap[last].data = nil
	h.heap = h.heap[:last]
	at := 0
	for {
		child := 4*at + 1
		if child >= last {
			break
		}
		best := child
		for k := child + 1; k < min(child+4, last); k++ {
			if h.heap[k].before(&h.heap[best]) {
				best = k
			}
		}
		if !h.heap[best].before(&e) {
			break
		}
		h.heap[at] = h.heap[best]
		at = best
	}
	if last > 0 {
		h.heap[at] = e
	}
	return first
}

func (e *event) before(f *event) bool { return e.at < f.at || e.at == f.at && e.seq < f.seq }
