package keysmanager

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/cache"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
)

// loadTimeout bounds the load of a zygote, also when nobody waits for it any more, unless who began it would have waited for longer.
const loadTimeout = 5 * time.Minute

// in returns the spec with what an image that speaks the stage protocol says of its environment, under the function's own:
// which file is the model, above all. What other images say is their watchdog's business.
func inImage(s node.Spec, image sandbox.Image) node.Spec {
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
func (m *Manager) borrow(ctx context.Context, key zygote.Key, spec node.Spec, image sandbox.Image) (z *zygote.Zygote, warm bool, release func(), err error) {
	m.mu.Lock()
	key = m.newest(key) // what is settled is held by nobody any more
	s := m.hold(key)
	warm = s.zygote != nil && s.zygote.Alive()
	m.mu.Unlock()
	release = func() {
		m.mu.Lock()
		m.letGo(key)
		m.mu.Unlock()
		m.tidy()
	}
	for {
		m.mu.Lock()
		if s.settled != nil { // invalidated meanwhile: what comes after it is another
			m.letGo(key)
			key = m.newest(key)
			s = m.hold(key)
		}
		if s.zygote != nil && s.zygote.Alive() {
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
func (m *Manager) awaitLoad(ctx context.Context, key zygote.Key, s *slot, done <-chan struct{}, failed uint64) error {
	select {
	case <-done:
	case <-ctx.Done():
		return fmt.Errorf("its %s still loads: %w", key.What(), context.Cause(ctx))
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	fails := m.slots.Entry(key).Fails
	switch {
	case s.failed == failed:
		return nil
	case fails > 1:
		return fmt.Errorf("its %s has not loaded %d times in a row: %w", key.What(), fails, s.err)
	default:
		return fmt.Errorf("its %s has not loaded: %w", key.What(), s.err)
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

// mayLoad says why a zygote is not loaded now, with m.mu held.
func (m *Manager) mayLoad(key zygote.Key, s *slot) error {
	switch left, err := time.Until(m.slots.Entry(key).Retry), m.cfg.loadable(engineByKey(key)); {
	case m.closed:
		return ErrClosed
	case err != nil:
		return err
	case s.loading == nil && s.err != nil && left > 0:
		return errPause{left, fmt.Errorf("its %s is not loaded again for %v: %w", key.What(), left.Round(time.Millisecond), s.err)}
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
func (m *Manager) beginLoad(ctx context.Context, key zygote.Key, s *slot, spec node.Spec, image sandbox.Image) (done chan struct{}, err error) {
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
		m.loadFailed(key, s, err)
		return nil, err
	}
	m.tell()
	want := cache.Want[zygote.Key]{Key: key, Bytes: n.bytes, Bounds: now.Bounds}
	d := m.step(want)
	if d.unpark {
		want.Freed = d.freed
		d = m.step(want)
	}
	if !d.load {
		m.counts.Refused++
		return nil, m.refuse(spec.Function, n, now)
	}
	limit := cmp.Or(m.cfg.loadTimeout, loadTimeout)
	if until, ok := ctx.Deadline(); ok {
		limit = max(limit, time.Until(until))
	}
	ctx, cancel := context.WithCancelCause(m.ctx)
	s.loading, s.need, s.cancel, s.function = make(chan struct{}), n, cancel, spec.Function
	m.starts.Add(1)
	go m.load(ctx, limit, key, s, spec, image, d.gone) // Close waits for it through m.starts
	return s.loading, nil
}

// refuse says why parameters do not fit, with m.mu held.
func (m *Manager) refuse(function string, n need, now resources.Sample) error {
	var busy, loading []keeper
	for _, k := range m.slots.Keys() {
		switch s, _ := m.slots.Peek(k); {
		case s.loading != nil:
			loading = append(loading, keeper{s.function, s.need.bytes})
		case s.zygote != nil && m.slots.Entry(k).Busy():
			busy = append(busy, keeper{m.nameOf(k, s), s.zygote.Bytes})
		}
	}
	return refusal(function, n, m.memory(now), now.Own, busy, loading)
}

// loadFailed counts a failed load of a slot's zygote; m.mu is held.
func (m *Manager) loadFailed(key zygote.Key, s *slot, err error) {
	s.failed++
	s.err = err
	m.step(cache.Failed[zygote.Key]{Key: key})
}

// load starts a slot's zygote, once those that give way to it have gone, and tells those who wait. It goes on when they have given up:
// what is loaded is cached.
func (m *Manager) load(ctx context.Context, limit time.Duration, key zygote.Key, s *slot, spec node.Spec, image sandbox.Image, gone []<-chan struct{}) {
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
	switch {
	case err != nil && !stale:
		m.loadFailed(key, s, err)
	case err != nil || m.closed:
		m.step(cache.Failed[zygote.Key]{Key: key}) // nobody waits for it
	case m.fill(key, s, z):
		variant := key
		variant.Generation = 0
		m.sizes[variant] = z.Bytes
	}
	close(s.loading)
	s.loading, s.cancel, s.pid = nil, nil, 0
	m.mu.Unlock()
	switch {
	case err != nil && (stale || choosesPath(spec) && errors.As(err, new(zygote.Impossible))): // fallBack says so
	case err != nil:
		m.cfg.Log.Warn(key.What()+" does not load", "function", spec.Function, "error", err)
	case stale:
		z.Stop()
	default:
		m.cfg.Log.Info(key.What()+" loaded", "function", spec.Function, "took", z.Load.Round(time.Millisecond), "bytes", z.Bytes)
		z.Family.Provide("")
		m.watchers.Go(func() { m.watch(z.Key, s, z) })
	}
	m.tidy()
	m.changed()
}

// watch notices the end of a zygote.
func (m *Manager) watch(key zygote.Key, s *slot, z *zygote.Zygote) {
	<-z.Gone()
	m.mu.Lock()
	m.mourn(key, s)
	m.mu.Unlock()
	m.tidy()
	m.changed()
}

// mourn empties the slot of a zygote that ended without an order to; m.mu is held. The zygote had
// loaded, so this is no failed load. It is loaded again at once, or after a back-off if earlier
// ones ended soon, too.
func (m *Manager) mourn(key zygote.Key, s *slot) {
	if s.zygote == nil || s.zygote.Alive() || m.closed {
		return
	}
	s.err = errors.New(s.zygote.Died())
	m.step(cache.Ended[zygote.Key]{Key: key, Lived: time.Since(s.zygote.Loaded)})
	m.cfg.Log.Warn(key.What()+" ended", "function", s.zygote.Function, "model", key.Model, "cause", s.zygote.Died())
	s.zygote = nil
	m.epoch++
}

// fill puts a zygote that has loaded into its slot, with m.mu held. It reports false if the slot was
// invalidated while the zygote loaded. Then the caller ends the zygote.
func (m *Manager) fill(key zygote.Key, s *slot, z *zygote.Zygote) bool {
	if m.step(cache.Loaded[zygote.Key]{Key: key, Bytes: z.Bytes}).discard {
		return false
	}
	s.zygote = z
	m.epoch++
	return true
}

// nameOf is the function that uses a zygote, the first by name when several do, or else the one that it was loaded for, with
// m.mu held.
func (m *Manager) nameOf(k zygote.Key, s *slot) string {
	first := ""
	for f, used := range m.uses {
		if used == k && (first == "" || f < first) {
			first = f
		}
	}
	if s.zygote != nil {
		return cmp.Or(first, s.zygote.Function)
	}
	return cmp.Or(first, s.function)
}

// unlessUsed calls take unless a function or a zygote uses what is in the folder of this name, with
// m.mu held.
func (m *Manager) unlessUsed(name string, take func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, k := range m.uses {
		if folderOf(k) == name {
			return
		}
	}
	for _, k := range m.slots.Keys() {
		if folderOf(k) == name {
			return
		}
	}
	take()
}

// count counts a start that needed a zygote.
func (m *Manager) count(key zygote.Key, hit bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if s, ok := m.slots.Peek(key); ok {
		s.used = time.Now()
	}
	if hit {
		m.counts.Hits++
	} else {
		m.counts.Misses++
	}
}

// changed tells that the inventory is another; it must be called without m.mu.
func (m *Manager) changed() {
	if m.cfg.OnChange != nil {
		m.cfg.OnChange()
	}
}
