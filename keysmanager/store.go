package keysmanager

import (
	"cmp"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/keysmanager/cache"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
)

// store knows which parameters are in a node's memory and which replicas run, and carries out the
// cache's decisions. mu guards all of it; each method says if its caller holds mu. The locks of
// zygotes and of the pool are taken after mu. The warden must not be called with mu held, because
// its answer may have to wait until a process's end has been reported, which needs mu.
type store struct {
	cfg  *Config
	ends *sync.WaitGroup // evictions under way

	mu        sync.Mutex
	closed    bool // no start or load begins any more
	processes replicas
	slots     *slots
	functions
	counts Counts
	going  map[*zygote.Zygote]bool // that are being ended
	// Incremented when a zygote starts or ends. A memory sample with a lower epoch lacks that
	// change.
	epoch   uint64
	retired prometheus.Histogram // seconds that replaced parameters have stayed
	spares  *spares              // whose lock is taken after mu
}

func newStore(cfg *Config, pool *resources.Pool, ends *sync.WaitGroup) *store {
	return &store{
		cfg: cfg, ends: ends, processes: replicas{}, slots: newSlots(), going: map[*zygote.Zygote]bool{},
		functions: functions{
			pool: pool, uses: map[string]zygote.Key{}, sizes: map[zygote.Key]int64{}, instead: map[zygote.Key]zygote.Form{},
			asks: map[string]*asking{}, generations: map[zygote.Key]uint64{},
		},
	}
}

// decided is what a step has decided, as far as its caller needs to know.
type decided struct {
	load    bool              // a load begins
	discard bool              // what has loaded is not wanted any more
	unpark  bool              // parked children end
	freed   int64             // bytes that these children free
	gone    []<-chan struct{} // closed when the evicted zygotes have ended
}

// step steps the cache and carries out its decisions. The caller holds the store's mutex.
func (st *store) step(ev cache.Event) (d decided) {
	for _, e := range st.slots.cache.Step(time.Now(), ev) {
		switch e := e.(type) {
		case cache.Load[zygote.Key]:
			d.load = true
		case cache.Discard[zygote.Key]:
			d.discard = true
		case cache.Unpark:
			d.unpark = true
			_, d.freed = st.unparkAll()
		case cache.Evict[zygote.Key]:
			d.gone = append(d.gone, st.retire(e))
		case cache.Forget[zygote.Key]:
			delete(st.slots.all, e.Key)
		case cache.Cancel[zygote.Key]:
			st.slots.all[e.Key].cancel(errInvalid)
		case cache.Settled[zygote.Key]:
			close(st.slots.all[e.Key].settled)
		}
	}
	return d
}

// tell passes the current use of each slot to the cache. It is called before each step that may
// evict. The caller holds the store's mutex.
func (st *store) tell() {
	wanted := map[zygote.Key]bool{}
	for _, k := range st.uses {
		wanted[k] = true
	}
	for k, s := range st.slots.all {
		u := cache.Using[zygote.Key]{Key: k, Wanted: wanted[k]}
		if k.Form == zygote.Worker {
			u.Rests = cmp.Or(st.cfg.workerRests, workerRests)
		}
		if s.zygote != nil {
			u.Replicas = s.zygote.Family.Replicas()
			for _, child := range s.zygote.Family.Parked() {
				if child.PID != 0 { // a child that is not there yet has nothing to free
					u.Parked++
				}
			}
		}
		st.step(u)
	}
}

// hold returns the slot of a key, makes it the most recently used, and keeps its zygote from
// eviction until release. The caller holds the store's mutex.
func (st *store) hold(key zygote.Key) *slot {
	s := st.slots.all[key]
	if s == nil {
		s = &slot{}
		st.slots.all[key] = s
	}
	st.step(cache.Hold[zygote.Key]{Key: key})
	return s
}

// release undoes one hold. The caller holds the store's mutex.
func (st *store) release(key zygote.Key) { st.step(cache.Release[zygote.Key]{Key: key}) }

// retire ends a zygote that the cache evicts. It returns a channel that is closed when the zygote
// has ended. The caller holds the store's mutex.
func (st *store) retire(e cache.Evict[zygote.Key]) (gone <-chan struct{}) {
	s := st.slots.all[e.Key]
	z := s.zygote
	switch e.Why {
	case cache.Room, cache.Pressure:
		st.counts.Evictions++
		if e.Why == cache.Room || e.Bound == resources.BoundOwn {
			st.counts.Evicted.Memory++
		} else {
			st.counts.Evicted.Pressure++
		}
		if st.cfg.OnEvict != nil {
			st.cfg.OnEvict(st.nameOf(e.Key, s), z.Bytes)
		}
	case cache.Unused:
		st.counts.Evicted.Invalidated++
	case cache.Asked:
		st.counts.Evicted.Asked++
	case cache.Rested:
		st.cfg.Log.Info("worker ends: it was idle", "worker", e.Key.Worker, "device", e.Key.Device)
	}
	st.going[z] = true
	st.epoch++
	st.ends.Go(func() {
		z.Stop()
		st.mu.Lock()
		delete(st.going, z)
		st.mu.Unlock()
		if !e.Since.IsZero() {
			st.retired.Observe(time.Since(e.Since).Seconds())
		}
		st.cfg.changed()
	})
	s.zygote = nil
	delete(st.slots.all, e.Key)
	return z.Gone()
}

