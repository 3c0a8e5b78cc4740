package keysmanager

import (
	"context"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/cache"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
)

// slot is what the store has for an entry of the cache: its process, and the channels that orders
// wait on. The cache knows which orders hold the entry, and when it may be loaded or evicted.
type slot struct {
	loading  chan struct{}           // closed when the load has ended; nil: none is under way
	cancel   context.CancelCauseFunc // cancels the load
	need     need                    // of the load under way
	pid      int                     // of the loading process; 0: not started yet
	function string                  // that it was loaded for
	zygote   *zygote.Zygote          // nil: none
	used     time.Time               // when a start last used it
	keeping                          // set for a key stage
	failed   uint64                  // number of loads that ever failed
	err      error                   // of the latest failed load, or why the latest zygote ended
	guests   map[string]bool         // functions that a worker has had replicas of
	// Closed when no order forks from it any more; nil: it was not invalidated.
	settled chan struct{}
}

// slots are a node's slots, together with the cache that decides about them. Each entry of the
// cache has one slot. The slots are a part of the store. The caller of each method holds the
// store's mutex.
type slots struct {
	cache *cache.Core[zygote.Key]
	all   map[zygote.Key]*slot
}

func newSlots() *slots {
	return &slots{cache: cache.New[zygote.Key](), all: map[zygote.Key]*slot{}}
}

// Peek returns the slot of a key, or nil and false if there is none.
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

// Entry returns the cache's entry of a slot.
func (s *slots) Entry(k zygote.Key) cache.Entry {
	e, _ := s.cache.Get(k)
	return e
}

// visit records that a worker has, or had, a replica of a function.
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

// memory returns the sample in the form that a refusal reports.
func (s *slots) memory(now resources.Sample) memory {
	_, room := cache.Tightest(now.Bounds, Threshold)
	return memory{bounds: now.Bounds, coming: room - s.cache.Free(now.Bounds)}
}
