package sandbox

import "time"

// Bounds of what a process may print. What comes above the first is dropped and counted; above the second its writes wait.
const (
	LinesPerSecond = 2_000
	BytesPerSecond = 1 << 20
	burst          = 5        // seconds' worth that may come at once
	readPerSecond  = 32 << 20 // bytes that are looked at, each line as lineCost more
	lineCost       = 512
	longestRead    = 20 * time.Millisecond // for which reading goes on, or pauses, at a time
)

// throttle decides which lines are passed on. Once it drops, it does until half a burst would be passed, so that what is passed
// hangs together.
type throttle struct {
	at           time.Time
	lines, bytes float64 // that may come now
	dropped      int     // since it began to; 0: it does not
}

// pass says whether a line of n bytes is passed on, whether it is the first that is not, and how many were not before one that
// is again.
func (t *throttle) pass(now time.Time, n int) (ok, first bool, dropped int) {
	if t.at.IsZero() {
		t.lines, t.bytes = burst*LinesPerSecond, burst*BytesPerSecond
	} else if d := now.Sub(t.at).Seconds(); d > 0 {
		t.lines, t.bytes = min(t.lines+d*LinesPerSecond, burst*LinesPerSecond), min(t.bytes+d*BytesPerSecond, burst*BytesPerSecond)
	}
	t.at = now
	switch {
	case t.dropped > 0 && (t.lines < burst*LinesPerSecond/2 || t.bytes < burst*BytesPerSecond/2), t.lines < 1, t.bytes < float64(n):
		t.dropped++
		return false, t.dropped == 1, 0
	}
	t.lines, t.bytes = t.lines-1, t.bytes-float64(n)
	dropped, t.dropped = t.dropped, 0
	return true, false, dropped
}

// pace holds up a reader that reads more than readPerSecond.
type pace struct {
	at   time.Time
	left float64 // bytes that may be read now; less than none: a pause is due
}

// pause returns how long to wait after a line of n bytes.
func (p *pace) pause(now time.Time, n int) time.Duration {
	most := readPerSecond * longestRead.Seconds()
	if p.at.IsZero() {
		p.left = most
	} else {
		p.left = min(p.left+now.Sub(p.at).Seconds()*readPerSecond, most)
	}
	p.at = now
	if p.left -= float64(n + lineCost); p.left >= 0 {
		return 0
	}
	return longestRead
}
