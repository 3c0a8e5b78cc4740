package cluster

import "time"

// clock is the time that plans are made by: the wall's when it was made, and since then what has passed. It does not jump when the
// wall's is set, so that nothing falls idle, or is tried again, sooner or later for that.
type clock struct {
	start time.Time // with its monotonic reading
	wall  time.Time // then
}

func newClock(now time.Time) clock { return clock{now, now.UTC().Round(0)} }

// at is t by the clock, t being of [time.Now] or near one: without its monotonic reading, which no record keeps. The zero time stays zero.
func (c clock) at(t time.Time) time.Time {
	if t.IsZero() {
		return time.Time{}
	}
	return c.wall.Add(t.Sub(c.start))
}

// now is the time of all that plans are about.
func (l *Local) now() time.Time { return l.clock.at(time.Now()) }

// told is when a time of a plan is by the wall's clock; the zero time stays zero.
func (l *Local) told(t time.Time) time.Time {
	if t.IsZero() {
		return time.Time{}
	}
	return stamp().Add(t.Sub(l.now()))
}

// stamp is the time that people are told: the wall's.
func stamp() time.Time { return time.Now().UTC().Round(0) }
