package keysmanager

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/stagecoach-serving/stagecoach/sandbox"
	"github.com/stagecoach-serving/stagecoach/wire"
)

// loadTimeout bounds the load of a zygote that nobody waits for any more.
const loadTimeout = 5 * time.Minute

func (s Spec) key(image sandbox.Image) zygoteKey {
	return zygoteKey{namespace: s.Namespace, digest: image.Digest, model: s.Env[wire.EnvModel], process: s.Process}
}

// borrow returns the zygote of a function, loaded if it was not there, and keeps it from eviction until release is called.
// warm says that it was there.
func (m *Manager) borrow(ctx context.Context, spec Spec, image sandbox.Image) (z *zygote, warm bool, release func(), err error) {
	key := spec.key(image)
	m.mu.Lock()
	m.uses[spec.Function] = key
	s, ok := m.slots.Get(key) // now the most recently used
	if !ok {
		s = &slot{}
		m.slots.Add(key, s)
	}
	s.users++
	m.mu.Unlock()
	release = func() {
		m.mu.Lock()
		s.users--
		m.mu.Unlock()
		m.tidy()
	}
	warm = true
	for {
		m.mu.Lock()
		if s.zygote != nil && s.zygote.alive() {
			z = s.zygote
			m.mu.Unlock()
			m.metrics.lookup(warm)
			return z, warm, release, nil
		}
		warm = false
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
			return nil, false, nil, fmt.Errorf("its zygote still loads: %w", ctx.Err())
		}
	}
}

// mayLoad says why a zygote is not loaded now, with m.mu held.
func (m *Manager) mayLoad(s *slot) error {
	switch left := time.Until(s.retry); {
	case m.closed:
		return ErrClosed
	case m.cfg.ORT == "":
		return fmt.Errorf("the function has a model (%s) and ONNX Runtime is not configured: start with --ort", wire.EnvModel)
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
	if folder := m.prepacked(image.Digest); folder != "" {
		env[envPrepacked] = folder
	}
	name := "zygote of " + spec.Function
	z, err := startZygote(ctx, m.spawner, sandbox.Command{Dir: image.Root, Process: spec.Process, Env: env}, key,
		func(stream, line string) { m.cfg.Output(name, stream, line) })
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

// envPrepacked names the folder for a model's pre-packed form, see package stage/zygote.
const envPrepacked = "STAGECOACH_PREPACKED"

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
	if time.Since(s.zygote.begun) > lastBackoff {
		s.fails = 0 // it had lived for long enough
	}
	s.fails++
	s.err = errors.New(s.zygote.died)
	s.retry = time.Now().Add(backoff(s.fails))
	m.cfg.Log.Warn("zygote ended", "model", key.model, "cause", s.zygote.died)
	s.zygote = nil
}

// tidy ends zygotes that nobody's present spec uses and, above the threshold, idle ones.
func (m *Manager) tidy() {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return
	}
	current := map[zygoteKey]bool{}
	for _, k := range m.uses {
		current[k] = true
	}
	var all []cached
	var ended []*zygote
	for _, k := range m.slots.Keys() { // oldest first
		s, _ := m.slots.Peek(k)
		if s.zygote == nil {
			if !current[k] && s.loading == nil && s.users == 0 {
				m.slots.Remove(k)
			}
			continue
		}
		busy := s.users > 0 || s.zygote.replicas() > 0
		if !current[k] && !busy {
			ended = append(ended, m.retire(k, s))
			continue
		}
		all = append(all, cached{key: k, bytes: s.zygote.bytes, busy: busy, keep: s.keep})
	}
	for _, k := range evict(all, int64(float64(m.cfg.Memory)*Threshold)) {
		s, _ := m.slots.Peek(k)
		ended = append(ended, m.retire(k, s))
		m.metrics.evictions.Inc()
	}
	m.starts.Add(len(ended))
	m.mu.Unlock()
	for _, z := range ended {
		z.stop()
		m.starts.Done()
	}
}

// retire takes a zygote out of the cache, with m.mu held.
func (m *Manager) retire(k zygoteKey, s *slot) *zygote {
	z := s.zygote
	s.zygote = nil
	m.slots.Remove(k)
	return z
}

// Wanted is a function whose parameters should be in memory.
type Wanted struct {
	Spec Spec
	Key  bool // a key stage: evicted last
}

// Warm loads the zygotes that are wanted and not there, and marks key stages. The list is complete: what is not in it may be
// evicted when memory is short. Functions without a model are passed over. It waits for the loads until ctx ends.
func (m *Manager) Warm(ctx context.Context, wanted []Wanted) error {
	keep := map[zygoteKey]bool{}
	for _, w := range wanted {
		if w.Spec.Env[wire.EnvModel] == "" {
			continue
		}
		image, err := m.cfg.Images.Resolve(w.Spec.Image)
		if err != nil {
			return fmt.Errorf("warm %q: %w", w.Spec.Function, err)
		}
		keep[w.Spec.key(image)] = w.Key
		_, _, release, err := m.borrow(ctx, w.Spec, image)
		if err != nil {
			return fmt.Errorf("warm %q: %w", w.Spec.Function, err)
		}
		release()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, k := range m.slots.Keys() {
		s, _ := m.slots.Peek(k)
		s.keep = keep[k]
	}
	return nil
}

// Forget says that a function is no longer deployed: its zygote goes once it has no replicas.
func (m *Manager) Forget(function string) {
	m.mu.Lock()
	delete(m.uses, function)
	m.mu.Unlock()
	m.tidy()
}
