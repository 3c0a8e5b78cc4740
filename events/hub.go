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
	At       time.Time         `json:"at"`
	Kind     string            `json:"kind"` // such as replica.ready, function.deployed, function.scaled, request.dead, zygote.evicted
	Function pipeline.Key      `json:"function,omitzero"`
	Replica  string            `json:"replica,omitempty"`
	Node     string            `json:"node,omitempty"`
	Call     string            `json:"call,omitempty"`   // X-Call-Id
	Path     string            `json:"path,omitempty"`   // how a replica came up: fork, cold, process
	Phases   map[string]string `json:"phases,omitempty"` // how long each part of a start took
	From     *int              `json:"from,omitempty"`   // replicas, of a decision on a function's scale
	To       *int              `json:"to,omitempty"`
	Why      string            `json:"why,omitempty"`
}

// Bounds of what is kept.
const (
	kept     = 1024 // events for those who come back
	buffered = 256  // events that a listener may be behind
)

// Hub keeps the latest events and has listeners. Its methods are safe for concurrent use.
type Hub struct {
	run string // the same for all events of a process, different from that of any other

	mu        sync.Mutex
	last      uint64 // number of the latest event, from 1
	ring      [kept]Event
	listeners map[*listener]struct{}
	closed    bool
}

// listener is a stream of events to somebody.
type listener struct {
	filter filter
	events chan numbered // closed when it is cut off, or with the hub
	missed int           // since it was cut off; with the hub's mu held
	cut    bool
}

// numbered is an event with its place in the hub's sequence.
type numbered struct {
	n     uint64
	event Event
}

// New returns a Hub whose events' ids begin with run, which no other process on the same state has had.
func New(run uint64) *Hub {
	return &Hub{run: strconv.FormatUint(run, 36), listeners: map[*listener]struct{}{}}
}

// Publish gives e to all who listen. It does not block; At is set to now if it is zero.
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

// offer gives the listener an event, or cuts it off; the hub's mu is held.
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

// Latest returns at most n of the latest events, oldest first.
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

// listen begins a stream after the event with that id; an empty one: with what happens from now on. gone is how many events
// after that id are not kept any more. false: the hub is closed.
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
	from := uint64(0) // of another process: all of this one's are new
	if run, n, ok := strings.Cut(after, "-"); ok && run == h.run {
		from, _ = strconv.ParseUint(n, 10, 64) // 0 of what is no number
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

// Close ends all streams. What is published afterwards is kept for nobody.
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

// filter says which events somebody wants.
type filter struct{ function, namespace string }

func (f filter) wants(e *Event) bool {
	if f.namespace != "" && e.Function.Namespace != f.namespace {
		return false
	}
	return f.function == "" || e.Function == pipeline.Named(f.function, f.namespace)
}