// fill puts a zygote that has loaded into its slot. It returns false if the slot was invalidated
// during the load; the caller then ends the zygote. The caller holds the store's mutex.
func (st *store) fill(key zygote.Key, s *slot, z *zygote.Zygote) bool {
	if st.step(cache.Loaded[zygote.Key]{Key: key, Bytes: z.Bytes}).discard {
		return false
	}
	s.zygote = z
	st.epoch++
	return true
}

// recordEnd empties a slot whose zygote has ended by itself. This does not count as a failed load,
// because the zygote had loaded. The parameters may be loaded again at once, or after a back-off if
// earlier zygotes of the slot also ended soon. The caller holds the store's mutex.
func (st *store) recordEnd(key zygote.Key, s *slot) {
	if s.zygote == nil || s.zygote.Alive() || st.closed {
		return
	}
	s.err = s.zygote.Died()
	st.step(cache.Ended[zygote.Key]{Key: key, Lived: time.Since(s.zygote.Loaded)})
	st.cfg.Log.Warn(key.What()+" ended", "function", s.zygote.Function, "model", key.Model, "cause", s.zygote.Died())
	s.zygote = nil
	st.epoch++
}

// mayLoad returns why a zygote may not be loaded now, or nil if it may. The caller holds the
// store's mutex.
func (st *store) mayLoad(key zygote.Key, s *slot) error {
	switch left, err := time.Until(st.slots.Entry(key).Retry), st.cfg.loadable(engineByKey(key)); {
	case st.closed:
		return ErrClosed
	case err != nil:
		return err
	case s.loading == nil && s.err != nil && left > 0:
		return errPause{left, fmt.Errorf("its %s is not loaded again for %v: %w", key.What(), left.Round(time.Millisecond), s.err)}
	}
	return nil
}

// loadFailed records a failed load of a slot's zygote. The caller holds the store's mutex.
func (st *store) loadFailed(key zygote.Key, s *slot, err error) {
	s.failed++
	s.err = err
	st.step(cache.Failed[zygote.Key]{Key: key})
}

// refuse returns the error that says why parameters do not fit. The caller holds the store's mutex.
func (st *store) refuse(function string, n need, now resources.Sample) error {
	var busy, loading []keeper
	for _, k := range st.slots.Keys() {
		switch s, _ := st.slots.Peek(k); {
		case s.loading != nil:
			loading = append(loading, keeper{s.function, s.need.bytes})
		case s.zygote != nil && st.slots.Entry(k).Busy():
			busy = append(busy, keeper{st.nameOf(k, s), s.zygote.Bytes})
		}
	}
	return refusal(function, n, st.slots.memory(now), now.Own, busy, loading)
}

// unlessUsed calls take unless a function or a zygote uses the folder of this name. The store's
// mutex is held during the call.
func (st *store) unlessUsed(name string, take func()) {
	st.mu.Lock()
	defer st.mu.Unlock()
	for _, k := range st.uses {
		if folderOf(k) == name {
			return
		}
	}
	for _, k := range st.slots.Keys() {
		if folderOf(k) == name {
			return
		}
	}
	take()
}

// count counts a start that needed a zygote, as a hit or a miss.
func (st *store) count(key zygote.Key, hit bool) {
	st.mu.Lock()
	defer st.mu.Unlock()
	if s, ok := st.slots.Peek(key); ok {
		s.used = time.Now()
	}
	if hit {
		st.counts.Hits++
	} else {
		st.counts.Misses++
	}
}

// retiring invalidates a slot: no new start uses its zygote, and a load under way is cancelled. The
// returned channel is closed when no earlier start uses the zygote any more. The caller holds the
// store's mutex.
func (st *store) retiring(key zygote.Key, s *slot) <-chan struct{} {
	if s.settled == nil {
		s.settled = make(chan struct{})
		st.step(cache.Invalidate[zygote.Key]{Key: key})
	}
	return s.settled
}

// busyWith returns what keeps a slot's zygote from being ended, or "" if nothing does. The caller
// holds the store's mutex.
func (st *store) busyWith(k zygote.Key, s *slot) string {
	if s.loading != nil {
		return "it loads; wait for it"
	}
	if names := st.processes.of(s.zygote); len(names) > 0 {
		return fmt.Sprintf("%d replicas run from it (%s); scale the function down first", len(names), strings.Join(names, ", "))
	}
	if st.slots.Entry(k).Busy() {
		return "replicas are being forked from it; try again"
	}
	return ""
}
