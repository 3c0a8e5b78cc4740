package keysmanager

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/cache"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
)

// loader loads parameters and lends them to starts. It needs no lock of its own, because its own
// fields do not change; what changes is in the store.
type loader struct {
	cfg   *Config
	store *store
	scale *resources.Scale // the memory that the node's processes take
	host  *zygote.Host
	disk  *packedFolders // the files that zygotes keep across restarts
	// Context of loads, which may outlive the orders that began them. It ends with the Manager.
	ctx context.Context

	starts, watchers *sync.WaitGroup // loads under way; one goroutine per zygote
}

// loadTimeout bounds the load of a zygote, also when nobody waits for it any more. If the deadline
// of the start that began the load is later, that deadline is the bound.
const loadTimeout = 5 * time.Minute

// inImage adds the image's environment, which names the model file, to the spec. The function's own
// variables win. If the image does not speak the stage protocol, inImage returns the spec
// unchanged, because the function's watchdog reads the image's environment.
func inImage(s node.Spec, image sandbox.Image) node.Spec {
	if !image.Stage || len(image.Env) == 0 {
		return s
	}
	env := map[string]string{}
	for _, kv := range image.Env {
		// A stage runs with this machine's root, so the PATH of its image does not apply.
		if name, value, ok := strings.Cut(kv, "="); ok && name != "PATH" {
			env[name] = value
		}
	}
	maps.Copy(env, s.Env)
	s.Env = env
	return s
}

// borrow returns the zygote of a key, and loads it first if it is not in memory. The zygote is not
// evicted until release is called. If the parameters are invalidated meanwhile, borrow returns the
// zygote of the next generation. warm reports that the zygote was in memory already.
func (l *loader) borrow(ctx context.Context, key zygote.Key, spec node.Spec, image sandbox.Image) (z *zygote.Zygote, warm bool, release func(), err error) {
	l.store.mu.Lock()
	key = l.store.newest(key) // no order holds a settled key any more
	s := l.store.hold(key)
	warm = s.zygote != nil && s.zygote.Alive()
	l.store.mu.Unlock()
	release = func() {
		l.store.mu.Lock()
		l.store.release(key)
		l.store.mu.Unlock()
		l.tidy()
	}
	for {
		l.store.mu.Lock()
		if s.settled != nil { // invalidated meanwhile: the next generation has another key
			l.store.release(key)
			key = l.store.newest(key)
			s = l.store.hold(key)
		}
		if s.zygote != nil && s.zygote.Alive() {
			z = s.zygote
			l.store.mu.Unlock()
			return z, warm, release, nil
		}
		l.store.recordEnd(key, s)
		err, wait, failed := l.store.mayLoad(key, s), s.loading, s.failed
		l.store.mu.Unlock()
		if err == nil && wait == nil {
			wait, err = l.beginLoad(ctx, key, s, spec, image)
		}
		var pause errPause
		if errors.As(err, &pause) {
			err = sleep(ctx, pause)
		} else if err == nil {
			err = l.awaitLoad(ctx, key, s, wait, failed)
		}
		if err != nil {
			release()
			return nil, false, nil, err
		}
	}
}

// awaitLoad waits until done is closed by the end of a load, and returns the load's error, if it
// failed. failed is the slot's number of failed loads before this load. awaitLoad never waits for a
// second load. It also returns nil if the zygote has loaded and has ended again.
func (l *loader) awaitLoad(ctx context.Context, key zygote.Key, s *slot, done <-chan struct{}, failed uint64) error {
	select {
	case <-done:
	case <-ctx.Done():
		return fmt.Errorf("its %s still loads: %w", key.What(), context.Cause(ctx))
	}
	l.store.mu.Lock()
	defer l.store.mu.Unlock()
	fails := l.store.slots.Entry(key).Fails
	switch {
	case s.failed == failed:
		return nil
	case fails > 1:
		return fmt.Errorf("its %s has not loaded %d times in a row: %w", key.What(), fails, s.err)
	default:
		return fmt.Errorf("its %s has not loaded: %w", key.What(), s.err)
	}
}

// errPause is the error of a zygote that is not loaded until a back-off has passed.
type errPause struct {
	left time.Duration
	error
}

// Unwrap returns the wrapped error.
func (e errPause) Unwrap() error { return e.error }

// longestSleep bounds how long an order waits for a back-off before it checks again. The back-off
// ends early if the parameters are invalidated.
const longestSleep = time.Second

