package cluster

import (
	"context"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// FunctionSpec is a deployed function: what policies know about it, and what a [Node] starts its
// replicas from.
type FunctionSpec struct {
	Key           pipeline.Key
	plan.Function           // as it was declared; Observe adds what was measured
	Spec          node.Spec // of the same revision
}

// Functions returns the present deployments.
type Functions interface {
	Functions() []FunctionSpec
	Pipelines() []pipeline.Pipeline
	// Has reports whether a function is deployed.
	Has(function pipeline.Key) bool
}

// Lines is the functions' waiting lines; dispatch.Shell implements it.
type Lines interface {
	// Signals returns the measurements of a function as of now.
	Signals(function pipeline.Key, now time.Time) plan.Signals
	// PauseMeasuring ignores all measurements of a function until the given time. The zero time
	// ends the pause.
	PauseMeasuring(function pipeline.Key, until time.Time)
	// Publish makes the lines follow the routing tables, ranks and batches of a plan. It does not
	// keep p.
	Publish(p *plan.Plan)
	// Fail answers the waiting tasks of a function with task.Unavailable and the cause, if this
	// revision is deployed. Tasks that arrive later wait again.
	Fail(function pipeline.Key, revision uint64, cause string)
	// NoReplica answers the tasks that wait for a revision with task.Redeployed and the cause. The
	// revision is no longer deployed, and no replica of it can be started.
	NoReplica(function pipeline.Key, revision uint64, cause string)
}

// Replicas gives replicas work; dispatch.Shell implements it.
type Replicas interface {
	// Attach takes ownership of conn, even if it fails. It returns when the replica is ready. The
	// replica was started from the function's spec of this revision.
	Attach(ctx context.Context, function pipeline.Key, replica string, revision uint64, conn wire.Socket) (wire.Hello, error)
	// Drain gives a replica no new tasks, and returns when it has no tasks left or was lost.
	Drain(ctx context.Context, function pipeline.Key, replica string) error
	// Release is Drain for a replica that another owner takes over: it closes the connection and does
	// not tell the replica to end.
	Release(ctx context.Context, function pipeline.Key, replica string) error
	// Due returns the latest deadline of the requests that still need the replica. It returns the
	// zero time if there are none.
	Due(function pipeline.Key, replica string) time.Time
	// Lost reports why a replica's process ended. It returns whether the replica had calls that it
	// had not answered. Reporting a replica that is not attached does nothing.
	Lost(function pipeline.Key, replica string, death task.Death) (busy bool)
	// Threads asks a replica to compute with n threads. It has no effect if the replica already has
	// n threads, or cannot have more.
	Threads(function pipeline.Key, replica string, n int) error
}

// Node is a machine's KeysManager.
type Node interface {
	// Start starts a replica. If its function has a zygote, the replica is a fork of that zygote,
	// which is loaded first if necessary. Start ends early when ctx ends. progress is called after
	// each phase; it may be nil.
	Start(ctx context.Context, o node.Order, progress func(node.Phase)) (node.Started, error)
	// Stop ends a replica's process, with SIGKILL after grace. It is no error if the replica does
	// not run.
	Stop(ctx context.Context, replica string, grace time.Duration) error
	// SetCPU sets a replica's CPU limit in thousandths of a core; 0: as declared. Calling it twice
	// has no further effect. A node that cannot limit CPU returns [errors.ErrUnsupported].
	SetCPU(ctx context.Context, replica string, milli int) error
	// Warm loads and evicts parameters as wanted. wanted is the whole list. It is sent again when
	// something changes, and every ten seconds.
	Warm(ctx context.Context, wanted []node.Wanted) error
	// Inventory returns the present state of the node. Its name does not change.
	Inventory() plan.Node
}

// Kind is the kind of an [Event] of a replica.
type Kind string

// The kinds of an [Event].
const (
	Ordered  Kind = "ordered"
	Process  Kind = "started" // its process runs; see Path and Phases
	Ready    Kind = "ready"   // it has said that it is ready; Phases are the replica's own
	Answered Kind = "first answer"
	Draining Kind = "draining" // Cause says why
	Stopped  Kind = "stopped"
	Lost     Kind = "lost"   // it ended unexpectedly; see Cause
	Failed   Kind = "failed" // it did not start; see Cause
	CPU      Kind = "cpu"    // its CPU limit was changed; Cause has both limits
	Stuck    Kind = "stuck"  // a handler on it does not end; see Cause; it is replaced
	Barred   Kind = "barred" // its function is kept off its device for a while; see Cause
	Hidden   Kind = "out of sight"
	Back     Kind = "back in sight"
	Adopted  Kind = "adopted" // an earlier owner has started it, and this one has taken it over
	// It was left to the next owner when this one was closed.
	HandedOver Kind = "handed over"
	Joined     Kind = "joined" // a node takes part; in no timeline
	Left       Kind = "left"   // a node is silent; in no timeline
)

// Event is an entry of a function's timeline.
type Event struct {
	At       time.Time
	Function pipeline.Key
	Replica  string
	Node     string
	Kind     Kind
	Path     string
	Phases   []node.Phase
	Cause    string
}

// eventsKept bounds the timeline of a function.
const eventsKept = 256

// timeline is a ring buffer of a function's latest events. The zero value is ready.
type timeline struct {
	ring []Event
	next int // index of the next event once the ring is full
}

func (t *timeline) add(e Event) {
	if len(t.ring) < eventsKept {
		t.ring = append(t.ring, e)
		return
	}
	t.ring[t.next] = e
	t.next = (t.next + 1) % eventsKept
}

// failure returns the latest event about a failed replica, or false.
func (t *timeline) failure() (Event, bool) {
	all := t.list()
	for i := len(all) - 1; i >= 0; i-- {
		if e := all[i]; e.Kind == Failed || e.Kind == Lost || e.Kind == Stuck {
			return e, true
		}
	}
	return Event{}, false
}

// list returns a copy of the events, oldest first.
func (t *timeline) list() []Event {
	return append(append([]Event{}, t.ring[t.next:]...), t.ring[:t.next]...)
}
