package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"time"
)

// setCPUTimeout bounds one attempt to change a replica's CPU limit.
const setCPUTimeout = 5 * time.Second

// wantCPU sets the CPU limit that the replica should have. The caller holds Local.mu.
func (r *replica) wantCPU(milli int) {
	if r.cpuWant == milli {
		return
	}
	r.cpuWant = milli
	select {
	case r.kick <- struct{}{}:
	default: // its goroutine has not seen the previous change yet
	}
}

// serve keeps the replica's CPU limit as wanted, until the replica is released or lost. It retries
// failures with growing pauses.
func (l *Local) serve(n *member, r *replica) {
	retry := time.NewTimer(time.Hour)
	retry.Stop()
	defer retry.Stop()
	failures := 0
	for {
		select {
		case <-r.wanted.Done():
			return
		case <-r.kick:
		case <-retry.C:
		}
		l.mu.Lock()
		from, to := r.cpu, r.cpuWant
		l.mu.Unlock()
		// After a failure, the node may nevertheless have changed the limit.
		if from == to && failures == 0 {
			continue
		}
		note, err := l.setCPU(n, r, from, to)
		if err != nil {
			if failures++; failures == 1 && r.wanted.Err() == nil {
				l.cfg.Log.Warn("failed to change a replica's CPU limit; trying again", "function", r.function, "replica", r.name, "wanted", milli(to), "error", err)
			}
			retry.Reset(Backoff(failures))
			continue
		}
		failures = 0
		l.mu.Lock()
		r.cpu, r.unbounded = to, note != ""
		l.note(r, Event{Kind: CPU, Cause: milli(from) + " → " + milli(to) + note})
		l.mu.Unlock()
	}
}

// setCPU changes a replica's limit, and asks for more threads if the limit grows.
func (l *Local) setCPU(n *member, r *replica, from, to int) (note string, err error) {
	hands := l.reach(n)
	if hands == nil {
		return "", fmt.Errorf("node %q is silent", n.name)
	}
	ctx, cancel := context.WithTimeout(r.wanted, setCPUTimeout)
	defer cancel()
	switch err := hands.SetCPU(ctx, r.name, to); {
	case errors.Is(err, errors.ErrUnsupported):
		note = ", in threads alone: the node does not limit CPU"
	case err != nil:
		return "", fmt.Errorf("node %q: %w", n.name, err)
	}
	threads := r.spec.threads(to)
	if threads <= r.spec.threads(from) {
		return note, nil // running threads are not ended; the limit applies to all of them
	}
	return note, l.cfg.Replicas.Threads(r.function, r.name, threads)
}

// threads returns how many threads can use so many thousandths of a core; 0: as declared.
func (f FunctionSpec) threads(milli int) int {
	if milli = cmp.Or(milli, f.CPULimit); milli == 0 {
		return math.MaxUint16 // all threads that the replica's session was made for
	}
	return (milli + 999) / 1000
}

// milli formats thousandths of a core as specs do.
func milli(n int) string {
	if n == 0 {
		return "as declared"
	}
	return fmt.Sprintf("%dm", n)
}