// sleep waits for a back-off, but at most longestSleep.
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

// nothing returns a closed channel: there is nothing to wait for.
func nothing() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

// beginLoad begins to load a slot's zygote, and evicts idle zygotes if they must make room. done is
// closed when the load has ended. If the zygote does not fit, beginLoad returns [ErrNoRoom], which
// does not count as a failed load.
func (l *loader) beginLoad(ctx context.Context, key zygote.Key, s *slot, spec node.Spec, image sandbox.Image) (done chan struct{}, err error) {
	n, err := l.need(key, image)
	now := l.lockWeighed(0)
	defer l.store.mu.Unlock()
	if s.loading != nil || s.settled != nil || s.zygote != nil {
		return nothing(), nil // another start was faster
	}
	if err := l.store.mayLoad(key, s); err != nil {
		return nil, err
	}
	if err != nil {
		l.store.loadFailed(key, s, err)
		return nil, err
	}
	l.store.tell()
	want := cache.Want[zygote.Key]{Key: key, Bytes: n.bytes, Bounds: now.Bounds}
	d := l.store.step(want)
	if d.unpark {
		want.Freed = d.freed
		d = l.store.step(want)
	}
	if !d.load {
		l.store.counts.Refused++
		return nil, l.store.refuse(spec.Function, n, now)
	}
	limit := cmp.Or(l.cfg.loadTimeout, loadTimeout)
	if until, ok := ctx.Deadline(); ok {
		limit = max(limit, time.Until(until))
	}
	ctx, cancel := context.WithCancelCause(l.ctx)
	s.loading, s.need, s.cancel, s.function = make(chan struct{}), n, cancel, spec.Function
	l.starts.Add(1)
	go l.load(ctx, limit, key, s, spec, image, d.gone) // Close waits for it through l.starts
	return s.loading, nil
}

// load starts a slot's zygote after the zygotes that make room for it have ended. Then it wakes the
// orders that wait. It goes on if they have all given up, because the loaded zygote is cached.
func (l *loader) load(ctx context.Context, limit time.Duration, key zygote.Key, s *slot, spec node.Spec, image sandbox.Image, gone []<-chan struct{}) {
	defer l.starts.Done()
	defer s.cancel(nil)
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("it has not loaded after %v", limit))
	defer cancel()
	l.cfg.changed()
	for _, g := range gone {
		select {
		case <-g:
		case <-ctx.Done():
		}
	}
	command := sandbox.Command{Dir: image.Root, Process: spec.Process, Env: l.zygoteEnvironment(key, spec)}
	z, err := l.loadForm(ctx, command, key, spec, func(pid int) {
		l.store.mu.Lock()
		defer l.store.mu.Unlock()
		s.pid = pid
	})
	l.store.mu.Lock()
	stale := l.store.closed || s.settled != nil
	switch {
	case err != nil && !stale:
		l.store.loadFailed(key, s, err)
	case err != nil || l.store.closed:
		l.store.step(cache.Failed[zygote.Key]{Key: key}) // nobody waits for it
	case l.store.fill(key, s, z):
		variant := key
		variant.Generation = 0
		l.store.sizes[variant] = z.Bytes
	}
	close(s.loading)
	s.loading, s.cancel, s.pid = nil, nil, 0
	l.store.mu.Unlock()
	switch {
	// Not logged here: fallBack logs an impossible form, and a stale load has failed as intended.
	case err != nil && (stale || choosesPath(spec) && errors.As(err, new(zygote.Impossible))):
	case err != nil:
		l.cfg.Log.Warn(key.What()+" does not load", "function", spec.Function, "error", err)
	case stale:
		z.Stop()
	default:
		l.cfg.Log.Info(key.What()+" loaded", "function", spec.Function, "took", z.Load.Round(time.Millisecond), "bytes", z.Bytes)
		z.Family.EnsureSpare("")
		l.watchers.Go(func() { l.watch(z.Key, s, z) })
	}
	l.tidy()
	l.cfg.changed()
}

// watch waits for the end of a zygote and records it.
func (l *loader) watch(key zygote.Key, s *slot, z *zygote.Zygote) {
	<-z.Gone()
	l.store.mu.Lock()
	l.store.recordEnd(key, s)
	l.store.mu.Unlock()
	l.tidy()
	l.cfg.changed()
}
