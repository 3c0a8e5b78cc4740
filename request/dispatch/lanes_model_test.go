package dispatch

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

// lanesWorld drives a Core with several lanes at random, and checks after each step that every task
// is in one place.
type lanesWorld struct {
	t       *testing.T
	rnd     *rand.Rand
	core    *Core
	now     time.Time
	wake    time.Time
	version uint64
	number  int
	names   []string // of all possible lanes
	// by replica: its lane, and its unanswered batches
	lane    map[string]string
	batches map[string]map[uint64][]*task.Task
	most    map[string]int // the largest batch that the replica takes
	order   []string       // replicas
	// by lane: the largest batch as declared and as planned; 0: there is no limit
	declared, planned map[string]int

	state map[task.Key]string
	all   []*task.Task
	pins  map[string]map[string]uint64 // by request and lane: the revision that answered
	log   strings.Builder
	seen  map[string]int // how often something happened
}

func newLanesWorld(t *testing.T, seed uint64) *lanesWorld {
	return &lanesWorld{
		t: t, rnd: rand.New(rand.NewPCG(seed, 21)), now: epoch,
		core:  NewCore(CoreConfig{Function: "f.ns", Revision: 1, QueueLimit: 30, CancelGrace: 20 * ms}),
		names: []string{"a.ns", "f.ns", "g.ns", "z.ns"}, lane: map[string]string{}, batches: map[string]map[uint64][]*task.Task{},
		most: map[string]int{}, declared: map[string]int{}, planned: map[string]int{},
		state: map[task.Key]string{}, pins: map[string]map[string]uint64{}, seen: map[string]int{},
	}
}

// TestRandomLanes runs random histories of lanes, tables, redeploys and crashes.
func TestRandomLanes(t *testing.T) {
	seen := map[string]int{}
	for seed := range uint64(150) {
		w := newLanesWorld(t, seed)
		first := w.history()
		if second := newLanesWorld(t, seed).history(); first != second {
			t.Fatalf("seed %d: two runs differ:\n%s\n---\n%s", seed, first, second)
		}
		for k, n := range w.seen {
			seen[k] += n
		}
	}
	for _, k := range []string{"moved", "gone", "unknown", "dropped", "pinned", "overflowed", "backed", "direct", "detached", "together", "held"} {
		if seen[k] == 0 {
			t.Errorf("nothing was %s, so the histories prove nothing about that: %v", k, seen)
		}
	}
}

func (w *lanesWorld) history() string {
	for range 500 {
		w.pass(time.Duration(w.rnd.IntN(3)) * ms)
		if w.rnd.IntN(60) == 0 {
			w.detach()
			continue
		}
		if ev := w.event(); ev != nil {
			w.step(ev)
		}
	}
	w.step(Close{"the end"})
	for _, t := range w.all {
		if w.state[t.Key] != "ended" {
			w.fatalf("%v is %q at the end", t.Key, w.state[t.Key])
		}
	}
	return w.log.String()
}

func (w *lanesWorld) fatalf(format string, args ...any) {
	w.t.Helper()
	text := w.log.String()
	w.t.Fatalf(format+"\n%s", append(args, text[max(len(text)-4000, 0):])...)
}

func (w *lanesWorld) pass(d time.Duration) {
	end := w.now.Add(d)
	for !w.wake.IsZero() && !w.wake.After(end) {
		w.now, w.wake = w.wake, time.Time{}
		w.step(Tick{})
	}
	w.now = end
}

// detach moves a lane to a new Core and back.
func (w *lanesWorld) detach() {
	if len(w.core.lanes) < 2 {
		return
	}
	l := pick(w.rnd, w.core.lanes)
	if l.removed {
		return
	}
	other := NewCore(CoreConfig{Function: l.name, Bare: true, CancelGrace: 20 * ms})
	fmt.Fprintf(&w.log, "%v detach %s\n", w.now.Sub(epoch), l.name)
	d, effects := w.core.Detach(w.now, l.name)
	w.effects(effects)
	w.effects(other.Attach(w.now, d))
	d, effects = other.Detach(w.now, l.name)
	w.effects(effects)
	if n := other.Waiting() + other.Running() + other.timers.len(); n > 0 {
		w.fatalf("the lane has left %d tasks", n)
	}
	w.effects(w.core.Attach(w.now, d))
	w.check()
	w.seen["detached"]++
}

