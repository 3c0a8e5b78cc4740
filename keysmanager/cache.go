package keysmanager

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/sandbox"
	"github.com/stagecoach-serving/stagecoach/wire"
)

// loadTimeout bounds the load of a zygote that nobody waits for any more.
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

// borrow returns the zygote of a key, loaded if it was not there, and keeps it from eviction until release is called.
// warm says that it was there.
func (m *Manager) borrow(ctx context.Context, key zygoteKey, spec Spec, image sandbox.Image) (z *zygote, warm bool, release func(), err error) {
	m.mu.Lock()
	m.uses[spec.Function] = key
	s, ok := m.slots.Get(key) // now the most recently used
	if !ok {
		s = &slot{}
		m.slots.Add(key, s)
	}
	s.users++
	warm = s.zygote != nil && s.zygote.alive()
	m.mu.Unlock()
	release = func() {
		m.mu.Lock()
		s.users--
		m.mu.Unlock()
		m.tidy()
	}
	for {
		m.mu.Lock()
		if s.zygote != nil && s.zygote.alive() {
			z = s.zygote
			m.mu.Unlock()
			return z, warm, release, nil
		}
		m.mourn(key, s)
		if err := m.mayLoad(s); err != nil {
			m.mu.Unlock()
			release()
			return nil, false, nil, err
		}
		if s.loading == nil {
			s.loading = make(chan struct{})
			m.starts.Add(1)
			go m.load(key, s, spec, image, s.loading) // Close waits for it through m.starts
		}
		wait := s.loading
		m.mu.Unlock()
		select {
		case <-wait:
		case <-ctx.Done():
			release()
			return nil, false, nil, fmt.Errorf("its zygote still loads: %w", context.Cause(ctx))
		}
	}
}

// mayLoad says why a zygote is not loaded now, with m.mu held.
func (m *Manager) mayLoad(s *slot) error {
	switch left := time.Until(s.retry); {
	case m.closed:
		return ErrClosed
	case m.cfg.ORT == "":
		return errNoORT
	case s.loading == nil && s.fails > 0 && left > 0:
		return fmt.Errorf("its zygote failed %d times in a row, next try in %v: %w", s.fails, left.Round(time.Millisecond), s.err)
	}
	return nil
}

// load starts a slot's zygote and tells those who wait. It goes on when they have given up: what is loaded is cached.
func (m *Manager) load(key zygoteKey, s *slot, spec Spec, image sandbox.Image, done chan struct{}) {
	defer m.starts.Done()
	ctx, cancel := context.WithTimeout(m.ctx, loadTimeout)
	defer cancel()
	env := map[string]string{
		wire.EnvModel: key.model, wire.EnvORT: m.cfg.ORT, wire.EnvPoolThreads: strconv.Itoa(m.cfg.Threads), "ORT_DISABLE_TELEMETRY": "1",
	}
	if folder := m.prepacked(image.Digest); folder != "" && key.form == formFork {
		env[wire.EnvPrepacked] = folder
	}
	z, err := m.bring(ctx, sandbox.Command{Dir: image.Root, Process: spec.Process, Env: env}, key, spec)
	m.mu.Lock()
	s.loading, s.zygote, s.err = nil, z, err
	if err != nil {
		s.fails++
		s.retry = time.Now().Add(backoff(s.fails))
	}
	closing := m.closed
	m.mu.Unlock()
	close(done)
	switch {
	case spec.choice() && errors.As(err, new(impossible)): // fallBack says so
	case err != nil:
		m.cfg.Log.Warn("zygote does not load", "function", spec.Function, "error", err)
	case closing:
		z.stop()
	default:
		m.cfg.Log.Info("zygote loaded", "function", spec.Function, "took", z.load.Round(time.Millisecond), "bytes", z.bytes)
		m.watchers.Go(func() { m.watch(key, s, z) })
	}
	m.tidy()
}

