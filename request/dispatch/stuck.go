package dispatch

import (
	"fmt"
	"time"
)

// A call's limit is the end of the function's exec_timeout or the call's deadline, whichever comes
// first. At its limit, a call is over: the caller gets an answer, and the replica is told to cancel
// the call. When the handler ends, the replica answers the call, and the slot is free. If the
// handler goes on for longer than the grace period after the limit, the replica is stuck. A stuck
// replica gets no more tasks. Its other calls go on until their own limits. Then the replica is
// idle.

const (
	// defaultGrace is how long a handler may go on after its call's limit.
	defaultGrace = 2 * time.Second
	// endlessGrace is how long the handler of a canceled call without a limit may go on.
	endlessGrace = time.Minute
)

// graceEnd returns the time until which the handler of a call that is cut now may go on. If the
// caller left before the call's limit, the grace period still begins at the limit.
func (it *item) graceEnd(now time.Time, grace time.Duration) time.Time {
	switch {
	case it.limit.IsZero():
		return now.Add(endlessGrace)
	case it.limit.Before(now):
		return now.Add(grace)
	default:
		return it.limit.Add(grace)
	}
}

// timedOut reports whether a call's limit comes from exec_timeout, not from its deadline.
func (it *item) timedOut() bool {
	return !it.limit.IsZero() && (it.task.Deadline.IsZero() || it.limit.Before(it.task.Deadline))
}

// limitCause returns why a running call ended at its limit.
func (it *item) limitCause() string {
	if it.timedOut() {
		return fmt.Sprintf("it ran for longer than exec_timeout, %v", it.batch.replica.timeout)
	}
	return "the deadline passed while it ran"
}

// name returns the id of an item's call for messages: its X-Call-Id, if the task has one.
func (it *item) name() string {
	for _, h := range it.task.Header {
		if h.Name == "X-Call-Id" {
			return h.Value
		}
	}
	return it.task.Request
}

// markStuck marks a replica stuck because the handler of a call that was cut has not ended.
func (c *Core) markStuck(now time.Time, it *item) {
	c.timers.drop(it)
	r, l := it.batch.replica, it.lane
	i, ok := l.find(r.name)
	if !ok || r.stuck != "" {
		return
	}
	beyond, what := now.Sub(it.limit), "its deadline"
	switch {
	case it.limit.IsZero():
		beyond, what = endlessGrace, "its cancellation"
	case it.timedOut():
		what = fmt.Sprintf("exec_timeout=%v", r.timeout)
	}
	r.stuck = fmt.Sprintf("call %s ran %v beyond %s and did not end", it.name(), beyond.Round(100*time.Millisecond), what)
	r.full = true
	c.do(Stuck{Replica: r.name, Cause: r.stuck})
	l.drain(r.name)
	l.failed = l.failed || l.Replicas() == 0
	if r.suspect != nil {
		l.unreserve(i)
	}
}

// forgetCalls takes the calls that the i-th replica still runs out of the timers. The replica is
// stuck, and the calls' callers have been answered.
func (f *fleet) forgetCalls(i int, timers *heap) {
	for _, b := range f.replicas[i].batches {
		f.unanswered -= int(b.left)
		for _, it := range b.items {
			if it != nil {
				timers.drop(it)
			}
		}
	}
}
