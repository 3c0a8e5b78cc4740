package lease

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
)

// world is a simulated store with processes around it, in true time.
type world struct {
	t      *testing.T
	rand   *rand.Rand
	now    time.Duration
	events agenda
	serial int

	record   Record
	revision uint64
	top      uint64 // highest epoch that was stored

	procs []*process
	spans []span // what processes have believed, in true time

	loss  float64 // share of messages that are lost
	delay time.Duration
	late  bool // some messages take up to 10 s
	twice bool // some writes arrive twice
}

// process is one Core with its clock.
type process struct {
	w      *world
	core   *Core
	name   string
	begin  time.Duration // true time of its clock's zero
	rate   float64       // of its clock
	paused time.Duration // true time until which nothing runs
	dead   bool
	held   int // index of its latest span, from 1; 0: none
	freed  int // releases that have ended
}

// span is a time for which a process believes that it holds the lease.
type span struct {
	name        string
	epoch       uint64
	since       uint64 // epoch of the first holding that no other process has interrupted
	from, until time.Duration
}

type agenda []event

type event struct {
	at     time.Duration
	serial int
	run    func()
}

func (a agenda) Len() int { return len(a) }
func (a agenda) Less(i, j int) bool {
	return a[i].at < a[j].at || a[i].at == a[j].at && a[i].serial < a[j].serial
}
func (a agenda) Swap(i, j int) { a[i], a[j] = a[j], a[i] }
func (a *agenda) Push(x any)   { *a = append(*a, x.(event)) }
func (a *agenda) Pop() any     { x := (*a)[len(*a)-1]; *a = (*a)[:len(*a)-1]; return x }

func (w *world) at(t time.Duration, run func()) {
	w.serial++
	heap.Push(&w.events, event{max(t, w.now), w.serial, run})
}

// send delivers a message, unless it is lost. Some messages take very long.
func (w *world) send(run func()) {
	if w.rand.Float64() < w.loss {
		return
	}
	d := time.Duration(w.rand.ExpFloat64() * float64(w.delay))
	if w.late && w.rand.IntN(20) == 0 {
		d += time.Duration(w.rand.Int64N(int64(10 * time.Second)))
	}
	w.at(w.now+d, run)
}

func (w *world) run(until time.Duration) {
	for len(w.events) > 0 && w.events[0].at <= until {
		e := heap.Pop(&w.events).(event)
		w.now = e.at
		e.run()
	}
	w.now = until
}

// local returns a process's own time.
func (p *process) local() time.Duration {
	return time.Duration(float64(p.w.now-p.begin) * p.rate)
}

// true returns the true time of a process's own time.
func (p *process) true(at time.Duration) time.Duration {
	return p.begin + time.Duration(float64(at)/p.rate)
}

// step applies an event once the process runs.
func (p *process) step(ev Event) {
	if p.dead {
		return
	}
	if p.w.now < p.paused {
		p.w.at(p.paused, func() { p.step(ev) })
		return
	}
	for _, e := range p.core.Step(p.local(), ev) {
		p.carryOut(e)
	}
	p.believe()
}

// believe extends what the process believes up to the end of its holding.
func (p *process) believe() {
	epoch, ok := p.core.Holds(p.local())
	if !ok {
		if p.held > 0 && p.w.spans[p.held-1].until > p.w.now {
			p.w.spans[p.held-1].until = p.w.now
		}
		p.held = 0
		return
	}
	until := p.true(p.core.until)
	if p.held > 0 && p.w.spans[p.held-1].epoch == epoch {
		p.w.spans[p.held-1].until = until
		return
	}
	p.w.spans = append(p.w.spans, span{p.name, epoch, p.core.Since(), p.w.now, until})
	p.held = len(p.w.spans)
}

func (p *process) carryOut(e Effect) {
	w := p.w
	switch e := e.(type) {
	case Wake:
		w.at(p.true(e.At)+time.Microsecond, func() { p.step(Tick{}) })
	case Read:
		w.send(func() { seen := Seen{w.record, w.revision}; w.send(func() { p.step(seen) }) })
	case Write:
		w.send(func() { w.write(p, e) })
		if w.twice && w.rand.IntN(4) == 0 {
			w.send(func() { w.write(p, e) })
		}
	case Freed:
		p.freed++
	}
}

