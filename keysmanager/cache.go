package keysmanager

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// loadTimeout bounds the load of a zygote, also when nobody waits for it any more, unless who began it would have waited for longer.
const loadTimeout = 5 * time.Minute

// in returns the spec with what an image that speaks the stage protocol says of its environment, under the function's own:
// which file is the model, above all. What other images say is their watchdog's business.
func (s Spec) in(image sandbox.Image) Spec {
	if !image.Stage || len(image.Env) == 0 {
		return s
	}
	env := map[string]string{}
	for _, kv := range image.Env {
		if name, value, ok := strings.Cut(kv, "="); ok && name != "PATH" { // the images of stages share this machine's root
			env[name] = value
		}
	}
	maps.Copy(env, s.Env)
	s.Env = env
	return s
}

// borrow returns the zygote of a key, loaded if it was not there, and keeps it from eviction until release is called; of
// parameters that are invalidated meanwhile it is that of the next generation. warm says that it was there.
func (m *Manager) borrow(ctx context.Context, key zygoteKey, spec Spec, image sandbox.Image) (z *zygote, warm bool, release func(), err error) {
	m.mu.Lock()
	key = m.newest(key) // what is settled is held by nobody any more
	s := m.hold(key)
	warm = s.zygote != nil && s.zygote.alive()
	m.mu.Unlock()
	release = func() {
		m.mu.Lock()
		m.letGo(s)
		m.mu.Unlock()
		m.tidy()
	}
	for {
		m.mu.Lock()
		if s.settled != nil { // invalidated meanwhile: what comes after it is another
			m.letGo(s)
			key = m.newest(key)
			s = m.hold(key)
		}
		if s.zygote != nil && s.zygote.alive() {
			z = s.zygote
			m.mu.Unlock()
			return z, warm, release, nil
		}
		m.mourn(key, s)
		err, wait, failed := m.mayLoad(key, s), s.loading, s.failed
		m.mu.Unlock()
		if err == nil && wait == nil {
			wait, err = m.beginLoad(ctx, key, s, spec, image)
		}
		var pause errPause
		if errors.As(err, &pause) {
			err = sleep(ctx, pause)
		} else if err == nil {
			err = m.awaitLoad(ctx, key, s, wait, failed)
		}
		if err != nil {
			release()
			return nil, false, nil, err
		}
	}
}

// awaitLoad waits until a load has ended, and returns why it failed. failed is the number of failed
// loads of the slot before this one. An order whose load failed does not wait for the next load, so
// that its caller gets the error. If the zygote loaded and ended before the order could use it,
// this is no failed load.
func (m *Manager) awaitLoad(ctx context.Context, key zygoteKey, s *slot, done <-chan struct{}, failed uint64) error {
	select {
	case <-done:
	case <-ctx.Done():
		return fmt.Errorf("its %s still loads: %w", key.what(), context.Cause(ctx))
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case s.failed == failed:
		return nil
	case s.fails > 1:
		return fmt.Errorf("its %s has not loaded %d times in a row: %w", key.what(), s.fails, s.err)
	default:
		return fmt.Errorf("its %s has not loaded: %w", key.what(), s.err)
	}
}

// errPause says that a zygote is not loaded until a back-off has passed.
type errPause struct {
	left time.Duration
	error
}

// Unwrap returns the wrapped error.
func (e errPause) Unwrap() error { return e.error }

// longestSleep bounds how long an order waits for a back-off before it looks again, because the
// back-off ends when the parameters are invalidated.
const longestSleep = time.Second

// sleep waits for a back-off, longestSleep at most.
func sleep(ctx context.Context, p errPause) error {
	t := time.NewTimer(min(p.left, longestSleep))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", p.error, context.Cause(ctx))
	}
}

// hold returns the slot of a key, now the most recently used, and keeps its zygote from eviction until letGo, with m.mu held.
func (m *Manager) hold(key zygoteKey) *slot {
	s, ok := m.slots.Get(key)
	if !ok {
		s = &slot{}
		m.slots.Add(key, s)
	}
	s.users++
	return s
}

// letGo undoes one hold, with m.mu held.
func (m *Manager) letGo(s *slot) {
	if s.users--; s.users == 0 && s.settled != nil {
		close(s.settled)
	}
}

// mayLoad says why a zygote is not loaded now, with m.mu held.
func (m *Manager) mayLoad(key zygoteKey, s *slot) error {
	switch left, err := time.Until(s.retry), m.loadable(key.engine()); {
	case m.closed:
		return ErrClosed
	case err != nil:
		return err
	case s.loading == nil && s.err != nil && left > 0:
		return errPause{left, fmt.Errorf("its %s is not loaded again for %v: %w", key.what(), left.Round(time.Millisecond), s.err)}
	}
	return nil
}

// nothing is what needs no waiting for.
func nothing() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

