package dispatch

import (
	"context"
	"fmt"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// Attach adds a replica to a function. c is the near end of the replica's socket. Attach waits for
// the replica's Hello until ctx ends, but at most a minute. revision is the revision of the spec
// that the replica was started from. On an error, Attach closes c.
func (s *Shell) Attach(ctx context.Context, function pipeline.Key, replica string, revision uint64, c wire.Socket) (wire.Hello, error) {
	f := s.function(function)
	if f == nil {
		_ = c.Close() // nothing was sent
		return wire.Hello{}, fmt.Errorf("attach replica %q: no function %q", replica, function)
	}
	hello, err := f.attach(ctx, replica, revision, c)
	if err != nil {
		return wire.Hello{}, fmt.Errorf("attach replica %q of %q: %w", replica, function, err)
	}
	return hello, nil
}

// Due returns the latest deadline of a replica's tasks, and of the requests that still need its
// revision. It returns zero if there are none.
func (s *Shell) Due(function pipeline.Key, replica string) time.Time {
	f := s.entry(function)
	if f == nil {
		return time.Time{}
	}
	o := f.lock()
	defer o.mu.Unlock()
	if l := o.core.of(replica); l != nil {
		return l.Due(replica)
	}
	return time.Time{}
}

// Drain drains a replica (see [ReplicaDrain]), waits until the replica is idle, and asks it to
// leave. If ctx ends earlier, Drain returns the cause. It returns nil if the replica is lost
// meanwhile or is not attached.
func (s *Shell) Drain(ctx context.Context, function pipeline.Key, replica string) error {
	return drain(ctx, s, function, replica, false)
}

// Release is Drain for a replica that another dispatcher takes over: it closes the connection and
// does not ask the replica to leave.
func (s *Shell) Release(ctx context.Context, function pipeline.Key, replica string) error {
	return drain(ctx, s, function, replica, true)
}

func drain(ctx context.Context, s *Shell, function pipeline.Key, replica string, stays bool) error {
	f := s.entry(function)
	if f == nil {
		return nil
	}
	l := f.link(replica)
	if l == nil {
		return nil
	}
	if err := l.leave(ctx, stays); err != nil {
		return fmt.Errorf("drain replica %q of %q: %w", replica, function, err)
	}
	return nil
}

// Lost takes the report of how a replica's process ended. busy reports whether the replica had
// unanswered calls at that time. After the replica's last answers have been read, the remaining
// calls are answered with [task.ReplicaLost] and the cause.
func (s *Shell) Lost(function pipeline.Key, replica string, death task.Death) (busy bool) {
	f := s.entry(function)
	if f == nil {
		return false
	}
	l := f.link(replica)
	if l == nil {
		return false
	}
	busy = f.busy(replica) // read first, because the next line leads to answers
	l.lost(death)
	return busy
}

// Fail reports that no replica of a function's revision can be started. The function's waiting
// tasks go to the other functions that serve its stage, as the routing table says. If there are
// none, the tasks are answered with [task.Unavailable] and the cause. Tasks that need another
// revision go on waiting. Tasks that come later wait as usual. If another revision is deployed,
// Fail does nothing.
func (s *Shell) Fail(function pipeline.Key, revision uint64, cause string) {
	if f := s.function(function); f != nil {
		f.step(Fail{Lane: f.lane, Revision: revision, Cause: cause})
	}
}

// NoReplica answers the tasks that wait for a revision with [task.Redeployed] and the cause,
// because no replica of this revision can be started.
func (s *Shell) NoReplica(function pipeline.Key, revision uint64, cause string) {
	if f := s.function(function); f != nil {
		f.step(NoReplica{Lane: f.lane, Revision: revision, Cause: cause})
	}
}

// Load returns the load of a function for admission. The load of a stage with variants is that of
// all functions that serve it. Load returns zero if this process does not own the function. It
// takes no lock.
func (s *Shell) Load(function pipeline.Key) task.Load {
	f := s.function(function)
	if f == nil {
		return task.Load{}
	}
	return f.load.read()
}

// Waited returns how long tasks of a function wait in its line, smoothed over about sixteen tasks.
func (s *Shell) Waited(function pipeline.Key) time.Duration {
	f := s.function(function)
	if f == nil {
		return 0
	}
	o := f.lock()
	defer o.mu.Unlock()
	return f.waited
}

// PauseMeasuring makes the lane of a function ignore all measurements until the given time. The
// zero time ends the pause. If this process does not own the function, nothing happens.
func (s *Shell) PauseMeasuring(function pipeline.Key, until time.Time) {
	if f := s.function(function); f != nil {
		o := f.lock()
		defer o.mu.Unlock()
		if l := o.core.Lane(f.lane); l != nil {
			l.PauseMeasuring(until)
		}
	}
}

// Signals returns the measurements of a function's lane for control, or zero if this process does
// not own the function. The time now should have a monotonic reading, like the times of the Core's
// steps. Otherwise a change of the machine's clock counts as elapsed time.
func (s *Shell) Signals(function pipeline.Key, now time.Time) plan.Signals {
	f := s.function(function)
	if f == nil {
		return plan.Signals{}
	}
	o := f.lock()
	defer o.mu.Unlock()
	return o.signals(f.lane, now)
}
