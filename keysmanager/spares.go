package keysmanager

import (
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/cache"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// spares has the processes that wait for the next starts of functions without a zygote, each in its
// container. They are made by tend, in the background, and never count as replicas.
type spares struct {
	m *Manager

	// Guards the fields below. It is taken after the store's mutex, and no other lock under it.
	mu     sync.Mutex
	closed bool
	sets   map[string]*spareSet // by function, once it has started
}

// spareSet is the spares of a function, all of one revision.
type spareSet struct {
	of    string // what identifies the revision: see identity
	spec  node.Spec
	image sandbox.Image

	want     int
	ready    []*spare
	making   bool      // one is being made
	next     time.Time // no other is made before
	failures int       // in a row
	used     time.Time // when a replica has last started or run
}

const (
	// spareAfter keeps a new spare from slowing the start that has taken the one before.
	spareAfter = 250 * time.Millisecond
	// spareRests is how long spares outlive the last replica of their function.
	spareRests = time.Hour
	// spareBytes is how much memory must be free for another spare.
	spareBytes = 64 << 20
	// After failures in a row, the pause before the next attempt doubles between these two.
	spareRetry     = time.Second
	spareLastRetry = 5 * time.Minute
)

func newSpares(m *Manager) *spares {
	s := &spares{m: m, sets: map[string]*spareSet{}}
	m.store.spares = s
	return s
}

// identity returns what identifies a revision of a function: spares of another one are of no use.
func identity(s node.Spec, image sandbox.Image) string {
	b, err := json.Marshal(struct {
		Spec  node.Spec
		Image sandbox.Image
	}{s, image})
	if err != nil {
		panic(err) // cannot happen: they have only strings, numbers, lists and maps
	}
	sum := sha256.Sum256(b)
	return string(sum[:])
}

// wanted returns how many spares a function may have here.
func (s *spares) wanted(spec node.Spec) int {
	if spec.Devices > 0 { // a container's devices are chosen with its replica
		return 0
	}
	return min(spec.Options.Spares, s.m.cfg.Spares)
}

// take returns a spare for a start, which owns it from then on; nil: there is none.
func (s *spares) take(o node.Order, image sandbox.Image) *spare {
	if s.wanted(o.Spec) == 0 || o.Device != "" {
		return nil
	}
	for of := identity(o.Spec, image); ; {
		s.mu.Lock()
		set := s.sets[o.Spec.Function]
		if set == nil || set.of != of || len(set.ready) == 0 {
			s.mu.Unlock()
			return nil
		}
		first := set.ready[0]
		set.ready = set.ready[1:]
		s.mu.Unlock()
		close(first.taken)
		<-first.left
		switch {
		case first.dead:
		case first.secrets != stamp(o.Spec.Secrets): // its container has copies
			s.m.ends.Go(func() { s.m.starter.endSpare(first) })
		default:
			return first
		}
	}
}

// started records that a replica of a function has started. From now on the function has as many
// spares as it asks for.
func (s *spares) started(p *process, o node.Order, image sandbox.Image) {
	if s.m.cfg.Spares == 0 {
		return
	}
	s.m.store.mu.Lock()
	defer s.m.store.mu.Unlock()
	if p.asking.forgotten {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	function, of, want := o.Spec.Function, identity(o.Spec, image), s.wanted(o.Spec)
	set := s.sets[function]
	if set != nil && set.of != of || want == 0 {
		s.dropLocked(function)
		set = nil
	}
	if want == 0 || s.closed {
		return
	}
	if set == nil {
		set = &spareSet{of: of, spec: o.Spec, image: image, want: want}
		s.sets[function] = set
	}
	if p.path == PathSpare {
		set.failures = 0
	}
	set.used = time.Now()
	if pause := set.used.Add(spareAfter); set.next.Before(pause) {
		set.next = pause
	}
}

// drop ends the spares of a function.
func (s *spares) drop(function string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dropLocked(function)
}

func (s *spares) dropLocked(function string) {
	if set := s.sets[function]; set != nil {
		delete(s.sets, function)
		set.empty()
	}
}

// empty ends all spares of a set.
func (set *spareSet) empty() {
	for _, one := range set.ready {
		close(one.unwanted)
	}
	set.ready = nil
}

// close ends all spares. None is made from then on.
func (s *spares) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for function := range s.sets {
		s.dropLocked(function)
	}
}

// Deployed notes the spec with which a function is deployed now. Spares of another one end.
func (m *Manager) Deployed(spec node.Spec) {
	image, err := m.cfg.Images.Resolve(spec.Image)
	m.spares.mu.Lock()
	defer m.spares.mu.Unlock()
	if set := m.spares.sets[spec.Function]; set != nil && (err != nil || set.of != identity(inImage(spec, image), image)) {
		m.spares.dropLocked(spec.Function)
	}
}

// pids returns the processes of all spares.
func (s *spares) pids() (out []int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, set := range s.sets {
		for _, one := range set.ready {
			out = append(out, one.pid)
		}
	}
	return out
}

// count returns how many spares are ready, by function.
func (s *spares) count() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[string]int{}
	for function, set := range s.sets {
		if len(set.ready) > 0 {
			out[function] = len(set.ready)
		}
	}
	return out
}