// beginLoad makes room for a slot's zygote and begins to load it, and returns what is closed when that has ended. What does not fit is
// refused, which is no failure of the zygote's.
func (m *Manager) beginLoad(ctx context.Context, key zygoteKey, s *slot, spec Spec, image sandbox.Image) (done chan struct{}, err error) {
	n, err := m.need(key, image)
	now := m.lockWeighed(0)
	defer m.mu.Unlock()
	if s.loading != nil || s.settled != nil || s.zygote != nil {
		return nothing(), nil // somebody was faster
	}
	if err := m.mayLoad(key, s); err != nil {
		return nil, err
	}
	if err != nil {
		m.loadFailed(s, err)
		return nil, err
	}
	mem := m.memory(now)
	victims, missing := fit(m.cached(), mem, n.bytes)
	if len(victims) > 0 || missing > 0 {
		_, bytes := m.unparkAll()
		mem.coming -= bytes
		victims, missing = fit(m.cached(), mem, n.bytes)
	}
	if missing > 0 {
		m.counts.Refused++
		return nil, m.refuse(spec.Function, n, now)
	}
	var gone []<-chan struct{}
	for _, k := range victims {
		gone = append(gone, m.evictOne(k, &m.counts.Evicted.Memory))
	}
	limit := cmp.Or(m.cfg.loadTimeout, loadTimeout)
	if until, ok := ctx.Deadline(); ok {
		limit = max(limit, time.Until(until))
	}
	ctx, cancel := context.WithCancelCause(m.ctx)
	s.loading, s.need, s.cancel, s.function = make(chan struct{}), n, cancel, spec.Function
	m.starts.Add(1)
	go m.load(ctx, limit, key, s, spec, image, gone) // Close waits for it through m.starts
	return s.loading, nil
}

// refuse says why parameters do not fit, with m.mu held.
func (m *Manager) refuse(function string, n need, now sample) error {
	var busy, loading []keeper
	for _, k := range m.slots.Keys() {
		switch s, _ := m.slots.Peek(k); {
		case s.loading != nil:
			loading = append(loading, keeper{s.function, s.need.bytes})
		case s.zygote != nil && (s.users > 0 || s.zygote.replicas() > 0):
			busy = append(busy, keeper{m.nameOf(k, s), s.zygote.bytes})
		}
	}
	return refusal(function, n, m.memory(now), now.own, busy, loading)
}

// loadFailed counts a failed load of a slot's zygote; m.mu is held.
func (m *Manager) loadFailed(s *slot, err error) {
	s.fails++
	s.failed++
	s.err, s.retry = err, time.Now().Add(backoff(s.fails))
}

// load starts a slot's zygote, once those that give way to it have gone, and tells those who wait. It goes on when they have given up:
// what is loaded is cached.
func (m *Manager) load(ctx context.Context, limit time.Duration, key zygoteKey, s *slot, spec Spec, image sandbox.Image, gone []<-chan struct{}) {
	defer m.starts.Done()
	defer s.cancel(nil)
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("it has not loaded after %v", limit))
	defer cancel()
	m.changed()
	for _, g := range gone {
		select {
		case <-g:
		case <-ctx.Done():
		}
	}
	command := sandbox.Command{Dir: image.Root, Process: spec.Process, Env: m.zygoteEnvironment(key, spec)}
	z, err := m.bring(ctx, command, key, spec, func(pid int) {
		m.mu.Lock()
		defer m.mu.Unlock()
		s.pid = pid
	})
	m.mu.Lock()
	stale := m.closed || s.settled != nil
	if !stale {
		if s.zygote = z; err != nil {
			m.loadFailed(s, err)
		} else {
			s.fails = 0
			key.generation = 0
			m.sizes[key] = z.bytes
			m.epoch++
		}
	}
	close(s.loading)
	s.loading, s.cancel, s.pid = nil, nil, 0
	m.mu.Unlock()
	switch {
	case err != nil && (stale || spec.choice() && errors.As(err, new(impossible))): // fallBack says so
	case err != nil:
		m.cfg.Log.Warn(key.what()+" does not load", "function", spec.Function, "error", err)
	case stale:
		z.stop()
	default:
		m.cfg.Log.Info(key.what()+" loaded", "function", spec.Function, "took", z.load.Round(time.Millisecond), "bytes", z.bytes)
		m.provide(z, "")
		m.watchers.Go(func() { m.watch(z.key, s, z) })
	}
	m.tidy()
	m.changed()
}

// watch notices the end of a zygote.
func (m *Manager) watch(key zygoteKey, s *slot, z *zygote) {
	<-z.gone
	m.mu.Lock()
	m.mourn(key, s)
	m.mu.Unlock()
	m.tidy()
	m.changed()
}

