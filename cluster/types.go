package cluster

import (
	"context"
	"net"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/plan"
	"github.com/stagecoach-serving/stagecoach/task"
	"github.com/stagecoach-serving/stagecoach/wire"
)

// FunctionSpec is what is deployed under a key.
type FunctionSpec struct {
	Key      pipeline.Key
	Revision uint64       // grows with each change
	Memory   int64        // bytes a replica adds to a node that has the zygote; 0: unknown
	CPUMilli int          // thousandths of a core that a replica is promised; 0: nothing
	CPULimit int          // thousandths of a core that a replica may use, unless a plan says otherwise; 0: all there are
	Profile  []plan.Point // service times as measured, in order; shared
	Declared pipeline.Function
	Spec     any // what a [Node] needs to start it: image, environment; opaque here
}

// Functions knows what is deployed, at any time.
type Functions interface {
	Functions() []FunctionSpec
	Pipelines() []pipeline.Pipeline
}

// Lines are the functions' waiting lines; dispatch.Shell has them.
type Lines interface {
	// Signals returns what is measured of a function as of now.
	Signals(function pipeline.Key, now time.Time) plan.Signals
	// Disregard has nothing of a function count as measured until then; the zero time: from now on all counts again.
	Disregard(function pipeline.Key, until time.Time)
	// Fail answers what waits for a function task.Unavailable with the cause, if this revision is the
	// deployed one. What comes later waits again.
	Fail(function pipeline.Key, revision uint64, cause string)
	// NoReplica answers the tasks that wait for a revision with task.Redeployed and the cause. The
	// revision is no longer deployed, and no replica of it can be started.
	NoReplica(function pipeline.Key, revision uint64, cause string)
}

// Replicas gives replicas work; dispatch.Shell does.
type Replicas interface {
	// Attach takes over conn, also when it fails, and returns when the replica has said that it is ready. Revision is of the
	// function's spec that it was started from.
	Attach(ctx context.Context, function pipeline.Key, replica string, revision uint64, conn *net.UnixConn) (wire.Hello, error)
	// Drain gives a replica nothing new and returns when it has nothing left, or was lost.
	Drain(ctx context.Context, function pipeline.Key, replica string) error
	// Due returns the latest deadline of the requests that still need the replica. It returns the
	// zero time if there are none.
	Due(function pipeline.Key, replica string) time.Time
	// Lost reports why a replica's process ended. It returns whether the replica had calls that it
	// had not answered. Reporting a replica that is not attached does nothing.
	Lost(function pipeline.Key, replica string, death task.Death) (busy bool)
	// Threads asks a replica to compute with n threads. One that has as many, or cannot have more, changes nothing.
	Threads(function pipeline.Key, replica string, n int) error
}

// Node is a machine's KeysManager.
type Node interface {
	// Start starts a replica: a fork of a zygote when there is one, which may have to be loaded first. It honours ctx.
	Start(ctx context.Context, o Order) (Started, error)
	// Stop ends a replica's process, first politely, after grace by force. Stopping what does not run is no error.
	Stop(ctx context.Context, replica string, grace time.Duration) error
	// SetCPU lets a replica use so many thousandths of a core from now on; 0: as declared. Asking twice changes nothing. A node
	// that does not limit CPU says so with [errors.ErrUnsupported].
	SetCPU(ctx context.Context, replica string, milli int) error
	// Warm brings parameters up, and lets others go, as wanted; it is the whole list, told again with every plan.
	Warm(ctx context.Context, wanted []WarmOrder) error
	// Inventory returns what the node is and has, at any time. Its name does not change.
	Inventory() plan.Node
}

// Order asks a Node for a replica.
type Order struct {
	Replica  string // its name, new
	Function FunctionSpec
	Device   string // as plan.Slot has it; empty: the CPU
	CPUMilli int    // 0: as declared
}

// WarmOrder asks a Node to keep a function's parameters warm.
type WarmOrder struct {
	Function *FunctionSpec // read only
	Warmth   plan.Warmth
	Key      bool // evicted last
}

// Started is a replica's process.
type Started struct {
	PID    int
	Conn   *net.UnixConn // the near end of its socket
	Path   string        // how it came to be: "fork" of a zygote that was there, "cold", from one that was not, "process"
	Phases []Phase       // where the time went, in order
}

// Phase is a part of a start.
type Phase struct {
	Name string
	Took time.Duration
}

// Kind is what happened to a replica.
type Kind string

// The kinds of an [Event].
const (
	Ordered  Kind = "ordered"
	Process  Kind = "started" // its process runs: Path and Phases say how
	Ready    Kind = "ready"   // it has said so; Phases are those of its own
	Answered Kind = "first answer"
	Draining Kind = "draining" // Cause says why
	Stopped  Kind = "stopped"
	Lost     Kind = "lost"   // it ended unasked: Cause
	Failed   Kind = "failed" // it did not start: Cause
	CPU      Kind = "cpu"    // what it may use was changed: Cause says from what to what
	Stuck    Kind = "stuck"  // a handler on it does not end: Cause; it is replaced
	Barred   Kind = "barred" // its function is kept from its device for a while: Cause
	Hidden   Kind = "out of sight"
	Back     Kind = "back in sight"
	Joined   Kind = "joined" // of a node, in no timeline: it takes part
	Left     Kind = "left"   // likewise: it is silent
)

// Event is a line of a function's timeline.
type Event struct {
	At       time.Time
	Function pipeline.Key
	Replica  string
	Node     string
	Kind     Kind
	Path     string
	Phases   []Phase
	Cause    string
}

// eventsKept bounds the timeline of a function.
const eventsKept = 256

// timeline is a ring of a function's latest events. The zero value is ready.
type timeline struct {
	ring []Event
	next int // where the next goes once the ring is full
}

func (t *timeline) add(e Event) {
	if len(t.ring) < eventsKept {
		t.ring = append(t.ring, e)
		return
	}
	t.ring[t.next] = e
	t.next = (t.next + 1) % eventsKept
}

// failure returns the latest event about a replica that failed; false: there is none.
func (t *timeline) failure() (Event, bool) {
	all := t.list()
	for i := len(all) - 1; i >= 0; i-- {
		if e := all[i]; e.Kind == Failed || e.Kind == Lost || e.Kind == Stuck {
			return e, true
		}
	}
	return Event{}, false
}

// list returns the events, oldest first, in memory of its own.
func (t *timeline) list() []Event {
	return append(append([]Event{}, t.ring[t.next:]...), t.ring[:t.next]...)
}
