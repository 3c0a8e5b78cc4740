package keysmanager

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/keysmanager/cache"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
)

// Invalidation is the result of Invalidate.
type Invalidation struct {
	// Digest of the image whose parameters are not used any more; empty: none were in memory.
	Digest     string
	Generation uint64 // of the parameters that starts load from now on
	// Replicas that still run with the old parameters, sorted. When the last of them ends, the old
	// zygote ends, too.
	Replicas []string
	// Time until no replica could start from the old parameters any more. If no such replica ran,
	// it includes the time until the memory of the old parameters was free.
	Took time.Duration
}

// Errors of Load and Evict that callers may want to tell apart.
var (
	ErrNoModel   = errors.New("the function has no model, so there is nothing to keep in memory")
	ErrNotCached = errors.New("no parameters of it are in memory")
	ErrBusy      = errors.New("its parameters are in use")
)

var errForgotten = errors.New("the function was removed meanwhile")

// Forget notes that a function is no longer deployed. Its zygote ends once it has no replicas.
func (m *Manager) Forget(function string) {
	m.store.mu.Lock()
	if a := m.store.asks[function]; a != nil {
		a.forgotten = true
		delete(m.store.asks, function)
	}
	delete(m.store.uses, function)
	m.spares.drop(function)
	m.store.mu.Unlock()
	m.pool.Forget(function)
	m.loader.tidy()
	m.cfg.changed()
}

// Load loads the parameters of a function, unless they are in memory, and describes the zygote that
// has them.
func (m *Manager) Load(ctx context.Context, spec node.Spec) (ZygoteInfo, error) {
	m.store.mu.Lock()
	a := m.store.ask(spec.Function)
	m.store.mu.Unlock()
	defer m.store.asked(a)
	image, err := m.cfg.Images.Resolve(spec.Image)
	if err != nil {
		return ZygoteInfo{}, err
	}
	spec = inImage(spec, image)
	e, err := engineOf(spec, image)
	if err != nil {
		return ZygoteInfo{}, fmt.Errorf("load %q: %w", spec.Function, err)
	}
	if spec.Worker != "" {
		return ZygoteInfo{}, fmt.Errorf("function %q: each replica loads its parameters into worker %q: %w", spec.Function, spec.Worker, ErrNoModel)
	}
	if !e.keeps(spec) {
		return ZygoteInfo{}, fmt.Errorf("function %q: %w", spec.Function, ErrNoModel)
	}
	var z ZygoteInfo
	there := false
	if err := m.loader.loaded(ctx, a, spec, e, image, func(of *zygote.Zygote) {
		m.store.mu.Lock()
		defer m.store.mu.Unlock()
		if s, ok := m.store.slots.Peek(of.Key); ok && s.zygote == of {
			z, there = m.store.info(of.Key, s), true
		}
	}); err != nil {
		return ZygoteInfo{}, fmt.Errorf("load %q: %w", spec.Function, err)
	}
	if !there {
		return ZygoteInfo{}, fmt.Errorf("load %q: its zygote has ended again, or each replica loads its parameters by itself (stagecoach.dev/start: cold)", spec.Function)
	}
	return z, nil
}

// Evict ends the zygotes of an image or a function, waits until they have ended, and returns how
// many bytes they took. The argument what is the image's digest or the function. For a function,
// Evict also ends the workers that have had replicas of it. If one of these processes is busy,
// Evict ends none and returns an [ErrBusy] that says why. If there is no such process, it returns
// [ErrNotCached].
func (m *Manager) Evict(ctx context.Context, what string) (bytes int64, err error) {
	m.store.mu.Lock()
	if m.store.closed {
		m.store.mu.Unlock()
		return 0, ErrClosed
	}
	m.store.tell()
	var idle []zygote.Key
	for _, k := range m.store.slots.Keys() {
		s, _ := m.store.slots.Peek(k)
		used, ok := m.store.uses[what]
		if its := k.Digest == what || ok && used == k || s.guests[what]; !its || s.zygote == nil && s.loading == nil {
			continue
		}
		if why := m.store.busyWith(k, s); why != "" {
			m.store.mu.Unlock()
			return 0, fmt.Errorf("evict %q: %w: %s", what, ErrBusy, why)
		}
		idle = append(idle, k)
	}
	if len(idle) == 0 {
		m.store.mu.Unlock()
		return 0, fmt.Errorf("evict %q: %w; the node's inventory lists what is", what, ErrNotCached)
	}
	var ends []<-chan struct{}
	for _, k := range idle {
		s, _ := m.store.slots.Peek(k)
		bytes += s.zygote.Bytes
		ends = append(ends, m.store.step(cache.Drop[zygote.Key]{Key: k}).gone...)
	}
	m.store.mu.Unlock()
	m.cfg.changed()
	for _, gone := range ends {
		select {
		case <-gone:
		case <-ctx.Done():
			return bytes, fmt.Errorf("evict %q: its processes still end: %w", what, context.Cause(ctx))
		}
	}
	return bytes, nil
}

// Invalidate records that a function's parameters have changed, although its image has not. Once it
// has returned, no replica starts from the old parameters, and the next start loads the new ones.
// The old zygote ends with the last of its replicas, which the caller stops. Other functions that
// share the parameters also have replicas of that zygote.
func (m *Manager) Invalidate(ctx context.Context, function string) (Invalidation, error) {
	begin := time.Now()
	m.store.mu.Lock()
	key, ok := m.store.uses[function]
	if !ok {
		m.store.mu.Unlock()
		return Invalidation{Took: time.Since(begin)}, nil
	}
	next := key
	next.Generation = m.store.renew(key)
	for f, used := range m.store.uses {
		if used == key {
			m.store.uses[f] = next
		}
	}
	out := Invalidation{Digest: key.Digest, Generation: next.Generation}
	s, ok := m.store.slots.Peek(key)
	if !ok {
		m.store.mu.Unlock()
		out.Took = time.Since(begin)
		return out, nil
	}
	z, settled := s.zygote, m.store.retiring(key, s)
	m.store.mu.Unlock()
	if z != nil {
		if err := z.Replace(); err != nil && z.Alive() {
			m.cfg.Log.Warn("invalidation is not recorded: after a restart, the old parameters would be used", "function", function, "error", err)
		}
	}
	m.loader.tidy()
	m.cfg.changed()
	select {
	case <-settled:
	case <-ctx.Done():
		return out, fmt.Errorf("invalidate %q: starts that had begun before still fork: %w", function, context.Cause(ctx))
	}
	if z == nil {
		out.Took = time.Since(begin)
		return out, nil
	}
	m.store.mu.Lock()
	out.Replicas = m.store.processes.of(z)
	m.store.mu.Unlock()
	if m.loader.tidy(); z.Family.Replicas() == 0 {
		select {
		case <-z.Gone():
		case <-ctx.Done():
			return out, fmt.Errorf("invalidate %q: its old zygote, process of %s, still ends: %w", function, plan.Size(z.Bytes), context.Cause(ctx))
		}
	}
	out.Took = time.Since(begin)
	return out, nil
}

var errInvalid = errors.New("the parameters were invalidated meanwhile")
