package cache

import "time"

// The back-off after failures.
const (
	firstBackoff = 500 * time.Millisecond
	lastBackoff  = 30 * time.Second
	// lastBackoffOfEnds is the longest back-off after parameters have loaded and soon ended. It is
	// short because requests wait for them.
	lastBackoffOfEnds = 4 * time.Second
	// longLife is how long parameters must stay in memory to reset the count of early ends.
	longLife = 10 * time.Second
)

// Backoff returns how long to wait after a number of failures in a row: 0.5 s after the first,
// doubled with each further failure, and 30 s at most.
func Backoff(failures int) time.Duration {
	if failures < 1 {
		return 0
	}
	return min(firstBackoff<<min(failures-1, 10), lastBackoff)
}