func (w *lanesWorld) step(ev Event) {
	fmt.Fprintf(&w.log, "%v %T %+v\n", w.now.Sub(epoch), ev, show2(ev))
	where := map[task.Key]*Lane{}
	for _, l := range w.core.lanes {
		for it := range l.all {
			where[it.task.Key] = l
		}
	}
	switch ev := ev.(type) {
	case Submit:
		if w.state[ev.Task.Key] == "" {
			w.all = append(w.all, ev.Task)
			w.state[ev.Task.Key] = "waiting"
		}
	case Deployed:
		w.declared[ev.Lane] = ev.Batch
	case Batched:
		if w.core.Lane(ev.Lane) != nil {
			w.planned[ev.Lane] = ev.Most
		}
	case ReplicaUp:
		w.most[ev.Name] = ev.MaxBatch
		w.lane[ev.Name], w.batches[ev.Name] = ev.Lane, map[uint64][]*task.Task{}
		w.order = append(w.order, ev.Name)
	case ReplicaDown:
		w.forget(ev.Name)
	case Result:
		b := w.batches[ev.Replica][ev.Batch]
		t := b[ev.Call]
		b[ev.Call] = nil
		if ev.Reply.Code == task.OK && t.Together && w.state[t.Key] != "ended" {
			if w.pins[t.Request] == nil {
				w.pins[t.Request] = map[string]uint64{}
			}
			l := w.core.Lane(w.lane[ev.Replica])
			i, _ := l.find(ev.Replica)
			w.pins[t.Request][w.lane[ev.Replica]] = l.replicas[i].revision
		}
		if !slices.ContainsFunc(b, func(t *task.Task) bool { return t != nil }) {
			delete(w.batches[ev.Replica], ev.Batch)
		}
	}
	w.effects(w.core.Step(w.now, ev))
	for _, l := range w.core.lanes {
		for it := range l.all {
			if was := where[it.task.Key]; was != nil && was != l {
				w.seen["moved"]++
			}
			if it.lane != it.home {
				w.seen[map[bool]string{true: "backed", false: "overflowed"}[it.home.fate == down]]++
			}
			if w.core.router.direct(it) {
				w.seen["direct"]++
			}
		}
	}
	w.check()
}

func show2(ev Event) string {
	switch ev := ev.(type) {
	case Submit:
		return fmt.Sprintf("%v %s alone=%v length=%d pins=%v", ev.Task.Key, ev.Task.Function, ev.Task.Alone, ev.Task.Length, ev.Task.Pins)
	case Routed:
		return fmt.Sprintf("%+v %s", ev.Table, ev.Rank)
	case Result:
		return fmt.Sprint(ev.Replica, ev.Batch, ev.Call, ev.Reply.Code)
	}
	return fmt.Sprintf("%+v", ev)
}

func (w *lanesWorld) forget(replica string) {
	delete(w.batches, replica)
	w.order = slices.DeleteFunc(w.order, func(n string) bool { return n == replica })
}

func (w *lanesWorld) effects(effects []Effect) {
	for _, e := range effects {
		fmt.Fprintf(&w.log, "  %s\n", show(e))
		switch e := e.(type) {
		case Send:
			w.send(e)
		case Reply:
			if w.state[e.Reply.Key] == "ended" {
				w.fatalf("second reply to %v", e.Reply.Key)
			}
			w.state[e.Reply.Key] = "ended"
			if e.Reply.Code == task.Dropped {
				w.seen["dropped"]++
				if e.Reply.Reason != task.DropLength {
					w.fatalf("%v was dropped for %q", e.Reply.Key, e.Reply.Reason)
				}
			}
			if e.Reply.Replica != "" && e.Reply.Variant != w.lane[e.Reply.Replica] {
				w.fatalf("%v says variant %q, and %s is of %q", e.Reply.Key, e.Reply.Variant, e.Reply.Replica, w.lane[e.Reply.Replica])
			}
		case Idle:
			w.forget(e.Replica)
		case Evict:
			w.forget(e.Replica)
		case Gone:
			w.seen["gone"]++
			delete(w.declared, e.Lane)
			delete(w.planned, e.Lane)
		case Unknown:
			w.seen["unknown"]++
		case Wake:
			w.wake = e.At
		}
	}
}