// mourn empties the slot of a zygote that ended without an order to; m.mu is held. The zygote had
// loaded, so this is no failed load. It is loaded again at once, or after a back-off if earlier
// ones ended soon, too.
func (m *Manager) mourn(key zygoteKey, s *slot) {
	if s.zygote == nil || s.zygote.alive() || m.closed {
		return
	}
	if time.Since(s.zygote.loaded) > longLife {
		s.ends = 0
	}
	s.ends++
	s.err, s.retry = s.zygote.died, time.Now().Add(min(backoff(s.ends-1), lastBackoffOfEnds))
	m.cfg.Log.Warn(key.what()+" ended", "function", s.zygote.function, "model", key.model, "cause", s.zygote.died)
	s.zygote = nil
	m.epoch++
}

// cached returns the zygotes that are there, least recently used first, with m.mu held.
func (m *Manager) cached() []cached {
	var all []cached
	for _, k := range m.slots.Keys() {
		if s, _ := m.slots.Peek(k); s.zygote != nil {
			all = append(all, cached{key: k, bytes: s.zygote.bytes, busy: s.users > 0 || s.zygote.replicas() > 0, keep: s.keep})
		}
	}
	return all
}

// tidy ends zygotes that nobody's present spec uses and, when memory is short, idle ones. Their ends are not waited for.
func (m *Manager) tidy() {
	now := m.lockWeighed(sampleFresh)
	if m.closed {
		m.mu.Unlock()
		return
	}
	ended := m.dropUnused()
	all, mem := m.cached(), m.memory(now)
	victims, pressed := evict(all, mem)
	short := pressed || len(victims) > 0
	if short {
		if n, _ := m.unparkAll(); n > 0 { // they go first
			victims = nil
		}
	}
	counter := &m.counts.Evicted.Pressure
	if b, _ := mem.tightest(calmBelow); b.name == boundOwn {
		counter = &m.counts.Evicted.Memory
	}
	for _, k := range victims {
		m.evictOne(k, counter)
	}
	if m.pressed = pressed; short {
		m.calm = time.Now().Add(calmFor)
	}
	m.mu.Unlock()
	if ended || len(victims) > 0 {
		m.changed()
	}
}

// calmFor is how long after memory was short nothing is loaded ahead of need.
const calmFor = 10 * time.Second

// dropUnused ends idle zygotes that nobody's present spec uses, and forgets what belongs to them, with m.mu held.
func (m *Manager) dropUnused() (ended bool) {
	current, variants := map[zygoteKey]bool{}, map[zygoteKey]bool{}
	for _, k := range m.uses {
		current[k], variants[k.variant()] = true, true
	}
	for _, k := range m.slots.Keys() {
		s, _ := m.slots.Peek(k)
		switch {
		case k.form == formWorker:
			if !m.rest(k, s) {
				continue
			}
		case current[k]:
			s.since = time.Time{}
		case s.users > 0 || s.loading != nil || s.zygote != nil && s.zygote.replicas() > 0:
			if s.since.IsZero() {
				s.since = time.Now()
			}
		case s.zygote == nil:
			m.slots.Remove(k)
			continue
		default:
			m.counts.Evicted.Invalidated++
			m.retire(k)
			ended = true
			continue
		}
		variants[k.variant()] = true
	}
	maps.DeleteFunc(m.sizes, func(k zygoteKey, _ int64) bool { return !variants[k.variant()] })
	maps.DeleteFunc(m.generations, func(k zygoteKey, _ uint64) bool { return !variants[k] })
	maps.DeleteFunc(m.instead, func(k zygoteKey, _ form) bool { return !variants[k] })
	return ended
}

// nameOf is the function that uses a zygote, the first by name when several do, or else the one that it was loaded for, with
// m.mu held.
func (m *Manager) nameOf(k zygoteKey, s *slot) string {
	first := ""
	for f, used := range m.uses {
		if used == k && (first == "" || f < first) {
			first = f
		}
	}
	if s.zygote != nil {
		return cmp.Or(first, s.zygote.function)
	}
	return cmp.Or(first, s.function)
}

// evictOne ends a zygote for want of memory, with m.mu held.
func (m *Manager) evictOne(k zygoteKey, counter *uint64) (gone <-chan struct{}) {
	s, _ := m.slots.Peek(k)
	*counter++
	m.counts.Evictions++
	if m.cfg.OnEvict != nil {
		m.cfg.OnEvict(m.nameOf(k, s), s.zygote.bytes)
	}
	return m.retire(k)
}

// retire takes a zygote out of the cache and ends it, with m.mu held.
func (m *Manager) retire(k zygoteKey) (gone <-chan struct{}) {
	s, _ := m.slots.Peek(k)
	z := s.zygote
	m.going[z] = true
	m.epoch++
	m.ends.Go(func() {
		z.stop()
		m.mu.Lock()
		delete(m.going, z)
		m.mu.Unlock()
		if !s.since.IsZero() {
			m.retired.Observe(time.Since(s.since).Seconds())
		}
		m.changed()
	})
	s.zygote = nil
	m.slots.Remove(k)
	return z.gone
}

// changed tells that the inventory is another; it must be called without m.mu.
func (m *Manager) changed() {
	if m.cfg.OnChange != nil {
		m.cfg.OnChange()
	}
}
