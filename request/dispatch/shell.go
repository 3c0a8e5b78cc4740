package dispatch

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Bus delivers the tasks of functions and takes replies; package queue implements it over NATS.
type Bus interface {
	// Tasks calls handler with each message for function, in order, until stop is called. The
	// handler may keep msg. The argument more is true if another call follows at once. When stop
	// returns, no handler runs or will run.
	Tasks(function string, handler func(msg []byte, more bool)) (stop func(), err error)
	// Reply sends msg and does not keep it.
	Reply(to string, msg []byte) error
}

// Store holds items that are too large for messages; tensor.Dir implements it.
type Store interface {
	tensor.Store
	// Open returns the encoded item as a file for reading. The caller closes it.
	Open(tensor.Ref) (*os.File, error)
}

// Config configures a [Shell]. Callbacks may be nil. They are called without locks. They must
// return at once and must not call Ensure, Remove or Close.
type Config struct {
	Bus        Bus
	Store      Store
	Logger     *slog.Logger
	Registerer prometheus.Registerer

	// Near takes a reply to a coordinator in this process, without encoding. If it returns false, the
	// reply goes over the bus. If Near is nil, all replies go over the bus.
	Near func(to string, r *task.Reply) bool
	// OnDemand is called when more replicas would help (see [Wanted]), at most ten times per second
	// per function.
	OnDemand func(function pipeline.Key)
	// Revive is called when tasks wait for a revision that is no longer deployed and has no replica
	// left, because their requests began on it. The receiver starts a replica of the revision, or
	// calls [Shell.NoReplica]. If Revive is nil, such tasks are answered with [task.Redeployed] at
	// once.
	Revive func(function pipeline.Key, revision uint64)
	// FirstAnswer is called when a replica has answered its first call.
	FirstAnswer func(First)
	// OutOfMemory is called when a replica has answered a call with task.OutOfMemory, before the
	// call's reply is sent. The replica gets no more calls. The receiver drains it with
	// [Shell.Drain].
	OutOfMemory func(function pipeline.Key, replica string, short *task.MemoryError)
	// Stuck is called when a handler goes on for too long after its call is over. The replica gets no
	// more calls. The receiver starts another replica, and drains this one with [Shell.Drain].
	Stuck func(function pipeline.Key, replica, cause string)
	// Dropped is called when a replica was given up for a reason that [Shell.Lost] did not report:
	// its connection closed, or it broke the protocol. Its process may still run.
	Dropped func(function pipeline.Key, replica string, death task.Death)
}

// First describes a replica's first answer.
type First struct {
	Function pipeline.Key
	Replica  string
	After    time.Duration // from the attachment to the first answer
	Call     time.Duration // duration of the first call
	Waited   bool          // tasks were waiting at the attachment, so After contains no idle time
}

// Spec is the part of a function's configuration that its line needs.
type Spec struct {
	Function    pipeline.Key
	Revision    uint64 // revision of the function's spec
	QueueLimit  int    // largest number of waiting tasks; 0: 1000
	MaxReplicas int    // upper bound of the function's scale
	// Most batches per replica at a time; 0: as many as the replica says.
	Slots int
	Batch int // largest batch; 0: 1
	// The function's exec_timeout; 0: a call may run until its deadline.
	Timeout time.Duration
	// The stage that the function can serve too, of the same namespace; zero: it is no variant.
	VariantOf pipeline.Key
}

// Shell runs the dispatchers of all functions that this process owns. Its methods are safe for
// concurrent use.
type Shell struct {
	cfg     Config
	metrics *metrics
	bounds  bounds
	buffers sync.Pool // holds *[]byte

	mu        sync.Mutex // held to change functions
	functions atomic.Pointer[map[pipeline.Key]*function]
}

// bounds are the longest waits of the shell.
type bounds struct {
	hello time.Duration // for the Hello of a replica that loads its parameters
	// For a replica that does not read; the actual wait is at least half of it.
	write time.Duration
	cause time.Duration // for the report of why a connection closed
	// For that report before the Hello, when the cluster asks for the cause too.
	early time.Duration
	tail  time.Duration // for reading what a replica sent before its process ended
	leave time.Duration // for a drained replica to close its connection
}

// New returns a Shell without functions. The caller closes it.
func New(cfg Config) (*Shell, error) {
	s := &Shell{
		cfg: cfg, buffers: sync.Pool{New: func() any { return new([]byte) }},
		bounds: bounds{
			hello: time.Minute, write: 10 * time.Second, cause: 2 * time.Second, early: 250 * time.Millisecond,
			tail: 250 * time.Millisecond, leave: 30 * time.Second,
		},
	}
	s.functions.Store(&map[pipeline.Key]*function{})
	var err error
	if s.metrics, err = newMetrics(cfg.Registerer, s); err != nil {
		return nil, fmt.Errorf("dispatch: %w", err)
	}
	return s, nil
}

