package dispatch

import (
	"time"

	"github.com/stagecoach-serving/stagecoach/plan"
)

// Waiting returns the number of tasks that wait, suspects included.
func (c *Core) Waiting() int { return c.line.len() + len(c.suspects) }

// Running returns the number of calls that replicas have and have not answered.
func (c *Core) Running() int { return c.onBoard }

// Servers returns how many tasks can run at a time on the replicas that get new ones.
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

// Mean returns how long a slot is busy with one task, on average; 0: not yet known.
func (c *Core) Mean() time.Duration { return c.service.mean() }

// Disregard has nothing count as measured until then: somebody tries out what replicas do, with load and with CPU that are no
// measure of what comes afterwards.
func (c *Core) Disregard(until time.Time) { c.apart = until }

// hear has the signals know that time has passed.
func (c *Core) hear(now time.Time) {
	busy, slots := c.occupied()
	c.signals.tick(now, busy, slots)
	c.unheard = !c.apart.IsZero() && now.Before(c.apart)
}

// occupied returns how many slots are taken, and there, since the latest step, as far as that counts.
func (c *Core) occupied() (busy, slots int) {
	if c.unheard {
		return 0, 0
	}
	return c.busy, c.slots
}

// waited counts that a task has left the line.
func (c *Core) waited(now time.Time, it *item) {
	if !c.unheard {
		c.signals.leave(now.Sub(it.task.Arrived))
	}
}

// Signals returns all that is measured, as of now.
func (c *Core) Signals(now time.Time) plan.Signals {
	is := plan.Signals{Service: c.service.read(), Waiting: c.Waiting(), Running: c.Running()}
	busy, slots := c.occupied()
	is.Demand, is.Wait, is.Busy = c.signals.read(now, busy, slots)
	if since := c.oldest(); !since.IsZero() {
		is.Wait.Oldest = max(now.Sub(since), 0)
	}
	return is
}

// oldest returns when the first of those that wait came; zero: none waits.
func (c *Core) oldest() (since time.Time) {
	for _, it := range c.suspects {
		since = earlier(since, it.task.Arrived)
	}
	_, fifo := c.cfg.Orderer.(FIFO)
	for _, it := range c.line.items {
		if since = earlier(since, it.task.Arrived); fifo {
			break // the head of the line
		}
	}
	return since
}

// tally counts the slots again, after replicas or their slots have changed.
func (c *Core) tally() {
	c.busy, c.slots = 0, 0
	for i := range c.view.Replicas {
		if r := &c.view.Replicas[i]; !r.Draining {
			c.busy += r.Busy
			c.slots += r.Slots
		}
	}
}
