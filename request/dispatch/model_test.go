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

// model is the simplest model of a function, with checks of the Core's effects.
type model struct {
	t        *testing.T
	rnd      *rand.Rand
	core     *Core
	now      time.Time
	wake     time.Time
	limit    int
	line     []*task.Task // in order of arrival
	suspects []*task.Task // waiting suspects
	ended    map[task.Key]bool
	all      []*task.Task
	replicas map[string]*modelReplica
	names    []string
	log      strings.Builder
}

type modelReplica struct {
	slots, maxBatch int
	draining, stuck bool
	batches         map[uint64][]*task.Task // a nil task was answered
	order           []uint64
}

// TestRandomHistoriesMatchModel runs random histories against the model.
func TestRandomHistoriesMatchModel(t *testing.T) {
	stuck := 0
	for seed := range uint64(200) {
		first, second := history(t, seed), history(t, seed)
		if first != second {
			t.Fatalf("seed %d: two runs differ:\n%s\n---\n%s", seed, first, second)
		}
		stuck += strings.Count(first, "stuck")
	}
	if stuck == 0 {
		t.Error("no replica was stuck, so the histories prove nothing about that")
	}
}

func history(t *testing.T, seed uint64) string {
	limit := 1 + int(seed%7)
	m := &model{
		t: t, rnd: rand.New(rand.NewPCG(seed, 1)), now: epoch, limit: limit,
		core:  NewCore(CoreConfig{Function: "f.ns", QueueLimit: limit, CancelGrace: 40 * ms}),
		ended: map[task.Key]bool{}, replicas: map[string]*modelReplica{},
	}
	for range 400 {
		m.pass(time.Duration(m.rnd.IntN(4)) * ms)
		m.step(m.event())
	}
	m.step(Close{"the end"})
	for _, task := range m.all {
		if !m.ended[task.Key] {
			t.Fatalf("seed %d: %v has no reply", seed, task.Key)
		}
	}
	return m.log.String()
}

// pass lets time pass, with the Ticks that the Core requested.
func (m *model) pass(d time.Duration) {
	end := m.now.Add(d)
	for !m.wake.IsZero() && !m.wake.After(end) {
		m.now, m.wake = m.wake, time.Time{}
		m.step(Tick{})
		for _, t := range m.line {
			if !t.Deadline.IsZero() && !t.Deadline.After(m.now) {
				m.t.Fatalf("%v waits although its deadline has passed", t.Key)
			}
		}
	}
	m.now = end
}

func (m *model) event() Event {
	switch n := m.rnd.IntN(100); {
	case n < 40 || len(m.all) == 0:
		return m.submit()
	case n < 50:
		return Cancel{m.all[m.rnd.IntN(len(m.all))].Key}
	case n == 50:
		return Fail{Cause: "chance"}
	case n < 54 && len(m.names) < 5:
		return ReplicaUp{"", fmt.Sprintf("r%d", m.rnd.IntN(8)), m.rnd.IntN(4), m.rnd.IntN(4), 0, time.Duration(m.rnd.IntN(2)*20) * ms}
	case n < 57 && len(m.names) > 0:
		return ReplicaDrain{m.any()}
	case n < 60 && len(m.names) > 0:
		return ReplicaDown{Name: m.any(), Cause: "chance"}
	case n < 63 && len(m.names) > 0:
		return Credit{m.any(), m.rnd.IntN(4)}
	}
	for range 3 {
		if len(m.names) == 0 {
			break
		}
		name := m.any()
		r := m.replicas[name]
		if len(r.order) == 0 {
			continue
		}
		id := r.order[m.rnd.IntN(len(r.order))]
		for i, t := range r.batches[id] {
			if t != nil {
				return Result{name, id, i, &task.Reply{Code: []task.Code{task.OK, task.OK, task.BadInput, task.Failed, task.OutOfMemory}[m.rnd.IntN(5)]}}
			}
		}
	}
	return Tick{}
}

func (m *model) any() string { return m.names[m.rnd.IntN(len(m.names))] }

