package cluster

import (
	"time"

	"github.com/stagecoach-serving/stagecoach/plan"
)

// The pace of starts that fail.
const (
	firstBackoff = 500 * time.Millisecond
	lastBackoff  = 30 * time.Second
	// settle is how long a replica that was never asked must be ready before it counts as a success: one that dies sooner,
	// and before its first answer, has failed.
	settle = 10 * time.Second
	// hopeless is how many failures in a row end the patience of what waits.
	hopeless = 3
)

// Backoff returns how long to wait after the count-th failure in a row: half a second, then twice as long each time, up to
// half a minute.
func Backoff(count int) time.Duration {
	if count < 1 {
		return 0
	}
	return min(firstBackoff<<min(count-1, 16), lastBackoff)
}

// failure counts the failed starts of one revision of a function.
type failure struct {
	revision uint64
	at       time.Time // the latest
	plan.Failure
}

// add counts a failure, at now, of a replica that was ordered at begun. Replicas that failed side by side are one failure;
// those of older revisions do not matter any more.
func (f *failure) add(revision uint64, begun, now time.Time, cause string) {
	if revision < f.revision {
		return
	}
	f.follow(revision)
	f.Cause = cause
	if f.Count > 0 && !begun.After(f.at) {
		return
	}
	f.Count++
	f.at = now
	f.Until = now.Add(Backoff(f.Count))
}

// follow forgets the failures when the function has a newer revision.
func (f *failure) follow(revision uint64) {
	if revision > f.revision {
		*f = failure{revision: revision}
	}
}

// worked forgets the failures when a replica that became ready after the latest one works.
func (f *failure) worked(readySince time.Time) {
	if f.Count > 0 && readySince.After(f.at) {
		*f = failure{revision: f.revision}
	}
}

// settled does so when the replica has held for a while.
func (f *failure) settled(readySince, now time.Time) {
	if now.Sub(readySince) >= settle {
		f.worked(readySince)
	}
}