// write is a write's arrival at the store. Everyone who watches hears of it.
func (w *world) write(p *process, e Write) {
	if e.Revision != w.revision {
		w.send(func() { p.step(Failed{Beat: e.Record.Beat, Conflict: true}) })
		return
	}
	w.revision++
	changed := w.record.Holder != e.Record.Holder && e.Record.Holder != ""
	if e.Record.Epoch < w.top || changed && e.Record.Epoch <= w.top {
		w.t.Errorf("at %v: %s stores epoch %d after %d", w.now, e.Record.Holder, e.Record.Epoch, w.top)
	}
	w.record, w.top = e.Record, max(w.top, e.Record.Epoch)
	wrote := Wrote{e.Record.Beat, w.revision}
	w.send(func() { p.step(wrote) })
	for _, other := range w.procs {
		seen := Seen{w.record, w.revision}
		w.send(func() { other.step(seen) })
	}
}

// check reports two holdings at one time, epochs that do not rise, and holdings that claim to
// follow an earlier one of the same process although another process has held the lease in between.
func (w *world) check() {
	for i, a := range w.spans {
		for _, b := range w.spans[i+1:] {
			if a.name != b.name && a.from < b.until && b.from < a.until {
				w.t.Errorf("%s holds epoch %d from %v to %v, and %s epoch %d from %v to %v", a.name, a.epoch, a.from, a.until, b.name, b.epoch, b.from, b.until)
			}
		}
		for _, before := range w.spans[:i] {
			if a.since < before.epoch && before.epoch < a.epoch && before.name != a.name {
				w.t.Errorf("epoch %d of %s claims to follow epoch %d, but %s has held epoch %d", a.epoch, a.name, a.since, before.name, before.epoch)
			}
		}
		if i > 0 && a.from >= w.spans[i-1].until && a.epoch < w.spans[i-1].epoch {
			w.t.Errorf("epoch %d of %s follows %d", a.epoch, a.name, w.spans[i-1].epoch)
		}
	}
}

// newWorld returns a store with processes whose clocks run at rates that differ by at most Skew.
func newWorld(t *testing.T, seed uint64, n int) *world {
	w := &world{t: t, rand: rand.New(rand.NewPCG(seed, 1)), late: true, twice: true}
	w.loss, w.delay = w.rand.Float64()*0.4, time.Duration(w.rand.Int64N(int64(500*time.Millisecond)))
	for i := range n {
		w.add(fmt.Sprint("p", i), 1-Skew/2.2+w.rand.Float64()*Skew/1.1)
	}
	return w
}

func (w *world) add(name string, rate float64) *process {
	p := &process{w: w, name: name, begin: w.now - time.Duration(w.rand.Int64N(int64(time.Hour))), rate: rate}
	p.core = NewCore(Config{Me: name})
	w.procs = append(w.procs, p)
	p.core.asked = p.local() - readAgain
	p.core.sent = p.local() - Beat
	p.step(Tick{})
	return p
}

