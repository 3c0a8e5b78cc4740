package cluster

import (
	"cmp"
	"context"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// wish is a number of replicas that a user asked for by hand.
type wish struct {
	replicas int
	at       time.Time
	revision uint64 // revision of the function; 0: not known yet
	rev      uint64 // of the first Snapshot with this wish; 0: none yet
}

// Scale sets the minimum number of a function's replicas by hand. It holds until the next Scale or
// the next deploy of the function. Load may add more replicas. A function that may scale to zero
// still does so when it is idle. Scale to zero puts any function to sleep until its next request.
// Scale returns when the wish is recorded, before any replica starts or stops.
func (l *Local) Scale(_ context.Context, function pipeline.Key, replicas int) error {
	l.mu.Lock()
	closed := l.closed
	if !closed {
		l.of(function).wish = &wish{replicas: replicas, at: l.now()}
	}
	l.mu.Unlock()
	if closed {
		return ErrClosed
	}
	l.cfg.Changed()
	return nil
}

// grant applies the wish to f, which policies see in the Snapshot rev. A wish counts as use of the
// function.
func (k *function) grant(f *plan.Function, rev uint64) {
	w := k.wish
	if w == nil {
		return
	}
	w.revision, w.rev = cmp.Or(w.revision, f.Revision), cmp.Or(w.rev, rev)
	switch {
	case w.revision != f.Revision:
		k.wish = nil
	case w.replicas > 0:
		f.Min = min(max(f.Min, w.replicas), max(f.Max, 1))
		if w.at.After(f.Demand.Last) {
			f.Demand.Last = w.at
		}
	case f.Demand.Last.After(w.at) || f.Waiting > 0:
		k.wish = nil
	default:
		f.Min, f.Zero, f.ZeroAge = 0, true, 0
	}
}
