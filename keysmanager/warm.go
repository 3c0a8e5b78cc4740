package keysmanager

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/stagecoach-serving/stagecoach/sandbox"
	"github.com/stagecoach-serving/stagecoach/wire"
)

// Wanted is a function whose parameters should be in memory.
type Wanted struct {
	Spec Spec
	Key  bool // a key stage: evicted last
}

// lookEvery is how often Warm looks at an image. What is told every second need not be read from the disk as often; each start
// looks for itself.
const lookEvery = 15 * time.Second

// looked is what an image was.
type looked struct {
	image sandbox.Image
	err   error
	at    time.Time
}

// look resolves an image, unless the latest Warm has done so a moment ago.
func (m *Manager) look(image string, now time.Time) looked {
	m.mu.Lock()
	l, ok := m.looked[image]
	m.mu.Unlock()
	if !ok || l.err != nil || now.Sub(l.at) >= lookEvery {
		l.image, l.err = m.cfg.Images.Resolve(image)
		l.at = now
	}
	return l
}

// Warm loads the zygotes that are wanted and not there, one after the other, and marks key stages. The list is complete: what
// is not in it may be evicted when memory is short, and is no key stage. What there is no room for (see Threshold) is left to
// the first order, in silence; functions without a model are passed over. One that does not load, as the error says, keeps
// none of the others from it.
func (m *Manager) Warm(ctx context.Context, wanted []Wanted) error {
	keep := map[zygoteKey]bool{}
	load, images := map[zygoteKey]func() error{}, map[zygoteKey]sandbox.Image{}
	var order []zygoteKey
	var errs []error
	now, seen := time.Now(), map[string]looked{}
	var asks []*asking
	m.mu.Lock()
	for _, w := range wanted {
		asks = append(asks, m.ask(w.Spec.Function))
	}
	m.mu.Unlock()
	defer func() {
		for _, a := range asks {
			m.asked(a)
		}
	}()
	for i, w := range wanted {
		l, ok := seen[w.Spec.Image]
		if !ok {
			l = m.look(w.Spec.Image, now)
			seen[w.Spec.Image] = l
		}
		image, err := l.image, l.err
		w.Spec = w.Spec.in(image)
		if w.Spec.Env[wire.EnvModel] == "" {
			continue
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("warm %q: %w", w.Spec.Function, err))
			continue
		}
		m.mu.Lock()
		key := m.key(w.Spec, image)
		m.mu.Unlock()
		if key.form == formNone {
			continue
		}
		keep[key] = keep[key] || w.Key
		order = append(order, key)
		images[key] = image
		load[key] = func() error {
			err := m.loaded(ctx, asks[i], w.Spec, image, nil)
			if errors.Is(err, ErrNoRoom) || errors.Is(err, errForgotten) {
				return nil // left to the first order, or not wanted any more
			}
			if err != nil {
				return fmt.Errorf("warm %q: %w", w.Spec.Function, err)
			}
			return nil
		}
	}
	m.mu.Lock()
	m.looked = seen
	m.mu.Unlock()
	m.mark(keep)
	for _, key := range order {
		if m.worthLoading(key, images[key], keep[key]) {
			errs = append(errs, load[key]())
		}
	}
	m.mark(keep)
	return errors.Join(errs...)
}

// mark says which zygotes are of key stages, and that no others are.
func (m *Manager) mark(keep map[zygoteKey]bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, k := range m.slots.Keys() {
		s, _ := m.slots.Peek(k)
		newest := k == m.newest(k)
		k.generation = 0
		s.keep = keep[k] && newest
	}
}

// worthLoading says whether a zygote is neither there nor, loaded now, one that would be evicted again.
func (m *Manager) worthLoading(key zygoteKey, image sandbox.Image, keep bool) bool {
	there := func() bool {
		s, ok := m.slots.Peek(m.newest(key))
		return ok && s.zygote != nil && s.zygote.alive()
	}
	m.mu.Lock()
	ready := there()
	m.mu.Unlock()
	if ready {
		return false
	}
	n, err := m.need(key, image)
	if err != nil {
		return true // loading says why
	}
	now := m.lockWeighed(sampleFresh)
	defer m.mu.Unlock()
	return !there() && room(m.cached(), m.memory(now), n.bytes, keep)
}