// TestOneHolderAtATime runs processes through losses, delays, pauses, ends and new starts.
func TestOneHolderAtATime(t *testing.T) {
	holdings, again := 0, 0
	for seed := range uint64(400) {
		w := newWorld(t, seed, 2+int(seed%4))
		for step := range 60 {
			w.run(w.now + time.Duration(w.rand.Int64N(int64(2*time.Second))))
			p := w.procs[w.rand.IntN(len(w.procs))]
			switch w.rand.IntN(6) {
			case 0:
				p.paused = w.now + time.Duration(w.rand.Int64N(int64(12*time.Second)))
			case 1:
				p.dead = true
				w.add(fmt.Sprint("q", step), p.rate)
			case 2:
				if w.rand.IntN(3) == 0 {
					p.step(Release{})
					w.add(fmt.Sprint("r", step), p.rate)
				}
			}
		}
		w.check()
		holdings += len(w.spans)
		for _, s := range w.spans {
			if s.since < s.epoch {
				again++
			}
		}
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
	if holdings < 2000 {
		t.Errorf("%d holdings in all, want at least 2000: the test shows little", holdings)
	}
	if again < 50 {
		t.Errorf("%d holdings that follow one of the same process, want at least 50", again)
	}
}

// TestForgottenWritesFollow has one process in a store that takes writes late or twice. A process
// that sees a write whose answer said that it was refused, or which it has forgotten, knows that
// nobody else has held the lease since its first holding.
func TestForgottenWritesFollow(t *testing.T) {
	again := 0
	for seed := range uint64(200) {
		w := newWorld(t, seed, 1)
		for range 60 {
			w.run(w.now + time.Duration(w.rand.Int64N(int64(2*time.Second))))
			if w.rand.IntN(6) == 0 {
				w.procs[0].paused = w.now + time.Duration(w.rand.Int64N(int64(12*time.Second)))
			}
		}
		w.check()
		for _, s := range w.spans {
			if s.since != w.spans[0].since {
				t.Fatalf("seed %d: epoch %d follows %d, want %d: no other process has held the lease", seed, s.epoch, s.since, w.spans[0].since)
			}
			if s.since < s.epoch {
				again++
			}
		}
	}
	if again < 50 {
		t.Errorf("%d holdings that follow another one, want at least 50", again)
	}
}

// TestLeaseIsTakenSoon checks how long a lease is nobody's when its holder dies, releases it, or
// cannot reach the store, with a store that works.
func TestLeaseIsTakenSoon(t *testing.T) {
	for name, tc := range map[string]struct {
		end  func(w *world, p *process)
		most time.Duration
	}{
		"dies":     {func(_ *world, p *process) { p.dead = true }, TTL + Beat/2},
		"releases": {func(_ *world, p *process) { p.step(Release{}) }, Beat},
		"pauses":   {func(w *world, p *process) { p.paused = w.now + time.Hour }, TTL + Beat/2},
	} {
		for seed := range uint64(50) {
			w := newWorld(t, seed, 3)
			w.loss, w.delay, w.late, w.twice = 0, 2*time.Millisecond, false, false
			w.run(10*time.Second + time.Duration(w.rand.Int64N(int64(time.Second))))
			var holder *process
			for _, p := range w.procs {
				if _, ok := p.core.Holds(p.local()); ok {
					holder = p
				}
			}
			if holder == nil {
				t.Fatalf("%s, seed %d: nobody holds the lease after 10 s", name, seed)
			}
			n, from := len(w.spans), w.now
			tc.end(w, holder)
			w.run(w.now + 20*time.Second)
			if len(w.spans) <= n {
				t.Fatalf("%s, seed %d: nobody has taken the lease", name, seed)
			}
			if took := w.spans[n].from - from; took > tc.most {
				t.Errorf("%s, seed %d: taken after %v, want at most %v", name, seed, took, tc.most)
			}
			w.check()
		}
	}
}

// TestReleaseDuringARenewal releases the lease while a renewal is under way. Whichever of the two
// writes is stored first, the next process takes the lease soon, and the release ends.
func TestReleaseDuringARenewal(t *testing.T) {
	conflicts := 0
	for seed := range uint64(100) {
		w := newWorld(t, seed, 3)
		w.loss, w.delay, w.late, w.twice = 0, 50*time.Millisecond, false, false
		w.run(10 * time.Second)
		var holder *process
		for holder == nil {
			for _, p := range w.procs {
				if _, ok := p.core.Holds(p.local()); ok && p.core.sending {
					holder = p
				}
			}
			w.run(w.now + time.Millisecond)
		}
		n, from, revision := len(w.spans), w.now, w.revision
		holder.step(Release{})
		for holder.freed == 0 && w.now < from+20*time.Second {
			w.run(w.now + time.Millisecond)
			if w.record.Holder == holder.name && w.revision > revision {
				conflicts++ // the renewal was stored first
				revision = w.revision
			}
		}
		if took := w.now - from; took > TTL/2 {
			t.Errorf("seed %d: the release took %v", seed, took)
		}
		w.run(from + TTL/2)
		if len(w.spans) <= n {
			t.Errorf("seed %d: nobody has taken the lease %v after its release", seed, TTL/2)
		}
		w.run(w.now + 10*time.Second)
		w.check()
		if holder.freed != 1 {
			t.Errorf("seed %d: the release ended %d times, want once", seed, holder.freed)
		}
	}
	if conflicts < 10 {
		t.Errorf("%d renewals were stored before the release, want at least 10: the test shows little", conflicts)
	}
}

// TestPassiveProcess has a process that may not take the lease, until it may. A holder that may not
// take it any more renews it, and does not take it again after it has lapsed.
func TestPassiveProcess(t *testing.T) {
	w := newWorld(t, 1, 1)
	w.loss, w.delay, w.late, w.twice = 0, 2*time.Millisecond, false, false
	only := w.procs[0]
	holds := func() bool { _, ok := only.core.Holds(only.local()); return ok }
	only.step(Stand{Passive: true})
	w.run(w.now + 20*time.Second)
	if holds() || len(w.spans) > 0 {
		t.Error("a passive process has taken the lease")
	}
	only.step(Stand{})
	w.run(w.now + time.Second)
	if !holds() {
		t.Error("a process that may take the lease does not hold it")
	}
	only.step(Stand{Passive: true})
	w.run(w.now + 20*time.Second)
	if !holds() || len(w.spans) != 1 {
		t.Errorf("%d holdings, want one that goes on", len(w.spans))
	}
	only.paused = w.now + 10*time.Second
	w.run(w.now + 30*time.Second)
	if holds() {
		t.Error("a passive process has taken the lease again")
	}
}
