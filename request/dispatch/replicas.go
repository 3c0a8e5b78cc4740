package dispatch

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

func (c *Core) up(now time.Time, ev ReplicaUp) {
	if l := c.of(ev.Name); l != nil {
		l.lose(now, ev.Name, task.ReplicaLost, task.Death{Cause: "another replica of the same name came"})
	}
	l := c.Lane(ev.Lane)
	switch {
	case c.closed != "":
		c.do(Evict{Replica: ev.Name, Cause: c.closed})
	case l == nil || l.removed:
		c.do(Evict{Replica: ev.Name, Cause: fmt.Sprintf("function %q was removed", cmp.Or(ev.Lane, c.cfg.Function))})
	default:
		l.failed = false
		l.insert(&replica{name: ev.Name, revision: ev.Revision, most: ev.MaxBatch, timeout: ev.Timeout},
			task.Replica{Name: ev.Name, Slots: max(ev.Slots, 1), MaxBatch: l.batching.limit(ev.MaxBatch)})
		l.survey()
	}
}

func (l *Lane) drain(name string) {
	if i, ok := l.find(name); ok && !l.view.Replicas[i].Draining {
		l.view.Replicas[i].Draining = true
		l.draining++
		l.countSlots()
		l.survey()
	}
}

// exhausted drains a replica whose device was out of memory.
func (l *Lane) exhausted(i int, cause string) {
	r := l.replicas[i]
	if r.full {
		return
	}
	r.full = true
	l.core.do(Exhausted{Replica: r.name, Cause: cause})
	l.drain(r.name)
	l.failed = l.failed || l.Replicas() == 0
}

// release forgets draining replicas that have no calls left and that no request needs.
func (l *Lane) release() {
	before := len(l.replicas)
	for i := 0; i < len(l.replicas); {
		r := &l.view.Replicas[i]
		if !r.Draining || l.works(i) || l.needed(i) {
			i++
			continue
		}
		l.core.do(Idle{Replica: r.Name})
		l.forgetCalls(i, &l.core.timers)
		l.forget(i)
	}
	if len(l.replicas) < before {
		l.survey()
	}
}

// lose forgets a replica and answers its tasks with code.
func (l *Lane) lose(now time.Time, name string, code task.Code, death task.Death) {
	i, ok := l.find(name)
	if !ok {
		return
	}
	r := l.replicas[i]
	blame := r.blame(code, death.End)
	if r.stuck != "" && code == task.ReplicaLost {
		death.Cause = r.stuck + "; then " + death.Cause
	}
	if code == task.ReplicaLost {
		l.batching.lost(now, &l.fleet, i, l.revision, blame, death.End)
	}
	drained := l.view.Replicas[i].Draining
	l.forget(i)
	l.fewer = true
	l.failed = l.failed || code == task.ReplicaLost && l.Replicas() == 0 && !drained
	for _, b := range r.batches {
		l.unanswered -= int(b.left)
		for _, it := range b.items {
			if it == nil {
				continue
			}
			l.core.timers.drop(it)
			if it.state == running {
				l.core.reply(now, it, &task.Reply{Code: code, Message: death.Cause, Blame: blame})
			}
		}
	}
	l.survey()
}

func (l *Lane) result(now time.Time, ev Result) {
	i, ok := l.find(ev.Replica)
	if !ok {
		return // it was lost, and its tasks answered, while this answer was on its way
	}
	r := l.replicas[i]
	at := r.batchIndex(ev.Batch, ev.Call)
	if at < 0 {
		cause := fmt.Sprintf("answer to call %d of batch %d, want a call that has no answer yet", ev.Call, ev.Batch)
		l.core.do(Evict{Replica: ev.Replica, Cause: cause})
		l.lose(now, ev.Replica, task.ReplicaLost, task.Death{Cause: cause, End: task.EndItself})
		return
	}
	b := r.batches[at]
	it := b.items[ev.Call]
	b.items[ev.Call] = nil
	b.left--
	l.unanswered--
	l.core.timers.drop(it)
	if ev.Reply.Code == task.OutOfMemory {
		l.exhausted(i, ev.Reply.Message)
	}
	if it.task.Alone && len(l.batching.doubts) > 0 {
		if size := l.batching.acquit(it); size > 0 {
			l.core.do(Halved{Lane: l.name, Size: size, Most: l.batching.survived})
		}
	}
	if ev.Reply.Code == task.OK {
		l.service.returned(len(ev.Reply.Output))
	}
	if b.charge > 0 && l.fair != nil {
		l.fair.served(it, now.Sub(b.sent).Seconds()/float64(len(b.items)), float64(b.charge))
		if l.unanswered == 0 && l.Waiting() == 0 {
			l.fair.rest()
		}
	}
	if it.state == running {
		l.core.reply(now, it, ev.Reply)
	}
	if b.left > 0 {
		return
	}
	if b.whole && r.answered {
		l.service.add(now, now.Sub(b.sent), len(b.items))
	}
	r.answered = true
	r.batches = slices.Delete(r.batches, at, at+1)
	if r.suspect != nil && r.suspect.batch == b {
		l.unreserve(i)
	}
	l.view.Replicas[i].Busy--
	if !l.view.Replicas[i].Draining {
		l.busy--
	}
}

// fail ends the tasks that wait for the deployed revision. Tasks that need another revision stay: a
// draining replica runs them, or the Core has asked for a replica with Revive.
func (l *Lane) fail(now time.Time, cause string) {
	l.failed = true
	l.core.router.follow(now)
	for _, it := range l.waitingFor(0, l.revision) {
		l.core.end(now, it, task.Unavailable, cause)
	}
}

// tasks holds the waiting and running tasks, and the keys of recently ended ones.
type tasks struct {
	byKey    map[task.Key]*item // nil: the task has ended
	ended    []task.Key         // a ring buffer once it is full
	next     int                // index in ended
	remember int                // number of ended keys to keep
}

func newTasks(remember int) tasks {
	return tasks{byKey: map[task.Key]*item{}, remember: remember}
}

func (t *tasks) known(k task.Key) bool { _, ok := t.byKey[k]; return ok }
func (t *tasks) get(k task.Key) *item  { return t.byKey[k] }
func (t *tasks) add(it *item)          { t.byKey[it.task.Key] = it }

// end remembers the key, and forgets the oldest one if there are too many.
func (t *tasks) end(k task.Key) {
	t.byKey[k] = nil
	if len(t.ended) < t.remember {
		t.ended = append(t.ended, k)
		return
	}
	delete(t.byKey, t.ended[t.next])
	t.ended[t.next] = k
	t.next = (t.next + 1) % len(t.ended)
}
