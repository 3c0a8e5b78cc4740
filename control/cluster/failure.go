package cluster

import (
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// How failed starts are retried.
const (
	firstBackoff = 500 * time.Millisecond
	lastBackoff  = 30 * time.Second
	// settle is how long a replica must be ready to count as a success without an answer. A replica
	// that ends earlier, and without a request, has failed.
	settle = 10 * time.Second
	// maxFailures is the number of consecutive failures after which waiting tasks fail, if no replica
	// of the revision has ever been ready.
	maxFailures = 3
	// maxSameFailures is the number of consecutive failures with the same cause after which waiting
	// tasks fail in any case. If a replica has been ready, fewer failures prove nothing: something
	// else may be killing processes.
	maxSameFailures = 5
	// jitter is the largest share by which a back-off is randomly shortened, so that functions that
	// failed together do not restart together.
	jitter = 0.25
)

// Backoff returns how long to wait after the count-th consecutive failure: half a second, then
// twice as long each time, up to half a minute.
func Backoff(count int) time.Duration {
	if count < 1 {
		return 0
	}
	return min(firstBackoff<<min(count-1, 16), lastBackoff)
}

// failure counts the failures of one revision of a function: replicas that did not start, and
// replicas that ended without a request.
type failure struct {
	revision uint64
	at       time.Time // time of the latest failure
	ready    bool      // some replica of the revision has been ready
	kind     string    // cause of the failures that same counts, without digits and names
	same     int       // consecutive failures of that kind
	// Count before the latest answer reset it; 0 once a later replica has settled.
	before int
	plan.Failure
}

// add counts a failure of r at now. Failures of older revisions do not count. Replicas that were
// ordered before the latest failure count as the same failure. outside says that something else
// ended the replica's process; the failure then does not count towards maxSameFailures. chance is a
// random number in [0, 1) for the jitter.
func (f *failure) add(r *replica, now time.Time, cause string, outside bool, chance float64) {
	if r.spec.Revision < f.revision {
		return
	}
	f.follow(r.spec.Revision)
	f.Cause = cause
	if f.Count > 0 && !r.begun.After(f.at) {
		return
	}
	if !outside {
		kind := withoutDigits(strings.ReplaceAll(cause, r.name, ""))
		if kind != f.kind {
			f.same = 0
		}
		f.kind = kind
		f.same++
	}
	f.Count = max(f.Count, f.before) + 1
	f.at = now
	f.Until = now.Add(time.Duration(float64(Backoff(f.Count)) * (1 - jitter*chance)))
}

// withoutDigits returns a cause without digits, because durations and process ids differ between
// two failures of the same kind.
func withoutDigits(cause string) string {
	return strings.Map(func(r rune) rune {
		if r >= '0' && r <= '9' || r == '.' {
			return -1
		}
		return r
	}, cause)
}

// givesUp reports whether waiting tasks should fail instead of waiting for the next start.
func (f *failure) givesUp() bool {
	return f.Count >= maxFailures && !f.ready || f.same >= maxSameFailures
}

// follow forgets the failures when the function has a newer revision.
func (f *failure) follow(revision uint64) {
	if revision > f.revision {
		*f = failure{revision: revision}
	}
}

// became records that a replica of a revision is ready.
func (f *failure) became(revision uint64) {
	f.follow(revision)
	f.ready = f.ready || revision == f.revision
}

// worked records an answer of a replica that became ready at readySince. It resets the count if the
// replica has the same revision and became ready after the latest failure. If the replica soon ends
// without a request, the count continues.
func (f *failure) worked(revision uint64, readySince time.Time) {
	if revision == f.revision && f.Count > 0 && readySince.After(f.at) {
		*f = failure{revision: f.revision, at: f.at, ready: true, before: f.Count}
	}
}

// settled resets the count permanently when the replica has been ready for settle.
func (f *failure) settled(revision uint64, readySince, now time.Time) {
	if revision == f.revision && now.Sub(readySince) >= settle && readySince.After(f.at) {
		f.worked(revision, readySince)
		f.before = 0
	}
}