func (s *Shell) function(key pipeline.Key) *function { return (*s.functions.Load())[key] }

// Owns reports whether this process owns a function's line.
func (s *Shell) Owns(function pipeline.Key) bool { return s.function(function) != nil }

// Ensure makes this process the owner of a function's line, or changes its limits. Slots, Batch and
// Timeout apply to replicas that attach later.
func (s *Shell) Ensure(spec Spec) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.function(spec.Function); f != nil {
		f.set(spec)
		f.step(Deployed{Revision: spec.Revision, QueueLimit: max(spec.QueueLimit, 0)})
		return nil
	}
	f := newFunction(s, spec)
	next := maps.Clone(*s.functions.Load())
	next[spec.Function] = f
	s.functions.Store(&next)
	if err := f.open(); err != nil {
		s.remove(spec.Function, "its line could not be opened")
		return fmt.Errorf("own the line of %q: %w", spec.Function, err)
	}
	return nil
}

// Remove ends a function, if it exists. The function's waiting and running tasks are answered with
// [task.Unavailable], and its replicas' connections are closed. Remove returns when all goroutines
// of the function have ended.
func (s *Shell) Remove(function pipeline.Key) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.remove(function, fmt.Sprintf("function %q was removed", function))
}

// Close removes all functions.
func (s *Shell) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key := range *s.functions.Load() {
		s.remove(key, "the dispatcher shuts down")
	}
	s.metrics.close()
}

func (s *Shell) remove(key pipeline.Key, cause string) {
	f := s.function(key)
	if f == nil {
		return
	}
	f.close(cause)
	next := maps.Clone(*s.functions.Load())
	delete(next, key)
	s.functions.Store(&next)
	s.metrics.forget(key.String())
}

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
	f := s.function(function)
	if f == nil {
		return time.Time{}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.core.of(replica).Due(replica)
}

// Drain drains a replica (see [ReplicaDrain]), waits until the replica is idle, and asks it to
// leave. If ctx ends earlier, Drain returns the cause. It returns nil if the replica is lost
// meanwhile or is not attached.
func (s *Shell) Drain(ctx context.Context, function pipeline.Key, replica string) error {
	f := s.function(function)
	if f == nil {
		return nil
	}
	l := f.link(replica)
	if l == nil {
		return nil
	}
	if err := l.leave(ctx); err != nil {
		return fmt.Errorf("drain replica %q of %q: %w", replica, function, err)
	}
	return nil
}

// Lost takes the report of how a replica's process ended. busy reports whether the replica had
// unanswered calls at that time. After the replica's last answers have been read, the remaining
// calls are answered with [task.ReplicaLost] and the cause.
func (s *Shell) Lost(function pipeline.Key, replica string, death task.Death) (busy bool) {
	f := s.function(function)
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

// Fail answers the waiting tasks of a function with [task.Unavailable] and the cause, because no
// replica of this revision can be started. Tasks that need another revision go on waiting. Tasks
// that come later wait as usual. If another revision is deployed, Fail does nothing.
func (s *Shell) Fail(function pipeline.Key, revision uint64, cause string) {
	if f := s.function(function); f != nil {
		f.step(Fail{Revision: revision, Cause: cause})
	}
}

// NoReplica answers the tasks that wait for a revision with [task.Redeployed] and the cause,
// because no replica of this revision can be started.
func (s *Shell) NoReplica(function pipeline.Key, revision uint64, cause string) {
	if f := s.function(function); f != nil {
		f.step(NoReplica{Revision: revision, Cause: cause})
	}
}

// Load returns the load of a function for admission, or zero if this process does not own the
// function. It takes no lock.
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
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.waited
}

// PauseMeasuring makes the core of a function ignore all measurements until the given time. The
// zero time ends the pause. If this process does not own the function, nothing happens.
func (s *Shell) PauseMeasuring(function pipeline.Key, until time.Time) {
	if f := s.function(function); f != nil {
		f.mu.Lock()
		f.core.Lane("").PauseMeasuring(until)
		f.mu.Unlock()
	}
}

// Signals returns the measurements of a function for control, or zero if this process does not own
// the function. The time now should have a monotonic reading, like the times of the Core's steps.
// Otherwise a change of the machine's clock counts as elapsed time.
func (s *Shell) Signals(function pipeline.Key, now time.Time) plan.Signals {
	f := s.function(function)
	if f == nil {
		return plan.Signals{}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.core.Signals(now)
}
