package cluster

import (
	"errors"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// Stuck reports that a handler on a replica did not end after its call was over; cause names the
// call. The replica is drained, and the next plan replaces it. Stuck returns at once. A second
// report, or one about an unknown replica, does nothing.
func (l *Local) Stuck(replica, cause string) {
	l.mu.Lock()
	r := l.replicas[replica]
	if r != nil && r.stuck == "" {
		r.stuck = cause
		l.note(r, Event{Kind: Stuck, Cause: cause})
		// For the next plan, which may come before the replica's goroutine sees it.
		r.state, r.since = plan.Draining, l.now()
		r.release(errors.New(cause))
	}
	l.mu.Unlock()
	if r != nil {
		l.cfg.Changed()
	}
}
