package sandbox

import "time"

// Limits of what a process may print. Lines above LinesPerSecond or BytesPerSecond are dropped and
// counted. Above readPerSecond, the process's writes wait.
const (
	LinesPerSecond = 2_000
	BytesPerSecond = 1 << 20
	burst          = 5        // seconds' worth of output that may come at once
	readPerSecond  = 32 << 20 // bytes that are read; each line counts lineCost bytes more
	lineCost       = 512
	longestRead    = 20 * time.Millisecond // length of a period of reading, and of a pause
)

// throttle decides which lines are passed on. Once it drops lines, it goes on until half a burst
// would fit, so that the lines that are passed on form long runs.
type throttle struct {
	at           time.Time
	lines, bytes float64 // lines and bytes that may come now
	dropped      int     // lines dropped since dropping began; 0: none
}

// pass decides whether a line of n bytes is passed on, and returns the decision in ok. first is
// true if the line is the first of a series of dropped lines. If the line ends such a series,
// dropped is the length of the series.
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

// pace slows down a reader that reads more than readPerSecond.
type pace struct {
	at   time.Time
	left float64 // bytes that may be read now; negative: a pause is due
}

// pause returns how long the reader waits after a line of n bytes.
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
