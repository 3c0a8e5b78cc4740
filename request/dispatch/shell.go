package dispatch

import (
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
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
	// Open returns the encoded item as a file for reading. The caller closes it. Items of nodes come
	// from [Items].
	Open(tensor.Ref) (*os.File, error)
}

// Config configures a [Shell]. Callbacks may be nil. They are called without locks. They must
// return at once and must not call Ensure, Remove or Close.
type Config struct {
	Bus        Bus
	Store      Store
	Items      Items // nil: no node keeps items
	Logger     *slog.Logger
	Registerer prometheus.Registerer
	// Me is the id of this process among those that own functions, for [task.Reply.SignBack]; empty:
	// it is the only one.
	Me string

	// Near takes a reply to a coordinator in this process, without encoding. If it returns false,
	// the reply goes over the bus. If Near is nil, all replies go over the bus.
	Near func(to string, r *task.Reply) bool
	// Apart reports whether the coordinator at a reply's destination cannot read the Store. Such a
	// coordinator gets the items in the reply, except for items that nodes keep. The message has at
	// most Most bytes. If Apart is nil, all coordinators can read the Store.
	Apart func(to string) bool
	Most  int
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
	// Stuck is called when a handler goes on for too long after its call is over. The replica gets
	// no more calls. The receiver starts another replica, and drains this one with [Shell.Drain].
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
	// Batch is the largest batch; 0: 1. With AutoBatch, plans choose it, up to Batch, and it is 1
	// before the first plan.
	Batch     int
	AutoBatch bool
	BatchWait time.Duration // how long a task may wait for its batch to fill; 0: not at all
	// The function's exec_timeout; 0: a call may run until its deadline.
	Timeout time.Duration
	// The stage that the function can serve too, of the same namespace; zero: it is no variant.
	VariantOf pipeline.Key
	MaxLength int // the longest input that it takes, in the unit of task.Task.Length; 0: any
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
	if cfg.Revive == nil {
		s.cfg.Revive = func(function pipeline.Key, revision uint64) {
			s.NoReplica(function, revision, "replicas of old revisions are not started here")
		}
	}
	s.functions.Store(&map[pipeline.Key]*function{})
	var err error
	if s.metrics, err = newMetrics(cfg.Registerer, s); err != nil {
		return nil, fmt.Errorf("dispatch: %w", err)
	}
	return s, nil
}
