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

// ahead loads parameters ahead of need.
type ahead struct {
	loader *loader

	mu     sync.Mutex        // guards looked; nothing is called under it
	looked map[string]looked // by image, as the latest Warm saw it
}

// lookEvery is how long Warm reuses a resolved image. Warm is called every second, and need not
// read the disk each time. A start always resolves its image itself.
const lookEvery = 15 * time.Second

// looked is a resolved image, and when it was resolved.
type looked struct {
	image sandbox.Image
	err   error
	at    time.Time
}

// look resolves an image, unless an earlier Warm has resolved it less than lookEvery ago.
func (h *ahead) look(image string, now time.Time) looked {
	h.mu.Lock()
	l, ok := h.looked[image]
	h.mu.Unlock()
	if !ok || l.err != nil || now.Sub(l.at) >= lookEvery {
		l.image, l.err = h.loader.cfg.Images.Resolve(image)
		l.at = now
	}
	return l
}

// warmAtOnce is how many zygotes Warm loads at the same time. As long as fewer loads hang, the
// others go on.
const warmAtOnce = 4

// Warm loads the zygotes of the wanted functions that are not in memory, a few at a time, and marks
// the zygotes of key stages. The list is complete: all other zygotes are unmarked, and may be
// evicted when memory is short.
//
// Warm skips functions without a model. It leaves a zygote that does not fit (see Threshold) to the
// first order, without an error. If a load fails, the others go on, and the error names the zygotes
// that did not load. When ctx ends, Warm begins no more loads and returns; loads under way go on.
func (m *Manager) Warm(ctx context.Context, wanted []node.Wanted) error {
	return m.ahead.load(ctx, wanted)
}

// load implements Manager.Warm.
func (h *ahead) load(ctx context.Context, wanted []node.Wanted) error {
	h.loader.store.mu.Lock()
	asks := make([]*asking, len(wanted))
	for i, w := range wanted {
		asks[i] = h.loader.store.ask(w.Spec.Function)
	}
	h.loader.store.mu.Unlock()
	defer func() {
		for _, a := range asks {
			h.loader.store.asked(a)
		}
	}()
	wishes, err := h.wishes(wanted, asks)
	keep := map[zygote.Key]keeping{}
	for _, w := range wishes {
		keep[w.key] = w.keeping
	}
	h.mark(keep)
	return errors.Join(err, h.loadAhead(ctx, wishes, func() { h.mark(keep) }))
}

// wish is a zygote to load, for one of the functions that want it.
type wish struct {
	key    zygote.Key
	spec   node.Spec
	engine engine
	image  sandbox.Image
	asking *asking
	keeping
}

// wishes returns the zygotes to load, each once, and an error for each function whose image cannot
// be read.
func (h *ahead) wishes(wanted []node.Wanted, asks []*asking) (out []*wish, err error) {
	now, seen, byKey := time.Now(), map[string]looked{}, map[zygote.Key]*wish{}
	for i, w := range wanted {
		l, ok := seen[w.Spec.Image]
		if !ok {
			l = h.look(w.Spec.Image, now)
			seen[w.Spec.Image] = l
		}
		s := inImage(w.Spec, l.image)
		if s.Worker != "" {
			continue // its stages start from nothing that the node keeps
		}
		e, fault := engineOf(s, l.image)
		if fault == nil && !e.keeps(s) {
			continue
		}
		if fault = cmp.Or(l.err, fault); fault != nil {
			err = errors.Join(err, fmt.Errorf("warm %q: %w", s.Function, fault))
			continue
		}
		h.loader.store.mu.Lock()
		key := h.loader.store.key(s, e, l.image)
		h.loader.store.mu.Unlock()
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
	h.mu.Lock()
	h.looked = seen
	h.mu.Unlock()
	return out, err
}

// loadAhead loads the zygotes that are missing and for which there is room, in order. It calls
// loaded after each.
func (h *ahead) loadAhead(ctx context.Context, wishes []*wish, loaded func()) error {
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
		if !h.worthLoading(w.key, w.image, w.keep) {
			<-turns
			continue
		}
		begun := make(chan struct{})
		loads.Go(func() {
			defer func() { <-turns }()
			if err := h.fulfil(ctx, w, sync.OnceFunc(func() { close(begun) })); err != nil {
				errs[i] = fmt.Errorf("warm %q: %w", w.spec.Function, err)
			}
			loaded()
		})
		<-begun // its memory is reserved now, so the next decision counts it
	}
	loads.Wait()
	return errors.Join(errs...)
}

// fulfil loads a zygote. It calls begun when the load has begun or will not begin. If there is no
// room any more, or the function has been removed, it returns nil.
func (h *ahead) fulfil(ctx context.Context, w *wish, begun func()) error {
	defer begun()
	err := h.loader.withPossibleForm(w.asking, w.spec, w.engine, w.image, func(key zygote.Key) error {
		if key.Form == zygote.None {
			return nil
		}
		h.loader.store.mu.Lock()
		key = h.loader.store.newest(key)
		s := h.loader.store.hold(key)
		h.loader.store.mu.Unlock()
		_, err := h.loader.beginLoad(ctx, key, s, w.spec, w.image)
		h.loader.store.mu.Lock()
		h.loader.store.release(key) // a zygote that loads is not evicted, nor one that its function uses
		h.loader.store.mu.Unlock()
		if err != nil {
			return err
		}
		begun()
		_, _, release, err := h.loader.borrow(ctx, key, w.spec, w.image)
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

// mark marks the zygotes of key stages, and unmarks all others.
func (h *ahead) mark(keep map[zygote.Key]keeping) {
	h.loader.store.mu.Lock()
	defer h.loader.store.mu.Unlock()
	var keyStages []zygote.Key
	for k, s := range h.loader.store.slots.all {
		variant := k
		variant.Generation = 0
		if s.keeping = keep[variant]; k != h.loader.store.newest(k) {
			s.keeping = keeping{}
		}
		if s.keep {
			keyStages = append(keyStages, k)
		}
	}
	h.loader.store.step(cache.Mark[zygote.Key]{Keys: keyStages})
}

// worthLoading reports whether a zygote is missing and would stay in memory if it were loaded now.
func (h *ahead) worthLoading(key zygote.Key, image sandbox.Image, keep bool) bool {
	there := func() bool {
		s, ok := h.loader.store.slots.Peek(h.loader.store.newest(key))
		return ok && s.zygote != nil && s.zygote.Alive()
	}
	h.loader.store.mu.Lock()
	ready := there()
	h.loader.store.mu.Unlock()
	if ready {
		return false
	}
	n, err := h.loader.need(key, image)
	if err != nil {
		return true // the load reports why
	}
	now := h.loader.lockWeighed(resources.SampleFresh)
	defer h.loader.store.mu.Unlock()
	h.loader.store.tell()
	return !there() && h.loader.store.slots.cache.Room(time.Now(), now.Bounds, n.bytes, keep)
}