func (m *model) submit() Event {
	if len(m.all) > 0 && m.rnd.IntN(10) == 0 {
		again := *m.all[m.rnd.IntN(len(m.all))]
		return Submit{&again}
	}
	t := newTask(fmt.Sprint(len(m.all)), 0)
	if m.rnd.IntN(6) == 0 {
		t.Attempt, t.Alone = 2, true
	}
	if m.rnd.IntN(3) > 0 {
		t.Deadline = m.now.Add(time.Duration(m.rnd.IntN(60)) * ms)
	}
	return Submit{t}
}

// step applies the event to the model, then to the Core, and checks the effects.
func (m *model) step(ev Event) {
	fmt.Fprintf(&m.log, "%v %T\n", m.now.Sub(epoch), ev)
	switch ev := ev.(type) {
	case Submit:
		if !slices.ContainsFunc(m.all, func(t *task.Task) bool { return t.Key == ev.Task.Key }) {
			m.all = append(m.all, ev.Task)
			if ev.Task.Alone {
				m.suspects = append(m.suspects, ev.Task)
			} else {
				m.line = append(m.line, ev.Task)
			}
		}
	case ReplicaUp:
		m.forget(ev.Name)
		m.replicas[ev.Name] = &modelReplica{slots: max(ev.Slots, 1), maxBatch: max(ev.MaxBatch, 1), batches: map[uint64][]*task.Task{}}
		m.names = append(m.names, ev.Name)
	case ReplicaDrain:
		m.replicas[ev.Name].draining = true
	case ReplicaDown:
		m.forget(ev.Name)
	case Credit:
		m.replicas[ev.Replica].slots = ev.Slots
	case Result:
		r := m.replicas[ev.Replica]
		r.batches[ev.Batch][ev.Call] = nil
		r.draining = r.draining || ev.Reply.Code == task.OutOfMemory
		if !slices.ContainsFunc(r.batches[ev.Batch], func(t *task.Task) bool { return t != nil }) {
			delete(r.batches, ev.Batch)
			r.order = slices.DeleteFunc(r.order, func(id uint64) bool { return id == ev.Batch })
		}
	}
	for _, e := range m.core.Step(m.now, ev) {
		fmt.Fprintf(&m.log, "  %s\n", show(e))
		m.effect(e)
	}
	running := 0
	for _, r := range m.replicas {
		for _, b := range r.batches {
			for _, t := range b {
				if t != nil {
					running++
				}
			}
		}
	}
	wait := len(m.line) + len(m.suspects)
	if _, closed := ev.(Close); !closed && (m.core.Waiting() != wait || m.core.Running() != running || len(m.line) > m.limit) {
		m.t.Fatalf("%d wait and %d run, want %d, at most %d, and %d\n%s", m.core.Waiting(), m.core.Running(), wait, m.limit, running, m.log.String())
	}
	m.fair()
}

// fair checks that no task waits without need. A task may wait while all replicas are full or
// reserved for suspects. A suspect may also wait for the calls of its reserved replica, and while
// no further replica may be reserved.
func (m *model) fair() {
	c, reserved := m.core.lanes[0], 0
	share := max(c.Replicas()/2, 1) // number of replicas that may still be reserved
	for i, r := range c.replicas {
		if r.suspect != nil && !c.view.Replicas[i].Draining {
			share--
		}
	}
	for i, r := range c.replicas {
		v := &c.view.Replicas[i]
		if r.suspect != nil {
			reserved++
			if own := r.suspect.state == waiting; !r.suspect.reserved || own && v.Busy == 0 || !own && (v.Busy != 1 || len(r.batches[0].items) != 1) {
				m.t.Fatalf("%s is reserved for %v, which is in state %d, and has %d batches\n%s", r.name, r.suspect.task.Key, r.suspect.state, v.Busy, m.log.String())
			}
			continue
		}
		if v.Draining || r.full || v.Slots <= v.Busy {
			continue
		}
		if c.sorted.len() > 0 {
			m.t.Fatalf("%d tasks wait, and %s has %d of %d batches\n%s", c.sorted.len(), r.name, v.Busy, v.Slots, m.log.String())
		}
		for _, it := range c.suspects {
			if !it.reserved && share > 0 {
				m.t.Fatalf("%v waits, and %s has %d of %d batches\n%s", it.task.Key, r.name, v.Busy, v.Slots, m.log.String())
			}
		}
	}
	if reserved != c.reserved {
		m.t.Fatalf("%d replicas are reserved, and the core counts %d", reserved, c.reserved)
	}
}

