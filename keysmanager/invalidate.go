package keysmanager

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/keysmanager/cache"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
)

// Invalidation is what Invalidate has done.
type Invalidation struct {
	Digest     string        // of the image whose parameters are not used any more; empty: none were there
	Generation uint64        // of the parameters that starts load from now on
	Replicas   []string      // that still run with the old ones, sorted; the old zygote ends with the last of them
	Took       time.Duration // until nothing could start from the old ones any more and, when no replicas are left, their memory was free
}

// Errors of Load and Evict that callers may want to tell apart.
var (
	ErrNoModel   = errors.New("the function has no model, so there is nothing to keep in memory")
	ErrNotCached = errors.New("no parameters of it are in memory")
	ErrBusy      = errors.New("its parameters are in use")
)

var errForgotten = errors.New("the function was removed meanwhile")

// asking is a function that something is under way for: a start, a load.
type asking struct {
	function  string
	count     int
	forgotten bool // Forget came after it had begun
}

// ask says that something begins for a function, with m.mu held; its owner calls asked when it has ended. What Forget has
// meanwhile taken away it does not bring back.
func (m *Manager) ask(function string) *asking {
	a := m.asks[function]
	if a == nil {
		a = &asking{function: function}
		m.asks[function] = a
	}
	a.count++
	return a
}

func (m *Manager) asked(a *asking) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if a.count--; a.count == 0 && m.asks[a.function] == a {
		delete(m.asks, a.function)
	}
}

// unuse says that a function has no model now; what an earlier deploy of it had goes with its replicas.
func (m *Manager) unuse(a *asking) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !a.forgotten {
		delete(m.uses, a.function)
	}
}

// Forget says that a function is no longer deployed: its zygote goes once it has no replicas.
func (m *Manager) Forget(function string) {
	m.mu.Lock()
	if a := m.asks[function]; a != nil {
		a.forgotten = true
		delete(m.asks, function)
	}
	delete(m.uses, function)
	m.mu.Unlock()
	m.pool.Forget(function)
	m.tidy()
	m.changed()
}

// Load brings the parameters of a function into memory, unless they are there, and returns what is there.
func (m *Manager) Load(ctx context.Context, spec node.Spec) (ZygoteInfo, error) {
	m.mu.Lock()
	a := m.ask(spec.Function)
	m.mu.Unlock()
	defer m.asked(a)
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
	if err := m.loaded(ctx, a, spec, e, image, func(of *zygote.Zygote) {
		m.mu.Lock()
		defer m.mu.Unlock()
		if s, ok := m.slots.Peek(of.Key); ok && s.zygote == of {
			z, there = m.info(of.Key, s), true
		}
	}); err != nil {
		return ZygoteInfo{}, fmt.Errorf("load %q: %w", spec.Function, err)
	}
	if !there {
		return ZygoteInfo{}, fmt.Errorf("load %q: its zygote has ended again, or each replica loads its parameters by itself (stagecoach.dev/start: cold)", spec.Function)
	}
	return z, nil
}

// Evict ends the idle zygotes of a function, and workers that have had replicas of it, or the zygotes of an image's digest, and returns
// how many bytes they took, when they are gone. When one of them is busy it ends none, and the error says what it is busy with.
func (m *Manager) Evict(ctx context.Context, what string) (bytes int64, err error) {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return 0, ErrClosed
	}
	m.tell()
	var idle []zygote.Key
	for _, k := range m.slots.Keys() {
		s, _ := m.slots.Peek(k)
		used, ok := m.uses[what]
		if its := k.Digest == what || ok && used == k || s.guests[what]; !its || s.zygote == nil && s.loading == nil {
			continue
		}
		if why := m.busyWith(k, s); why != "" {
			m.mu.Unlock()
			return 0, fmt.Errorf("evict %q: %w: %s", what, ErrBusy, why)
		}
		idle = append(idle, k)
	}
	if len(idle) == 0 {
		m.mu.Unlock()
		return 0, fmt.Errorf("evict %q: %w; the node's inventory lists what is", what, ErrNotCached)
	}
	var ends []<-chan struct{}
	for _, k := range idle {
		s, _ := m.slots.Peek(k)
		bytes += s.zygote.Bytes
		ends = append(ends, m.step(cache.Drop[zygote.Key]{Key: k}).gone...)
	}
	m.mu.Unlock()
	m.changed()
	for _, gone := range ends {
		select {
		case <-gone:
		case <-ctx.Done():
			return bytes, fmt.Errorf("evict %q: its processes still end: %w", what, context.Cause(ctx))
		}
	}
	return bytes, nil
}