// send checks a batch: its tasks wait, fit the lane, and need the replica's revision or any.
func (w *lanesWorld) send(e Send) {
	if w.batches[e.Replica] == nil {
		w.fatalf("a batch to %s, which is gone", e.Replica)
	}
	w.batches[e.Replica][e.Batch] = slices.Clone(e.Tasks)
	lane := w.lane[e.Replica]
	l := w.core.Lane(lane)
	for _, most := range []int{w.most[e.Replica], w.declared[lane], w.planned[lane]} {
		if most > 0 && len(e.Tasks) > most {
			w.fatalf("a batch of %d to %s, want at most %d", len(e.Tasks), e.Replica, most)
		}
	}
	if len(e.Tasks) > 1 {
		w.seen["together"]++
	}
	for _, t := range e.Tasks {
		if w.state[t.Key] != "waiting" {
			w.fatalf("%v runs on %s and is %q", t.Key, e.Replica, w.state[t.Key])
		}
		w.state[t.Key] = e.Replica
		if t.Alone && len(e.Tasks) > 1 {
			w.fatalf("%v is not alone", t.Key)
		}
		if l == nil { // it is being moved
			continue
		}
		if !takes(l, t) {
			w.fatalf("%v has length %d and runs in %s, which takes %d", t.Key, t.Length, lane, l.maxLength)
		}
		if l.removed {
			w.fatalf("%v runs in %s, which was removed", t.Key, lane)
		}
		i, _ := l.find(e.Replica)
		if pin := t.Pinned(lane); pin != 0 {
			w.seen["pinned"]++
			if got := l.replicas[i].revision; got != pin && w.core.Lane(lane).has(pin) {
				w.fatalf("%v needs revision %d of %s and runs on %d", t.Key, pin, lane, got)
			}
		}
	}
}

// check compares the Core's lanes with what the tasks' effects say.
func (w *lanesWorld) check() {
	c := w.core
	waits := map[task.Key]string{}
	for _, l := range c.lanes {
		n := 0
		for it := range l.all {
			n++
			if other := waits[it.task.Key]; other != "" {
				w.fatalf("%v waits in %s and in %s", it.task.Key, other, l.name)
			}
			waits[it.task.Key] = l.name
			if it.lane != l || it.state != waiting || w.state[it.task.Key] != "waiting" {
				w.fatalf("%v waits in %s, its lane is %s, and it is %q", it.task.Key, l.name, it.lane.name, w.state[it.task.Key])
			}
		}
		if n != l.Waiting() {
			w.fatalf("%d tasks wait in %s, and it says %d", n, l.name, l.Waiting())
		}
		w.idle(l)
	}
	for _, t := range w.all {
		if w.state[t.Key] == "waiting" && waits[t.Key] == "" {
			w.fatalf("%v waits in no lane", t.Key)
		}
	}
}

// idle checks that no task waits without need: a lane with a free slot for any revision has no task
// that may take it.
func (w *lanesWorld) idle(l *Lane) {
	if l.fate == ready && l.Waiting() > 0 && l.removed {
		w.fatalf("%d tasks wait in %s, which was removed", l.Waiting(), l.name)
	}
	for i, r := range l.replicas {
		v := &l.view.Replicas[i]
		if v.Draining || r.full || r.suspect != nil || v.Busy >= v.Slots {
			continue
		}
		for it := range l.all {
			if it.task.Alone || it.revision() != 0 {
				continue
			}
			if w.now.Sub(it.task.Entered) < l.view.BatchWait && l.held.After(w.now) {
				w.seen["held"]++
			} else {
				w.fatalf("%v waits in %s, and %s has %d of %d batches", it.task.Key, l.name, r.name, v.Busy, v.Slots)
			}
		}
	}
}
