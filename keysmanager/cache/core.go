package cache

import (
	"iter"
	"time"
)

// Core is the cache of one node, without clock, goroutines or I/O. K names entries. It is not safe
// for concurrent use. New makes one.
type Core[K comparable] struct {
	entries map[K]*entry[K]
	order   order[K]
	coming  int64     // expected sizes of loads under way
	pressed bool      // an eviction has begun and has not reached CalmBelow
	calm    time.Time // until then, nothing is done ahead of need
	now     time.Time // latest time of a step
	fx      []Effect
}

// New returns a Core without entries.
func New[K comparable]() *Core[K] { return &Core[K]{entries: map[K]*entry[K]{}} }

// Step applies an event and returns the effects to carry out. If now is before the time of an
// earlier step, Step uses that earlier step's time. The returned slice is valid until the next
// Step; the effects in it stay valid.
func (c *Core[K]) Step(now time.Time, ev Event) []Effect {
	clear(c.fx)
	c.fx = c.fx[:0]
	c.now = latest(now, c.now)
	switch ev := ev.(type) {
	case Hold[K]:
		c.hold(ev.Key)
	case Release[K]:
		c.release(ev.Key)
	case Want[K]:
		c.want(c.now, ev)
	case Loaded[K]:
		c.loaded(ev)
	case Weighed:
		c.expire(c.now)
		c.press(c.now, ev.Bounds)
	case Mark[K]:
		c.order.mark(c.entries, ev.Keys)
	default:
		c.change(ev)
	}
	return c.fx
}

// change applies an event that cannot add an entry.
func (c *Core[K]) change(ev Event) {
	switch ev := ev.(type) {
	case Failed[K]:
		if e := c.entries[ev.Key]; e != nil && e.state != ready {
			c.arrive(e)
			e.failed(c.now)
		}
	case Ended[K]:
		if e := c.entries[ev.Key]; e != nil && e.state == ready {
			e.ended(c.now, ev.Lived)
		}
	case Using[K]:
		if e := c.entries[ev.Key]; e != nil {
			e.replicas, e.parked, e.wanted, e.rests = ev.Replicas, ev.Parked, ev.Wanted, ev.Rests
		}
	case Invalidate[K]:
		if e := c.entries[ev.Key]; e != nil && !e.stale {
			c.invalidate(c.now, e)
		}
	case Drop[K]:
		if e := c.entries[ev.Key]; e != nil && e.state == ready && !e.busy() {
			c.end(e, Evict[K]{Why: Asked})
		}
	}
}

func (c *Core[K]) do(e Effect) { c.fx = append(c.fx, e) }

// add returns the entry of a name. A new one is the most recently used.
func (c *Core[K]) add(name K) *entry[K] {
	e := c.entries[name]
	if e == nil {
		e = &entry[K]{name: name}
		c.entries[name] = e
		c.order.append(e)
	}
	return e
}

// remove forgets an entry. Its next stays valid for a loop over the order.
func (c *Core[K]) remove(e *entry[K]) {
	c.order.take(e)
	delete(c.entries, e.name)
}

// end evicts an entry.
func (c *Core[K]) end(e *entry[K], effect Evict[K]) {
	c.remove(e)
	effect.Key, effect.Since = e.name, e.since
	c.do(effect)
}

func (c *Core[K]) hold(name K) {
	e := c.add(name)
	e.holds++
	c.order.take(e)
	c.order.append(e)
}

func (c *Core[K]) release(name K) {
	e := c.entries[name]
	if e == nil || e.holds == 0 {
		return
	}
	e.holds--
	c.settle(e)
}

// settle emits Settled once no order holds a stale entry any more. It does so only once, although
// the adoption of another process with the same name may hold the entry again.
func (c *Core[K]) settle(e *entry[K]) {
	if e.stale && e.holds == 0 && !e.settled {
		e.settled = true
		c.do(Settled[K]{e.name})
	}
}

// load begins the load of an empty entry.
func (c *Core[K]) load(e *entry[K], bytes int64) {
	e.state, e.bytes = loading, bytes
	c.coming += bytes
	c.do(Load[K]{e.name})
}

// arrive ends a load, with nothing in memory yet.
func (c *Core[K]) arrive(e *entry[K]) {
	if e.state == loading {
		c.coming -= e.bytes
		e.state, e.bytes = empty, 0
	}
}

func (c *Core[K]) loaded(l Loaded[K]) {
	e := c.add(l.Key)
	late := e.stale && e.state == loading
	if c.arrive(e); late {
		c.do(Discard[K]{l.Key})
		return
	}
	e.state, e.bytes, e.fails = ready, l.Bytes, 0
}

func (c *Core[K]) invalidate(now time.Time, e *entry[K]) {
	e.stale, e.since = true, now
	if e.state == loading {
		c.do(Cancel[K]{e.name})
	}
	c.settle(e)
}

// expire ends and forgets idle entries that nothing wants any more.
func (c *Core[K]) expire(now time.Time) {
	for e := c.order.first; e != nil; e = e.next {
		switch {
		case e.rests > 0 && e.mayRest(now):
		case e.rests > 0:
			c.drop(e, Rested)
		case e.wanted:
			e.since = time.Time{}
		case !e.busy():
			c.drop(e, Unused)
		case e.since.IsZero():
			e.since = now
		}
	}
}

// drop evicts an idle entry that nothing wants, or forgets it if it is empty.
func (c *Core[K]) drop(e *entry[K], why Reason) {
	if e.state == ready {
		c.end(e, Evict[K]{Why: why})
		return
	}
	c.remove(e)
	c.do(Forget[K]{e.name})
}

// Entry is what the core knows of an entry.
type Entry struct {
	Loading, Ready bool
	Stale          bool // see [Invalidate]
	KeyStage       bool // see [Mark]
	Bytes          int64
	Holds          int
	Replicas       int
	Fails          int       // failed loads in a row
	Ends           int       // times in a row that its process ended soon after it had loaded
	Retry          time.Time // it is not loaded before; zero, or in the past: it may be
	Since          time.Time // when functions stopped using it; zero: they use it
}

// Busy reports whether the entry loads, is held or has replicas.
func (e Entry) Busy() bool { return e.Loading || e.Holds > 0 || e.Replicas > 0 }

// Get returns an entry, or the zero Entry and false.
func (c *Core[K]) Get(name K) (Entry, bool) {
	e := c.entries[name]
	if e == nil {
		return Entry{}, false
	}
	return Entry{
		Loading: e.state == loading, Ready: e.state == ready, Stale: e.stale, KeyStage: e.keyStage,
		Bytes: e.bytes, Holds: e.holds, Replicas: e.replicas, Fails: e.fails, Ends: e.ends, Retry: e.retry, Since: e.since,
	}, true
}

// Keys returns the names of all entries, least recently used first. The loop must not step the
// core.
func (c *Core[K]) Keys() iter.Seq[K] {
	return func(yield func(K) bool) {
		for e := c.order.first; e != nil && yield(e.name); e = e.next {
		}
	}
}

// Len returns the number of entries.
func (c *Core[K]) Len() int { return len(c.entries) }