// busyWith says what keeps a slot's zygote from being ended, with m.mu held; empty: nothing.
func (m *Manager) busyWith(k zygote.Key, s *slot) string {
	if s.loading != nil {
		return "it loads; wait for it"
	}
	if names := m.processes.of(s.zygote); len(names) > 0 {
		return fmt.Sprintf("%d replicas run from it (%s); scale the function down first", len(names), strings.Join(names, ", "))
	}
	if m.slots.Entry(k).Busy() {
		return "replicas are being forked from it; try again"
	}
	return ""
}

// Invalidate says that a function's parameters are not what they were, though its image is: when it has returned, nothing
// starts from them any more, and the next start loads them afresh. Their zygote ends with the last of its replicas, which
// the caller ends. Functions that share the parameters are meant too.
func (m *Manager) Invalidate(ctx context.Context, function string) (Invalidation, error) {
	begin := time.Now()
	m.mu.Lock()
	key, ok := m.uses[function]
	if !ok {
		m.mu.Unlock()
		return Invalidation{Took: time.Since(begin)}, nil
	}
	next := key
	next.Generation = m.renew(key)
	for f, used := range m.uses {
		if used == key {
			m.uses[f] = next
		}
	}
	out := Invalidation{Digest: key.Digest, Generation: next.Generation}
	s, ok := m.slots.Peek(key)
	if !ok {
		m.mu.Unlock()
		out.Took = time.Since(begin)
		return out, nil
	}
	z, settled := s.zygote, m.retiring(key, s)
	m.mu.Unlock()
	if z != nil {
		if err := z.Replace(); err != nil && z.Alive() {
			m.cfg.Log.Warn("another daemon would not know that parameters were invalidated", "function", function, "error", err)
		}
	}
	m.tidy()
	m.changed()
	select {
	case <-settled:
	case <-ctx.Done():
		return out, fmt.Errorf("invalidate %q: starts that had begun before still fork: %w", function, context.Cause(ctx))
	}
	if z == nil {
		out.Took = time.Since(begin)
		return out, nil
	}
	m.mu.Lock()
	out.Replicas = m.processes.of(z)
	m.mu.Unlock()
	if m.tidy(); z.Family.Replicas() == 0 {
		select {
		case <-z.Gone():
		case <-ctx.Done():
			return out, fmt.Errorf("invalidate %q: its old zygote, process of %s, still ends: %w", function, plan.Size(z.Bytes), context.Cause(ctx))
		}
	}
	out.Took = time.Since(begin)
	return out, nil
}

// renew makes a new generation of a variant's parameters, which may be kept in another form, and returns its number, with m.mu held.
func (m *Manager) renew(key zygote.Key) uint64 {
	key = key.Variant()
	delete(m.instead, key)
	m.generations[key]++
	return m.generations[key]
}

// newest is a key of the present generation, with m.mu held.
func (m *Manager) newest(key zygote.Key) zygote.Key {
	key.Generation = m.generations[key.Variant()]
	return key
}

// retiring keeps everything from starting from a slot's zygote, with m.mu held, and returns what is closed when the starts
// that had already begun to have forked or gone elsewhere. A load under way is given up.
func (m *Manager) retiring(key zygote.Key, s *slot) <-chan struct{} {
	if s.settled == nil {
		s.settled = make(chan struct{})
		m.step(cache.Invalidate[zygote.Key]{Key: key})
	}
	return s.settled
}

var errInvalid = errors.New("the parameters were invalidated meanwhile")
