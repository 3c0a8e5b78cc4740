package keysmanager

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/cache"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
)

// slot is the manager's side of an entry of the cache. The cache knows who holds the entry, and
// when it may be loaded or evicted. The slot has the process, and what orders wait for.
type slot struct {
	loading  chan struct{}           // closed when the load has ended; nil: none is under way
	cancel   context.CancelCauseFunc // gives that load up
	need     need                    // of that load
	pid      int                     // of its process; 0: it has not begun
	function string                  // that it was loaded for
	zygote   *zygote.Zygote          // nil: none
	used     time.Time               // by a start, the latest
	keeping                          // of a key stage
	failed   uint64                  // loads that failed, ever
	err      error                   // of the latest failed load, or why the latest zygote ended
	guests   map[string]bool         // functions that a worker has had replicas of
	// Closed when no order forks from it any more; nil: it was not invalidated.
	settled chan struct{}
}

<<<<<<< HEAD
// slots are a node's slots and the cache that decides about them. Each entry of the cache has a slot.
// They are a part of the store, whose mutex is held when a method is called.
=======
// slots are a node's slots and the cache that decides about them. Each entry of the cache has a
// slot.
>>>>>>> cache
type slots struct {
	cache *cache.Core[zygote.Key]
	all   map[zygote.Key]*slot
}

func newSlots() *slots {
	return &slots{cache: cache.New[zygote.Key](), all: map[zygote.Key]*slot{}}
}

// Peek returns the slot of a key, if there is one.
func (s *slots) Peek(k zygote.Key) (*slot, bool) {
	is, ok := s.all[k]
	return is, ok
}

// Keys returns the keys of all slots, least recently used first.
func (s *slots) Keys() []zygote.Key { return slices.Collect(s.cache.Keys()) }

// Values returns all slots, least recently used first.
func (s *slots) Values() (all []*slot) {
	for k := range s.cache.Keys() {
		all = append(all, s.all[k])
	}
	return all
}

// Len returns the number of slots.
func (s *slots) Len() int { return s.cache.Len() }

// Entry returns what the cache knows of a slot.
func (s *slots) Entry(k zygote.Key) cache.Entry {
	e, _ := s.cache.Get(k)
	return e
}

// visit notes that a worker has, or had, a replica of a function.
func (s *slots) visit(k zygote.Key, function string) {
	if worker, ok := s.Peek(k); ok {
		if worker.guests == nil {
			worker.guests = map[string]bool{}
		}
		worker.guests[function] = true
	}
}

// parkedZygotes returns the zygotes that have parked children, least recently used first.
func (s *slots) parkedZygotes() (all []*zygote.Zygote) {
	for _, is := range s.Values() {
		if is.zygote != nil && len(is.zygote.Family.Parked()) > 0 {
			all = append(all, is.zygote)
		}
	}
	return all
}

<<<<<<< HEAD
// memory is the sample as a refusal reports it.
func (s *slots) memory(now resources.Sample) memory {
	_, room := cache.Tightest(now.Bounds, Threshold)
	return memory{bounds: now.Bounds, coming: room - s.cache.Free(now.Bounds)}
=======
// tell tells the cache what its entries have, with m.mu held. A step that may evict comes after it.
func (m *Manager) tell() {
	wanted := map[zygote.Key]bool{}
	for _, k := range m.uses {
		wanted[k] = true
	}
	for k, s := range m.slots.all {
		u := cache.Using[zygote.Key]{Key: k, Wanted: wanted[k]}
		if k.Form == zygote.Worker {
			u.Rests = cmp.Or(m.cfg.workerRests, workerRests)
		}
		if s.zygote != nil {
			u.Replicas = s.zygote.Family.Replicas()
			for _, child := range s.zygote.Family.Parked() {
				if child.PID != 0 { // one that is not there yet cannot give way
					u.Parked++
				}
			}
		}
		m.step(u)
	}
}

// hold returns the slot of a key, now the most recently used, and keeps its zygote from eviction
// until letGo. The caller holds m.mu.
func (m *Manager) hold(key zygote.Key) *slot {
	s := m.slots.all[key]
	if s == nil {
		s = &slot{}
		m.slots.all[key] = s
	}
	m.step(cache.Hold[zygote.Key]{Key: key})
	return s
}

// letGo undoes one hold, with m.mu held.
func (m *Manager) letGo(key zygote.Key) { m.step(cache.Release[zygote.Key]{Key: key}) }

// tidy ends zygotes that nobody's present spec uses and, when memory is short, idle ones. It does
// not wait for their ends. The caller must not hold m.mu.
func (m *Manager) tidy() {
	now := m.lockWeighed(resources.SampleFresh)
	if m.closed {
		m.mu.Unlock()
		return
	}
	m.tell()
	d := m.step(cache.Weighed{Bounds: now.Bounds})
	m.forgetVariants()
	m.mu.Unlock()
	if len(d.gone) > 0 {
		m.changed()
	}
}

// forgetVariants forgets what belongs to variants of parameters that nobody uses and that are not
// kept, with m.mu held.
func (m *Manager) forgetVariants() {
	variants := map[zygote.Key]bool{}
	for _, k := range m.uses {
		variants[k.Variant()] = true
	}
	for k := range m.slots.all {
		variants[k.Variant()] = true
	}
	maps.DeleteFunc(m.sizes, func(k zygote.Key, _ int64) bool { return !variants[k.Variant()] })
	maps.DeleteFunc(m.generations, func(k zygote.Key, _ uint64) bool { return !variants[k] })
	maps.DeleteFunc(m.instead, func(k zygote.Key, _ zygote.Form) bool { return !variants[k] })
}

// retire ends a zygote that the cache evicts, with m.mu held. What it returns is closed when the
// zygote has ended.
func (m *Manager) retire(e cache.Evict[zygote.Key]) (gone <-chan struct{}) {
	s := m.slots.all[e.Key]
	z := s.zygote
	switch e.Why {
	case cache.Room, cache.Pressure:
		m.counts.Evictions++
		if e.Why == cache.Room || e.Bound == resources.BoundOwn {
			m.counts.Evicted.Memory++
		} else {
			m.counts.Evicted.Pressure++
		}
		if m.cfg.OnEvict != nil {
			m.cfg.OnEvict(m.nameOf(e.Key, s), z.Bytes)
		}
	case cache.Unused:
		m.counts.Evicted.Invalidated++
	case cache.Asked:
		m.counts.Evicted.Asked++
	case cache.Rested:
		m.cfg.Log.Info("worker ends: it has had no replicas for a while", "worker", e.Key.Worker, "device", e.Key.Device)
	}
	m.going[z] = true
	m.epoch++
	m.ends.Go(func() {
		z.Stop()
		m.mu.Lock()
		delete(m.going, z)
		m.mu.Unlock()
		if !e.Since.IsZero() {
			m.retired.Observe(time.Since(e.Since).Seconds())
		}
		m.changed()
	})
	s.zygote = nil
	delete(m.slots.all, e.Key)
	return z.Gone()
>>>>>>> cache
}