func (m *model) effect(e Effect) {
	switch e := e.(type) {
	case Send:
		r := m.replicas[e.Replica]
		if r == nil || r.draining || len(r.order) >= r.slots || len(e.Tasks) > r.maxBatch {
			m.t.Fatalf("batch of %d to %s, which is %+v\n%s", len(e.Tasks), e.Replica, r, m.log.String())
		}
		for _, id := range r.order {
			if slices.ContainsFunc(r.batches[id], func(t *task.Task) bool { return t != nil && t.Alone }) {
				m.t.Fatalf("batch %d goes to %s, which has a suspect\n%s", e.Batch, e.Replica, m.log.String())
			}
		}
		if s := slices.Index(m.suspects, e.Tasks[0]); s >= 0 {
			if len(e.Tasks) > 1 || len(r.order) > 0 || m.ended[e.Tasks[0].Key] {
				m.t.Fatalf("a suspect in a batch of %d goes to %s, which is %+v\n%s", len(e.Tasks), e.Replica, r, m.log.String())
			}
			m.suspects = slices.Delete(m.suspects, s, s+1)
			r.batches[e.Batch] = slices.Clone(e.Tasks)
			r.order = append(r.order, e.Batch)
			return
		}
		for i, t := range e.Tasks {
			if m.line[0] != t || m.ended[t.Key] || !t.Deadline.IsZero() && !t.Deadline.After(m.now) {
				m.t.Fatalf("task %d of batch %d is %v, the head is %v\n%s", i, e.Batch, t.Key, m.line[0].Key, m.log.String())
			}
			m.line = m.line[1:]
		}
		r.batches[e.Batch] = slices.Clone(e.Tasks)
		r.order = append(r.order, e.Batch)
	case CancelCall:
		if r := m.replicas[e.Replica]; r == nil || r.batches[e.Batch][e.Call] == nil {
			m.t.Fatalf("%s, which has %+v\n%s", show(e), r, m.log.String())
		}
	case Reply:
		if m.ended[e.Reply.Key] {
			m.t.Fatalf("second reply to %v\n%s", e.Reply.Key, m.log.String())
		}
		m.ended[e.Reply.Key] = true
		m.line = slices.DeleteFunc(m.line, func(t *task.Task) bool { return t.Key == e.Reply.Key })
		m.suspects = slices.DeleteFunc(m.suspects, func(t *task.Task) bool { return t.Key == e.Reply.Key })
	case Idle:
		if r := m.replicas[e.Replica]; r == nil || !r.draining || m.waitedFor(r) {
			m.t.Fatalf("%s is idle, but is %+v\n%s", e.Replica, r, m.log.String())
		}
		m.forget(e.Replica)
	case Stuck:
		m.replicas[e.Replica].draining, m.replicas[e.Replica].stuck = true, true
	case Evict:
		m.forget(e.Replica)
	case Wake:
		m.wake = e.At
	}
}

// waitedFor reports whether a replica has calls that its end must wait for. The answered calls of a
// stuck replica do not count.
func (m *model) waitedFor(r *modelReplica) bool {
	for _, b := range r.batches {
		if slices.ContainsFunc(b, func(t *task.Task) bool { return t != nil && !(r.stuck && m.ended[t.Key]) }) {
			return true
		}
	}
	return false
}

func (m *model) forget(name string) {
	delete(m.replicas, name)
	m.names = slices.DeleteFunc(m.names, func(n string) bool { return n == name })
}
