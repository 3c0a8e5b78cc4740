package dispatch

import (
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// Waiting returns the number of tasks that wait, suspects included.
func (c *Core) Waiting() int { return c.line.len() + len(c.suspects) }

// Running returns the number of calls that replicas have not answered.
func (c *Core) Running() int { return c.unanswered }

// Servers returns how many tasks the replicas that get new tasks can run at a time.
func (c *Core) Servers() int {
	n := 0
	for i := range c.view.Replicas {
		if r := &c.view.Replicas[i]; !r.Draining {
			n += r.Slots * r.MaxBatch
		}
	}
	return n
}

// Replicas returns how many replicas get new tasks.
func (c *Core) Replicas() int {
	n := 0
	for i := range c.view.Replicas {
		if !c.view.Replicas[i].Draining {
			n++
		}
	}
	return n
}

// Mean returns the mean time that a slot is busy per task; 0: unknown.
func (c *Core) Mean() time.Duration { return c.service.mean() }

// PauseMeasuring makes the core ignore all measurements until the given time. Callers use it while
// they pin a replica in order to measure it, because the load and CPU quota of a pinned replica are
// not those of normal operation.
func (c *Core) PauseMeasuring(until time.Time) { c.ignoreUntil = until }

// tickSignals tells the signals that time has passed.
func (c *Core) tickSignals(now time.Time) {
	busy, slots := c.occupied()
	c.signals.tick(now, busy, slots)
	c.ignoring = !c.ignoreUntil.IsZero() && now.Before(c.ignoreUntil)
}

// occupied returns how many slots have been taken, and how many there have been, since the latest
// step. Both are 0 while measurements are ignored.
func (c *Core) occupied() (busy, slots int) {
	if c.ignoring {
		return 0, 0
	}
	return c.busy, c.slots
}

// waited records that a task has left the line.
func (c *Core) waited(now time.Time, it *item) {
	if !c.ignoring {
		c.signals.leave(now.Sub(it.task.Entered))
	}
}

// Signals returns all measurements as of now.
func (c *Core) Signals(now time.Time) plan.Signals {
	is := plan.Signals{Service: c.service.read(), Waiting: c.Waiting(), Running: c.Running()}
	busy, slots := c.occupied()
	is.Demand, is.Wait, is.Busy = c.signals.read(now, busy, slots)
	if since := c.oldest(); !since.IsZero() {
		is.Wait.Oldest = max(now.Sub(since), 0)
	}
	return is
}

// oldest returns when the first of the waiting tasks came; zero: none waits.
func (c *Core) oldest() (since time.Time) {
	for _, it := range c.suspects {
		since = earlier(since, it.task.Entered)
	}
	_, fifo := c.cfg.Orderer.(FIFO)
	for _, it := range c.line.items {
		if since = earlier(since, it.task.Entered); fifo {
			break // the head of the line
		}
	}
	return since
}

// countSlots counts the slots again after replicas or their slots have changed.
func (c *Core) countSlots() {
	c.busy, c.slots = 0, 0
	for i := range c.view.Replicas {
		if r := &c.view.Replicas[i]; !r.Draining {
			c.busy += r.Busy
			c.slots += r.Slots
		}
	}
}
