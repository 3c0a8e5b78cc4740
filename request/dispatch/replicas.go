package dispatch

import (
	"fmt"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

func (c *Core) up(now time.Time, ev ReplicaUp) {
	if c.closed != "" {
		c.do(Evict{Replica: ev.Name, Cause: c.closed})
		return
	}
	c.down(now, ev.Name, task.Death{Cause: "another replica of the same name came"})
	i, _ := c.find(ev.Name)
	c.replicas = slices.Insert(c.replicas, i, &replica{name: ev.Name, revision: ev.Revision, timeout: ev.Timeout})
	c.view.Replicas = slices.Insert(c.view.Replicas, i,
		task.Replica{Name: ev.Name, Slots: max(ev.Slots, 1), MaxBatch: max(ev.MaxBatch, 1)})
	c.countSlots()
	c.survey()
}

func (c *Core) drain(name string) {
	if i, ok := c.find(name); ok && !c.view.Replicas[i].Draining {
		c.view.Replicas[i].Draining = true
		c.draining++
		c.countSlots()
		c.survey()
	}
}

// exhausted drains a replica whose device was out of memory.
func (c *Core) exhausted(i int, cause string) {
	r := c.replicas[i]
	if r.full {
		return
	}
	r.full = true
	c.do(Exhausted{Replica: r.name, Cause: cause})
	c.drain(r.name)
}

// release forgets draining replicas that have no calls left and that no request needs.
func (c *Core) release() {
	before := len(c.replicas)
	for i := 0; i < len(c.replicas); {
		r := &c.view.Replicas[i]
		if !r.Draining || c.works(i) || c.needed(i) {
			i++
			continue
		}
		c.do(Idle{Replica: r.Name})
		c.forgetCalls(c.replicas[i])
		c.forget(i)
	}
	if len(c.replicas) < before {
		c.survey()
	}
}

func (c *Core) forget(i int) {
	if c.view.Replicas[i].Draining {
		c.draining--
	}
	c.unreserve(i)
	c.replicas = slices.Delete(c.replicas, i, i+1)
	c.view.Replicas = slices.Delete(c.view.Replicas, i, i+1)
	c.countSlots()
}

// down forgets a lost replica, and answers its tasks with ReplicaLost.
func (c *Core) down(now time.Time, name string, death task.Death) {
	c.lose(now, name, task.ReplicaLost, death)
}

// lose forgets a replica and answers its tasks with code.
func (c *Core) lose(now time.Time, name string, code task.Code, death task.Death) {
	i, ok := c.find(name)
	if !ok {
		return
	}
	r := c.replicas[i]
	blame := r.blame(code, death.End)
	if r.stuck != "" && code == task.ReplicaLost {
		death.Cause = r.stuck + "; then " + death.Cause
	}
	c.forget(i)
	c.fewer = true
	for _, b := range r.batches {
		c.unanswered -= b.left
		for _, it := range b.items {
			if it == nil {
				continue
			}
			c.timers.drop(it)
			if it.state == running {
				c.reply(now, it, &task.Reply{Code: code, Message: death.Cause, Blame: blame})
			}
		}
	}
	c.survey()
}

func (c *Core) evict(now time.Time, name, cause string) {
	c.do(Evict{Replica: name, Cause: cause})
	c.down(now, name, task.Death{Cause: cause, End: task.EndItself})
}

func (c *Core) result(now time.Time, ev Result) {
	i, ok := c.find(ev.Replica)
	if !ok {
		return // it was lost, and its tasks answered, while this answer was on its way
	}
	r := c.replicas[i]
	at := r.batchIndex(ev.Batch, ev.Call)
	if at < 0 {
		c.evict(now, ev.Replica, fmt.Sprintf("answer to call %d of batch %d, want a call that has no answer yet", ev.Call, ev.Batch))
		return
	}
	b := r.batches[at]
	it := b.items[ev.Call]
	b.items[ev.Call] = nil
	b.left--
	c.unanswered--
	c.timers.drop(it)
	if ev.Reply.Code == task.OutOfMemory {
		c.exhausted(i, ev.Reply.Message)
	}
	if it.state == running {
		c.reply(now, it, ev.Reply)
	}
	if b.left > 0 {
		return
	}
	if b.whole && r.answered {
		c.service.add(now, now.Sub(b.sent), len(b.items))
	}
	r.answered = true
	r.batches = slices.Delete(r.batches, at, at+1)
	if r.suspect != nil && r.suspect.batch == b {
		c.unreserve(i)
	}
	c.view.Replicas[i].Busy--
	if !c.view.Replicas[i].Draining {
		c.busy--
	}
}

// batchIndex returns the index of the batch with this id. It returns -1 if the replica does not
// have the batch, or has already answered the given call of the batch.
func (r *replica) batchIndex(id uint64, call int) int {
	at := slices.IndexFunc(r.batches, func(b *batch) bool { return b.id == id })
	if at < 0 || call < 0 || call >= len(r.batches[at].items) || r.batches[at].items[call] == nil {
		return -1
	}
	return at
}

// hasCall reports whether a replica has not answered a call.
func (c *Core) hasCall(name string, batch uint64, call int) bool {
	i, ok := c.find(name)
	return ok && c.replicas[i].batchIndex(batch, call) >= 0
}

// Busy reports whether a replica has unanswered calls.
func (c *Core) Busy(name string) bool {
	i, ok := c.find(name)
	return ok && len(c.replicas[i].batches) > 0
}

// fail ends the tasks that wait for the deployed revision. Tasks that need another revision stay: a
// draining replica runs them, or the Core has asked for a replica with Revive.
func (c *Core) fail(now time.Time, cause string) {
	for _, it := range c.waitingFor(0, c.cfg.Revision) {
		c.end(now, it, task.Unavailable, cause)
	}
}

func (c *Core) close(now time.Time, cause string) {
	c.closed = cause
	for _, it := range c.waitingFor() {
		c.end(now, it, task.Unavailable, cause)
	}
	for len(c.replicas) > 0 {
		c.lose(now, c.replicas[0].name, task.Unavailable, task.Death{Cause: cause})
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
