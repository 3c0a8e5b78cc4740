package dispatch

import (
	"time"

	"github.com/stagecoach-serving/stagecoach/plan"
)

// Waiting returns the number of tasks in the line.
func (c *Core) Waiting() int { return c.line.len() }

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

// Signals returns all that is measured, as of now.
func (c *Core) Signals(now time.Time) plan.Signals {
	is := plan.Signals{Service: c.service.read(), Waiting: c.Waiting(), Running: c.Running()}
	is.Demand, is.Wait, is.Busy = c.signals.read(now, c.busy, c.slots)
	if since := c.oldest(); !since.IsZero() {
		is.Wait.Oldest = max(now.Sub(since), 0)
	}
	return is
}

// oldest returns when the first of those that wait came; zero: none waits.
func (c *Core) oldest() (since time.Time) {
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
