package cache

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

const sec = time.Second

// names is how many names the histories use. Those from workers on are of workers.
const (
	names   = 9
	workers = 7
	rests   = 20 * sec
	forked  = 10 // bytes of a replica
	childs  = 15 // bytes of a parked child
)

// model is the cache as the package comment describes it, implemented slowly: a slice in the order
// of use. It also knows the memory really in use, which the core cannot see.
type model struct {
	t      *testing.T
	choose func(n int) int // 0 to n-1
	core   *Core[int]
	now    time.Time
	others int64 // bytes of other processes
	held   []*modelEntry
	short  bool // an eviction has begun
	calm   time.Time
	log    strings.Builder
	counts map[string]int // effects, by type and reason
}

type modelEntry struct {
	name int
	Entry
	parked      int
	wanted      bool
	settled     bool
	idle        time.Time
	workerRests time.Duration
}

func newModel(t *testing.T, choose func(n int) int) *model {
	return &model{t: t, choose: choose, core: New[int](), now: epoch, counts: map[string]int{}}
}

// TestCoreFollowsTheModel runs random histories against the model, each twice.
func TestCoreFollowsTheModel(t *testing.T) {
	t.Parallel()
	counts := map[string]int{}
	for seed := range uint64(300) {
		history := func() string {
			rnd := rand.New(rand.NewPCG(seed, 1))
			m := newModel(t, rnd.IntN)
			for range 300 {
				m.move()
			}
			for what, n := range m.counts {
				counts[what] += n
			}
			return m.log.String()
		}
		if first, second := history(), history(); first != second {
			t.Fatalf("seed %d: two runs differ:\n%s\n---\n%s", seed, first, second)
		}
	}
	for _, what := range []string{
		"load", "wait", "refuse", "unpark", "forget", "discard", "cancel", "settled",
		"evict room", "evict pressure", "evict unused", "evict rested", "evict asked", "a key stage", "again",
	} {
		if counts[what] < 20 {
			t.Errorf("%s: %d times, want 20 at least, or the histories prove nothing about it", what, counts[what])
		}
	}
}

// FuzzStep runs a history that the fuzzer chooses, a byte per choice.
func FuzzStep(f *testing.F) {
	for seed := range uint64(4) {
		rnd, history := rand.New(rand.NewPCG(seed, 2)), make([]byte, 400)
		for i := range history {
			history[i] = byte(rnd.IntN(256))
		}
		f.Add(history)
	}
	f.Fuzz(func(t *testing.T, history []byte) {
		m := newModel(t, func(n int) int {
			if len(history) == 0 {
				return 0
			}
			b := int(history[0])
			history = history[1:]
			return b % n
		})
		for len(history) > 0 {
			m.move()
		}
	})
}

func (m *model) find(name int) *modelEntry {
	i := slices.IndexFunc(m.held, func(e *modelEntry) bool { return e.name == name })
	if i < 0 {
		return nil
	}
	return m.held[i]
}

func (m *model) add(name int) *modelEntry {
	e := m.find(name)
	if e == nil {
		e = &modelEntry{name: name}
		m.held = append(m.held, e)
	}
	return e
}

func (m *model) drop(name int) {
	m.held = slices.DeleteFunc(m.held, func(e *modelEntry) bool { return e.name == name })
}

// used returns the memory in use, which the core is given as the use of two bounds.
func (m *model) used() (bytes int64) {
	for _, e := range m.held {
		if e.Ready {
			bytes += e.Bytes + int64(e.Replicas)*forked + int64(e.parked)*childs
		}
	}
	return bytes
}

func (m *model) bounds() []Bound {
	return []Bound{{"own", 1000, m.used()}, {"machine", 1500, m.used() + m.others}}
}

// coming returns what loads are expected to take.
func (m *model) coming() (bytes int64) {
	for _, e := range m.held {
		if e.Loading {
			bytes += e.Bytes
		}
	}
	return bytes
}

// over returns how many bytes more than a share of a bound are in use.
func (m *model) over(share float64) int64 {
	most := int64(-1 << 40)
	for _, b := range m.bounds() {
		most = max(most, b.Used-int64(share*float64(b.Total)))
	}
	return most
}

// idle returns the entries that may be evicted, in order.
func (m *model) idle() []*modelEntry {
	all := slices.DeleteFunc(slices.Clone(m.held), func(e *modelEntry) bool { return !e.Ready || e.Busy() })
	slices.SortStableFunc(all, func(a, b *modelEntry) int {
		switch {
		case a.KeyStage == b.KeyStage:
			return 0
		case a.KeyStage:
			return 1
		}
		return -1
	})
	return all
}

