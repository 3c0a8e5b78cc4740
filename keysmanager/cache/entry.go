package cache

import "time"

// state is what an entry has in memory.
type state uint8

const (
	empty state = iota
	loading
	ready
)

// entry is one set of parameters; see the package comment.
type entry[K comparable] struct {
	name       K
	prev, next *entry[K] // in the order of their use

	state    state
	bytes    int64 // expected if it loads, measured if it is ready
	holds    int
	replicas int
	parked   int
	keyStage bool // of a key stage

	wanted  bool
	stale   bool
	settled bool      // Settled was returned
	since   time.Time // when functions stopped using it; zero: they use it

	rests time.Duration // of a worker; 0: it is none
	idle  time.Time     // since when a worker has been idle; zero: it was busy at the latest sample

	fails int       // failed loads in a row
	ends  int       // times in a row that its process ended soon after it had loaded
	retry time.Time // it is not loaded before
}

// busy reports whether an entry must not be evicted.
func (e *entry[K]) busy() bool { return e.state == loading || e.holds > 0 || e.replicas > 0 }

// failed counts a failed load. That of a stale entry does not count.
func (e *entry[K]) failed(now time.Time) {
	if !e.stale {
		e.fails++
		e.retry = now.Add(Backoff(e.fails))
	}
}

// ended empties an entry whose process has ended by itself.
func (e *entry[K]) ended(now time.Time, lived time.Duration) {
	if lived > longLife {
		e.ends = 0
	}
	e.ends++
	e.retry = now.Add(min(Backoff(e.ends-1), lastBackoffOfEnds))
	e.state, e.bytes, e.parked = empty, 0, 0
}

// mayRest reports whether a worker stays.
func (e *entry[K]) mayRest(now time.Time) bool {
	if e.busy() {
		e.idle = time.Time{}
		return true
	}
	if e.idle.IsZero() {
		e.idle = now
	}
	return now.Sub(e.idle) < e.rests
}

// order is the entries in the order of their use: the least recently used one is the first.
type order[K comparable] struct{ first, last *entry[K] }

// append makes an entry, which is not in the order, the most recently used.
func (o *order[K]) append(e *entry[K]) {
	if e.prev, e.next = o.last, nil; o.last == nil {
		o.first = e
	} else {
		o.last.next = e
	}
	o.last = e
}

// take takes an entry out of the order.
func (o *order[K]) take(e *entry[K]) {
	if e.prev == nil {
		o.first = e.next
	} else {
		e.prev.next = e.next
	}
	if e.next == nil {
		o.last = e.prev
	} else {
		e.next.prev = e.prev
	}
}

// mark records which entries are those of key stages: the named ones, and no others.
func (o *order[K]) mark(entries map[K]*entry[K], names []K) {
	for e := o.first; e != nil; e = e.next {
		e.keyStage = false
	}
	for _, name := range names {
		if e := entries[name]; e != nil {
			e.keyStage = true
		}
	}
}

// unpark takes all parked children away and reports whether there were any.
func (o *order[K]) unpark() (found bool) {
	for e := o.first; e != nil; e = e.next {
		found = found || e.parked > 0
		e.parked = 0
	}
	return found
}

// idle returns the idle entries to evict for a number of bytes, in order, and how many bytes are
// missing even then. Those of key stages come last, and only if keyStages is set.
func (o *order[K]) idle(bytes int64, keyStages bool) (victims []*entry[K], missing int64) {
	for _, key := range [...]bool{false, true} {
		if key && !keyStages {
			break
		}
		for e := o.first; e != nil && bytes > 0; e = e.next {
			if e.state == ready && !e.busy() && e.keyStage == key {
				victims = append(victims, e)
				bytes -= e.bytes
			}
		}
	}
	return victims, max(bytes, 0)
}

// latest returns the later of two times.
func latest(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}