// tend begins to make missing spares: one at a time per function. It ends those of functions that
// are not used any more, and all of them while memory is short.
func (s *spares) tend() {
	s.mu.Lock()
	none := len(s.sets) == 0
	s.mu.Unlock()
	if none {
		return
	}
	_, room := cache.Tightest(s.m.loader.weigh(resources.SampleFresh).Bounds, Threshold)
	running := map[string]bool{}
	s.m.store.mu.Lock()
	for _, p := range s.m.store.processes {
		running[p.function] = true
	}
	s.m.store.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	now, rests := time.Now(), cmp.Or(s.m.cfg.spareRests, spareRests)
	for function, set := range s.sets {
		if running[function] {
			set.used = now
		}
		switch {
		case now.Sub(set.used) >= rests:
			s.dropLocked(function)
		case room <= 0:
			set.empty()
		case !set.making && len(set.ready) < set.want && room >= spareBytes && !now.Before(set.next) && !s.closed:
			set.making = true
			s.m.starts.Go(func() { s.make(function, set) })
		}
	}
}

// make makes a spare for a set.
func (s *spares) make(function string, set *spareSet) {
	one, err := s.m.starter.newSpare(s.m.ctx, set.spec, set.image)
	defer s.m.cfg.changed() // after the mutex is unlocked
	s.mu.Lock()
	defer s.mu.Unlock()
	set.making = false
	switch {
	case err != nil:
		set.failed()
		if s.m.ctx.Err() == nil {
			s.m.cfg.Log.Warn("no spare container for the next start", "function", function, "retry", time.Until(set.next).Round(time.Second), "error", err)
		}
	case s.closed || s.sets[function] != set || len(set.ready) >= set.want:
		close(one.unwanted)
	case one.dead:
		set.failed()
	default:
		set.ready = append(set.ready, one)
	}
}

// failed postpones the next attempt to make a spare.
func (set *spareSet) failed() {
	set.failures++
	set.next = time.Now().Add(min(spareRetry<<min(set.failures, 16), spareLastRetry))
}

// lost records that a spare has ended by itself.
func (s *spares) lost(one *spare) {
	s.mu.Lock()
	defer s.mu.Unlock()
	one.dead = true
	set := s.sets[one.function]
	if set == nil {
		return
	}
	if i := slices.Index(set.ready, one); i >= 0 {
		set.ready = slices.Delete(set.ready, i, i+1)
		set.failed()
		s.m.cfg.Log.Info("a spare container has ended", "function", one.function, "spare", one.entry)
	}
}

// stamp describes the files of a folder, so that it changes with them.
func stamp(folder string) string {
	if folder == "" {
		return ""
	}
	text := ""
	add := func(path string) {
		info, err := os.Stat(path)
		if err != nil {
			text += err.Error()
			return
		}
		text += fmt.Sprintf("%q %d %d", path, info.Size(), info.ModTime().UnixNano())
		if st, ok := info.Sys().(*syscall.Stat_t); ok {
			text += fmt.Sprintf(" %d %d", st.Ino, st.Ctim.Nano())
		}
	}
	add(folder)
	entries, _ := os.ReadDir(folder) // if it cannot be read, its own line says why
	for _, e := range entries {
		add(filepath.Join(folder, e.Name()))
	}
	return text
}