// victims returns the first entries of a list that together have a number of bytes, and how many
// bytes are missing.
func victims(all []*modelEntry, bytes int64) (out []*modelEntry, missing int64) {
	for _, e := range all {
		if bytes > 0 {
			out = append(out, e)
			bytes -= e.Bytes
		}
	}
	return out, max(0, bytes)
}

// move advances the time, and makes something happen.
func (m *model) move() {
	m.now = m.now.Add([]time.Duration{0, 0, sec / 10, sec / 2, 2 * sec, 11 * sec}[m.choose(6)])
	name := m.choose(names)
	e := m.find(name)
	switch m.choose(14) {
	case 0, 1:
		m.step(Hold[int]{name})
	case 2, 3:
		if e != nil && e.Holds > 0 {
			m.step(Release[int]{name})
		}
	case 4, 5:
		m.want(name)
	case 6:
		if e == nil || !e.Loading { // left by an earlier process
			if m.choose(8) == 0 {
				m.step(Loaded[int]{name, 50})
			}
			return
		}
		if m.choose(4) == 0 {
			m.step(Failed[int]{name})
			m.want(name)
		} else {
			m.step(Loaded[int]{name, max(1, e.Bytes+int64(m.choose(40))-20)})
		}
	case 7:
		if m.choose(3) == 0 {
			m.step(Ended[int]{name, []time.Duration{sec, 20 * sec}[m.choose(2)]})
		}
	case 8, 9:
		u := Using[int]{Key: name, Wanted: m.choose(4) > 0}
		if e != nil && e.Ready {
			u.Replicas, u.Parked = max(0, m.choose(4)-1), max(0, m.choose(4)-2)
		}
		if name >= workers {
			u.Rests = rests
		}
		m.step(u)
	case 10:
		var keys []int
		for i := range names {
			if m.choose(4) == 0 {
				keys = append(keys, i)
			}
		}
		m.step(Mark[int]{keys})
	case 11:
		if m.choose(4) == 0 {
			m.step(Invalidate[int]{name})
		} else {
			m.step(Drop[int]{name})
		}
	default:
		m.others = []int64{0, 0, 200, 500, 900}[m.choose(5)]
		m.step(Weighed{m.bounds()})
	}
}

// want asks for a load. If parked children must end first, it asks once more.
func (m *model) want(name int) {
	w := Want[int]{Key: name, Bytes: 50 + 10*int64(m.choose(40)), Bounds: m.bounds()}
	if fx := m.step(w); len(fx) > 0 && fx[0] == Effect(Unpark{}) {
		w.Freed = w.Bounds[0].Used - m.used()
		m.counts["again"]++
		m.step(w)
	}
}

// step steps the core and the model, and compares them.
func (m *model) step(ev Event) []Effect {
	m.t.Helper()
	want := m.apply(ev)
	got := slices.Clone(m.core.Step(m.now, ev))
	fmt.Fprintf(&m.log, "%v %T%+v: %+v\n", m.now.Sub(epoch), ev, ev, got)
	if !slices.Equal(got, want) {
		m.t.Fatalf("%T%+v:\n got %+v\nwant %+v\n%s", ev, ev, got, want, m.log.String())
	}
	for _, e := range got {
		what := strings.ToLower(strings.TrimSuffix(strings.TrimPrefix(fmt.Sprintf("%T", e), "cache."), "[int]"))
		if v, ok := e.(Evict[int]); ok {
			what += " " + v.Why.String()
		}
		m.counts[what]++
	}
	var order []int
	for _, e := range m.held {
		order = append(order, e.name)
		if is, ok := m.core.Get(e.name); !ok || is != e.Entry {
			m.t.Fatalf("entry %d: %+v, want %+v\n%s", e.name, is, e.Entry, m.log.String())
		}
	}
	if keys := slices.Collect(m.core.Keys()); !slices.Equal(keys, order) || m.core.Len() != len(order) {
		m.t.Fatalf("entries %v, want %v\n%s", keys, order, m.log.String())
	}
	for _, keyStage := range []bool{false, true} {
		idle := m.idle()
		if i := slices.IndexFunc(idle, func(e *modelEntry) bool { return e.KeyStage }); i >= 0 {
			idle = idle[:i]
		}
		missing := 200 + m.coming() + m.over(Threshold)
		if keyStage {
			_, missing = victims(idle, missing)
		}
		want := missing <= 0 && !m.short && !m.now.Before(m.calm)
		if got := m.core.Room(m.now, m.bounds(), 200, keyStage); got != want {
			m.t.Fatalf("room for 200 bytes, of a key stage: %v: %v, want %v\n%s", keyStage, got, want, m.log.String())
		}
	}
	return got
}
