package dispatch

import (
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// measure is what is measured of a lane.
type measure struct {
	signals     signals
	service     services
	ignoreUntil time.Time // measurements before this time are ignored; zero: none are
	ignoring    bool      // measurements are ignored as of the latest step
}

// Mean returns the mean time that a slot is busy per task; 0: unknown.
func (m *measure) Mean() time.Duration { return m.service.mean() }

// PauseMeasuring makes the lane ignore all measurements until the given time. Callers use it while
// they pin a replica in order to measure it, because the load and CPU quota of a pinned replica are
// not those of normal operation.
func (m *measure) PauseMeasuring(until time.Time) { m.ignoreUntil = until }

// tick tells the signals that time has passed. busy and slots are how many slots have been taken,
// and how many there have been, since the latest step.
func (m *measure) tick(now time.Time, busy, slots int) {
	if m.ignoring {
		busy, slots = 0, 0
	}
	m.signals.tick(now, busy, slots)
	m.ignoring = !m.ignoreUntil.IsZero() && now.Before(m.ignoreUntil)
}

// left records that a task has left the line after a wait.
func (m *measure) left(wait time.Duration) {
	if !m.ignoring {
		m.signals.leave(wait)
	}
}

// read returns the measurements as of now. busy and slots are as for tick.
func (m *measure) read(now time.Time, busy, slots int) plan.Signals {
	if m.ignoring {
		busy, slots = 0, 0
	}
	is := plan.Signals{Service: m.service.read(), Items: m.service.factor()}
	is.Demand, is.Wait, is.Busy = m.signals.read(now, busy, slots)
	return is
}

// Signals returns the measurements of the lane of the stage's own function, or of the first lane if
// there is none.
func (c *Core) Signals(now time.Time) plan.Signals {
	l := c.Lane("")
	if l == nil && len(c.lanes) > 0 {
		l = c.lanes[0]
	}
	if l == nil {
		return plan.Signals{}
	}
	return l.Signals(now)
}