// prepacked returns the folder for the pre-packed parameters of an image's model; empty when none can be kept.
func (m *Manager) prepacked(digest string) string {
	if m.cfg.Cache == "" {
		return ""
	}
	folder, err := filepath.Abs(filepath.Join(m.cfg.Cache, digest))
	if err == nil {
		err = os.MkdirAll(folder, 0o700)
	}
	if err != nil {
		m.cfg.Log.Warn("parameters are not pre-packed", "error", err)
		return ""
	}
	return folder
}

// watch notices the end of a zygote.
func (m *Manager) watch(key zygoteKey, s *slot, z *zygote) {
	<-z.gone
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mourn(key, s)
}

// mourn empties the slot of a zygote that ended unasked, which counts as a failure, with m.mu held.
func (m *Manager) mourn(key zygoteKey, s *slot) {
	if s.zygote == nil || s.zygote.alive() || m.closed {
		return
	}
	if time.Since(s.zygote.loaded) > lastBackoff {
		s.fails = 0 // it had lived for long enough
	}
	s.fails++
	s.err = errors.New(s.zygote.died)
	s.retry = time.Now().Add(backoff(s.fails))
	m.cfg.Log.Warn("zygote ended", "model", key.model, "cause", s.zygote.died)
	s.zygote = nil
}

// limit is how many bytes zygotes may take.
func (m *Manager) limit() int64 { return int64(float64(m.cfg.Memory) * Threshold) }

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

// tidy ends zygotes that nobody's present spec uses and, above the threshold, idle ones. Their ends are not waited for.
func (m *Manager) tidy() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return
	}
	current, variants := map[zygoteKey]bool{}, map[zygoteKey]bool{}
	for _, k := range m.uses {
		current[k], variants[k.zygotes()] = true, true
	}
	maps.DeleteFunc(m.instead, func(k zygoteKey, _ form) bool { return !variants[k] })
	for _, k := range m.slots.Keys() {
		if s, _ := m.slots.Peek(k); !current[k] && s.zygote == nil && s.loading == nil && s.users == 0 {
			m.slots.Remove(k)
		}
	}
	for _, c := range m.cached() {
		if !current[c.key] && !c.busy {
			m.retire(c.key)
		}
	}
	maps.DeleteFunc(m.sizes, func(k zygoteKey, _ int64) bool { return !current[k] })
	all := m.cached()
	for _, k := range evict(all, m.limit()) {
		i := slices.IndexFunc(all, func(c cached) bool { return c.key == k })
		m.sizes[k] = all[i].bytes
		m.counts.Evictions++
		if m.cfg.OnEvict != nil {
			m.cfg.OnEvict(m.userOf(k), all[i].bytes)
		}
		m.retire(k)
	}
}

// userOf is the function that uses a zygote, the first by name when several do, with m.mu held.
func (m *Manager) userOf(k zygoteKey) string {
	first := ""
	for f, used := range m.uses {
		if used == k && (first == "" || f < first) {
			first = f
		}
	}
	return first
}

// retire takes a zygote out of the cache and ends it, with m.mu held.
func (m *Manager) retire(k zygoteKey) {
	s, _ := m.slots.Peek(k)
	m.ends.Go(s.zygote.stop)
	s.zygote = nil
	m.slots.Remove(k)
}

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
	load := map[zygoteKey]func() error{}
	var order []zygoteKey
	var errs []error
	now, seen := time.Now(), map[string]looked{}
	for _, w := range wanted {
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
		load[key] = func() error {
			if err := m.loaded(ctx, w.Spec, image, nil); err != nil {
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
		if m.worthLoading(key, keep[key]) {
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
		s.keep = keep[k]
	}
}

// worthLoading says whether a zygote is neither there nor, loaded now, one that would be evicted again.
func (m *Manager) worthLoading(key zygoteKey, keep bool) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if s, ok := m.slots.Peek(key); ok && s.zygote != nil && s.zygote.alive() {
		return false
	}
	return room(m.cached(), m.sizes[key], keep, m.limit())
}

// Forget says that a function is no longer deployed: its zygote goes once it has no replicas.
func (m *Manager) Forget(function string) {
	m.mu.Lock()
	delete(m.uses, function)
	m.mu.Unlock()
	m.totals.forget(function)
	m.tidy()
}
