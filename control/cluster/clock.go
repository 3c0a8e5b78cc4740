package cluster

import "time"

// clock gives plans their time: the wall clock time at the clock's creation plus the monotonic time
// since then. Setting the machine's wall clock does not change it, so idle times and back-offs keep
// their lengths.
type clock struct {
	start time.Time // with its monotonic reading
	wall  time.Time // then
}

func newClock(now time.Time) clock { return clock{now, now.UTC().Round(0)} }

// at returns t by the clock. t must come from [time.Now]. The result has no monotonic reading,
// which records cannot store. The zero time stays zero.
func (c clock) at(t time.Time) time.Time {
	if t.IsZero() {
		return time.Time{}
	}
	return c.wall.Add(t.Sub(c.start))
}

// now returns the present time for plans.
func (l *Local) now() time.Time { return l.clock.at(time.Now()) }

// told converts a time of a plan to wall clock time. The zero time stays zero.
func (l *Local) told(t time.Time) time.Time {
	if t.IsZero() {
		return time.Time{}
	}
	return stamp().Add(t.Sub(l.now()))
}

// stamp returns the wall clock time to show to people.
func stamp() time.Time { return time.Now().UTC().Round(0) }
