package events

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// Event is something that happened. Its JSON is what listeners get.
type Event struct {
	At time.Time `json:"at"`
	// For example replica.ready, function.deployed, function.scaled, request.dead, zygote.evicted.
	Kind     string       `json:"kind"`
	Function pipeline.Key `json:"function,omitzero"`
	Replica  string       `json:"replica,omitempty"`
	Node     string       `json:"node,omitempty"`
	Call     string       `json:"call,omitempty"` // X-Call-Id
	// How a replica started: fork, cold or process.
	Path   string            `json:"path,omitempty"`
	Phases map[string]string `json:"phases,omitempty"` // duration of each phase of a start
	// old number of replicas, if a function was scaled.
	From *int   `json:"from,omitempty"`
	To   *int   `json:"to,omitempty"`
	Why  string `json:"why,omitempty"`
}

// Bounds of memory.
const (
	kept     = 1024 // events for listeners that reconnect
	buffered = 256  // events that a listener may lag behind
)

// Hub keeps the latest events and sends events to listeners. Its methods are safe for concurrent
// use.
type Hub struct {
	run string // same for all events of a process, and unique among processes

	mu        sync.Mutex
	last      uint64 // number of the latest event, from 1
	ring      [kept]Event
	listeners map[*listener]struct{}
	closed    bool
}

// listener is one stream of events.
type listener struct {
	filter filter
	events chan numbered // closed when the listener is cut off, or with the hub
	missed int           // events since the cut; guarded by the hub's mu
	cut    bool
}

// numbered is an event with its number in the hub.
type numbered struct {
	n     uint64
	event Event
}

// New returns a Hub. Its events' ids begin with run, which no earlier process with the same state
// may have used.
func New(run uint64) *Hub {
	return &Hub{run: strconv.FormatUint(run, 36), listeners: map[*listener]struct{}{}}
}

// Publish sends e to all listeners. It does not block. If At is zero, Publish sets it to now.
func (h *Hub) Publish(e Event) {
	if e.At.IsZero() {
		e.At = time.Now().UTC()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.last++
	h.ring[h.last%kept] = e
	for l := range h.listeners {
		l.offer(numbered{h.last, e})
	}
}

// offer gives the listener an event, or cuts it off. The caller holds the hub's mu.
func (l *listener) offer(e numbered) {
	if !l.filter.wants(&e.event) {
		return
	}
	if !l.cut {
		select {
		case l.events <- e:
			return
		default:
			l.cut = true
			close(l.events)
		}
	}
	l.missed++
}

// Latest returns up to n of the latest events, oldest first.
func (h *Hub) Latest(n int) []Event {
	h.mu.Lock()
	defer h.mu.Unlock()
	var out []Event
	for k := h.last; k > 0 && h.last-k < kept && len(out) < n; k-- {
		out = append(out, h.ring[k%kept])
	}
	slices.Reverse(out)
	return out
}

// listen begins a stream after the event with the id after, or with new events if after is empty.
// gone is how many events after that id are not kept any more. open is false if the hub is closed.
func (h *Hub) listen(f filter, after string) (l *listener, replay []numbered, gone uint64, open bool) {
	l = &listener{filter: f, events: make(chan numbered, buffered)}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, nil, 0, false
	}
	h.listeners[l] = struct{}{}
	if after == "" {
		return l, nil, 0, true
	}
	from := uint64(0) // an id of another process: all events of this one are new
	if run, n, ok := strings.Cut(after, "-"); ok && run == h.run {
		from, _ = strconv.ParseUint(n, 10, 64) // 0 if n is not a number
	}
	oldest := uint64(1)
	if h.last > kept {
		oldest = h.last - kept + 1
	}
	if from+1 < oldest {
		gone = oldest - from - 1
	}
	for n := max(from+1, oldest); n <= h.last; n++ {
		if e := h.ring[n%kept]; f.wants(&e) {
			replay = append(replay, numbered{n, e})
		}
	}
	return l, replay, gone, true
}

// leave ends a stream and returns how many events it has missed.
func (h *Hub) leave(l *listener) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.listeners, l)
	return l.missed
}

// Close ends all streams. Later events are dropped.
func (h *Hub) Close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	for l := range h.listeners {
		if !l.cut {
			l.cut = true
			close(l.events)
		}
	}
}

func (h *Hub) id(n uint64) string { return fmt.Sprintf("%s-%d", h.run, n) }

// filter selects events.
type filter struct{ function, namespace string }

func (f filter) wants(e *Event) bool {
	if f.namespace != "" && e.Function.Namespace != f.namespace {
		return false
	}
	return f.function == "" || e.Function == pipeline.Named(f.function, f.namespace)
}
