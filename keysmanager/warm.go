package keysmanager

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/cache"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
)

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

// warmAtOnce is how many zygotes Warm loads at a time, and so how many that hang it takes to hold up the others.
const warmAtOnce = 4

// Warm loads the zygotes that are wanted and not there, a few at a time, and marks key stages. The list is complete: what
// is not in it may be evicted when memory is short, and is no key stage. What there is no room for (see Threshold) is left to
// the first order, in silence; functions without a model are passed over. One that does not load, as the error says, keeps
// none of the others from it. When ctx ends nothing more is begun, and nothing waited for; what has begun goes on.
func (m *Manager) Warm(ctx context.Context, wanted []node.Wanted) error {
	m.mu.Lock()
	asks := make([]*asking, len(wanted))
	for i, w := range wanted {
		asks[i] = m.ask(w.Spec.Function)
	}
	m.mu.Unlock()
	defer func() {
		for _, a := range asks {
			m.asked(a)
		}
	}()
	wishes, err := m.wishes(wanted, asks)
	keep := map[zygote.Key]keeping{}
	for _, w := range wishes {
		keep[w.key] = w.keeping
	}
	m.mark(keep)
	return errors.Join(err, m.loadAhead(ctx, wishes, func() { m.mark(keep) }))
}

// wish is a zygote that is wanted, for one of the functions that want it.
type wish struct {
	key    zygote.Key
	spec   node.Spec
	engine engine
	image  sandbox.Image
	asking *asking
	keeping
}

// wishes returns what zygotes are wanted, each once, and what cannot be told of which functions.
func (m *Manager) wishes(wanted []node.Wanted, asks []*asking) (out []*wish, err error) {
	now, seen, byKey := time.Now(), map[string]looked{}, map[zygote.Key]*wish{}
	for i, w := range wanted {
		l, ok := seen[w.Spec.Image]
		if !ok {
			l = m.look(w.Spec.Image, now)
			seen[w.Spec.Image] = l
		}
		s := inImage(w.Spec, l.image)
		if s.Worker != "" {
			continue // which keeps nothing that its stages would start from
		}
		e, fault := engineOf(s, l.image)
		if fault == nil && !e.keeps(s) {
			continue
		}
		if fault = cmp.Or(l.err, fault); fault != nil {
			err = errors.Join(err, fmt.Errorf("warm %q: %w", s.Function, fault))
			continue
		}
		m.mu.Lock()
		key := m.key(s, e, l.image)
		m.mu.Unlock()
		if key.Form == zygote.None {
			continue
		}
		if byKey[key] == nil {
			byKey[key] = &wish{key: key, spec: s, engine: e, image: l.image, asking: asks[i]}
			out = append(out, byKey[key])
		}
		if w.Key && !byKey[key].parks {
			byKey[key].keeping = keepingOf(s, e)
		}
	}
	m.mu.Lock()
	m.looked = seen
	m.mu.Unlock()
	return out, err
}

// loadAhead loads what is not there and has room, in order, and calls loaded after each.
func (m *Manager) loadAhead(ctx context.Context, wishes []*wish, loaded func()) error {
	errs := make([]error, len(wishes))
	var loads sync.WaitGroup
	turns := make(chan struct{}, warmAtOnce)
	for i, w := range wishes {
		select {
		case turns <- struct{}{}:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			errs[i] = fmt.Errorf("warm %q: not begun: %w", w.spec.Function, context.Cause(ctx))
			break
		}
		if !m.worthLoading(w.key, w.image, w.keep) {
			<-turns
			continue
		}
		begun := make(chan struct{})
		loads.Go(func() {
			defer func() { <-turns }()
			if err := m.fulfil(ctx, w, sync.OnceFunc(func() { close(begun) })); err != nil {
				errs[i] = fmt.Errorf("warm %q: %w", w.spec.Function, err)
			}
			loaded()
		})
		<-begun // and its memory is kept for it: what comes next is decided knowing that
	}
	loads.Wait()
	return errors.Join(errs...)
}

// fulfil loads a zygote, and calls begun when that has begun or does not. One that there is no room for any more, or that is not
// wanted any more, is no error.
func (m *Manager) fulfil(ctx context.Context, w *wish, begun func()) error {
	defer begun()
	err := m.possibly(w.asking, w.spec, w.engine, w.image, func(key zygote.Key) error {
		if key.Form == zygote.None {
			return nil
		}
		m.mu.Lock()
		key = m.newest(key)
		s := m.hold(key)
		m.mu.Unlock()
		_, err := m.beginLoad(ctx, key, s, w.spec, w.image)
		m.mu.Lock()
		m.letGo(key) // what loads is not let go of, nor what its function uses
		m.mu.Unlock()
		if err != nil {
			return err
		}
		begun()
		_, _, release, err := m.borrow(ctx, key, w.spec, w.image)
		if err != nil {
			return err
		}
		release()
		return nil
	})
	if errors.Is(err, ErrNoRoom) || errors.Is(err, errForgotten) {
		return nil // left to the first order
	}
	return err
}

// mark says which zygotes are of key stages, and that no others are.
func (m *Manager) mark(keep map[zygote.Key]keeping) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var keyStages []zygote.Key
	for k, s := range m.slots.all {
		variant := k
		variant.Generation = 0
		if s.keeping = keep[variant]; k != m.newest(k) {
			s.keeping = keeping{}
		}
		if s.keep {
			keyStages = append(keyStages, k)
		}
	}
	m.step(cache.Mark[zygote.Key]{Keys: keyStages})
}

// worthLoading says whether a zygote is neither there nor, loaded now, one that would be evicted again.
func (m *Manager) worthLoading(key zygote.Key, image sandbox.Image, keep bool) bool {
	there := func() bool {
		s, ok := m.slots.Peek(m.newest(key))
		return ok && s.zygote != nil && s.zygote.Alive()
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
	now := m.lockWeighed(resources.SampleFresh)
	defer m.mu.Unlock()
	m.tell()
	return !there() && m.slots.cache.Room(time.Now(), now.Bounds, n.bytes, keep)
}
