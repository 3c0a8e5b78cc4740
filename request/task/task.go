// Package task holds the types of the fast path. A [Task] is one call of one function for a
// request, and a [Reply] is its result. A dispatcher leaves decisions to three kinds of policies:
// [Orderer], [Binder] and [Batcher].
//
// A task travels from a coordinator to the dispatcher of its function, and its reply travels back.
// Between processes, package wire encodes them. Policies see a [View], but no connection, clock or
// goroutine.
package task

import (
	"math"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Key identifies one attempt of one task. Coordinators and dispatchers use it to drop duplicates.
type Key struct {
	Request string
	Task    uint32 // unique within the request
	Attempt uint8  // from 1
}

// Task is one call of one function.
type Task struct {
	Key
	Function    string // pipeline.Key of the function, as text
	Pipeline    string // pipeline.Key as text; empty: the function was invoked by its own name
	Stage       string // the stage's name within the pipeline
	ReplyTo     string // destination of the reply, opaque to the dispatcher
	Deadline    time.Time
	Entered     time.Time // set by the dispatcher when the task enters its line; not encoded
	Traceparent string    // W3C trace context; empty: none
	Header      []Header  // header of the request, for the function
	Input       tensor.Input

	Origin
	Length int // of the input, in the unit of the stages' max-length; 0: unknown
	// Variant is the function that produced the input, as pipeline.Key in text: the stage's own or a
	// variant. plan.FromClient means the client, and plan.FromJoin several stages.
	Variant string
	Place

	// Pins are the revisions that must run it, per function of its stage. A function without a pin
	// may run it on any revision. A pin without a revision names the function that must run it.
	Pins []Pin
	// One of several tasks of its request for this stage. One revision per function must run them
	// all.
	Together bool
	// The task's output is the response, so a coordinator in the same process gets the output in
	// memory. Not encoded.
	Last bool
	// Keep allows the large items of the task's output to stay on the node: other stages fetch them
	// there, or a coordinator in another process does.
	Keep bool
	// An earlier replica ended under the task, so the task runs in a batch of one, on a replica
	// without other tasks.
	Alone bool
}

// Origin is what a task knows of its request.
type Origin struct {
	// App is the application: the pipeline or function that the client invoked, as pipeline.Key in
	// text. Applications share replicas by Weight.
	App     string
	Weight  int       // of App's fair share; below 1: 1
	Arrived time.Time // when the request arrived at its gateway; zero: unknown
	// Due is when the request should be done: by its pipeline's objective, else by its deadline;
	// zero: there is neither.
	Due time.Time
}

// Place is where a task should stand in its line, and where it should run.
type Place struct {
	// Rank is the task's place in lines that order by rank: lower goes first. It holds until
	// RankUntil; zero: for ever.
	Rank      float64
	RankUntil time.Time
	Prefer    []string // names of the nodes where the task may run best, the best first
}

// Pin binds a task to a revision of one of its stage's functions, or to the function.
type Pin struct {
	Function string // pipeline.Key as text
	// Revision is that of the function's spec. With 0, the function must run the task, in any
	// revision; see [Task.Only].
	Revision uint64
}

// Only returns the function that must run the task, whatever the stage's routing table says; empty:
// any function of the stage may.
func (t *Task) Only() string {
	for i := range t.Pins {
		if t.Pins[i].Revision == 0 {
			return t.Pins[i].Function
		}
	}
	return ""
}

// Pinned returns the revision of a function that must run the task; 0: any.
func (t *Task) Pinned(function string) uint64 {
	for i := range t.Pins {
		if p := &t.Pins[i]; p.Function == function && p.Revision != 0 {
			return p.Revision
		}
	}
	return 0
}

// SlackRank returns the Rank of a task for the order least-slack: the latest time to begin, in
// seconds since 1970. rest is the expected rest of its request's work. Tasks that are never due
// come last.
func SlackRank(due time.Time, rest time.Duration) float64 {
	if due.IsZero() {
		return math.MaxFloat64
	}
	return float64(due.UnixNano())/1e9 - rest.Seconds()
}

// Header is one header field of a request or a reply.
type Header struct{ Name, Value string }

// Code is a task's outcome.
type Code uint8

// The outcomes of a task.
const (
	OK          Code = iota
	BadInput         // the function refused the input: 400, not retried
	Failed           // the function ran and answered with an error: 500, not retried
	ReplicaLost      // the replica died or broke the protocol under the task: retried elsewhere
	Expired          // the deadline passed before a replica took it, or while it ran: 504
	Overloaded       // the line is full: 429
	Canceled         // the coordinator canceled it
	Unavailable      // no replica could be started: 503
	// No replica is left of the revision that the task's request needs: 503. The task is retried
	// instead if no answer of that revision was used.
	Redeployed
	// The replica's device has too little memory: retried on a replica on other devices, else 503.
	OutOfMemory
	// A policy dropped it, because serving it would be useless: 503, never retried. Reply.Reason
	// says why.
	Dropped
	// An item of its input was lost with the node that kept it, before a replica got the task. The
	// stage that made the item runs again if it may, else 502. Reply.Lost names the items. If it
	// names none, another task of the batch has lost its item, and this task is tried again.
	InputLost
)

// OwnerEnds is the message of an Unavailable reply of an owner that ends with its process. If the
// reply names no replica, none has had the task.
const OwnerEnds = "the dispatcher shuts down"

// ownerHeader names the owner in a reply that gives a task back. Processes of earlier releases
// neither send it nor use it.
const ownerHeader = "Stagecoach-Owner"

// SignBack adds the owner's id to a reply that gives a task back. It leaves other replies alone.
func (r *Reply) SignBack(owner string) {
	if _, back := r.GivenBack(); back && owner != "" {
		r.Header = []Header{{ownerHeader, owner}}
	}
}

// GivenBack reports whether a reply gives a task back that no replica has had, because the owner of
// its function ends. owner is the owner's id; empty: it has not signed.
func (r *Reply) GivenBack() (owner string, back bool) {
	if r.Code != Unavailable || r.Message != OwnerEnds || r.Replica != "" {
		return "", false
	}
	for _, h := range r.Header {
		if h.Name == ownerHeader {
			return h.Value, true
		}
	}
	return "", true
}

// DropReason says why a policy dropped a task. Values are short, so that they fit a header and a
// label of a metric.
type DropReason string

// The reasons for a drop.
const (
	DropLate   DropReason = "late"    // it could not be done before it is due
	DropLength DropReason = "length"  // no variant takes an input of its length
	DropNoLane DropReason = "no-lane" // no variant serves the stage
)

// DropReasons returns all reasons for a drop.
func DropReasons() []DropReason { return []DropReason{DropLate, DropLength, DropNoLane} }

// DropOther is shown in place of a reason that this program does not know.
const DropOther DropReason = "other"

// Known returns the reason, or DropOther if it is none of DropReasons.
func (r DropReason) Known() DropReason {
	if slices.Contains(DropReasons(), r) {
		return r
	}
	return DropOther
}

// MoreMemory says what to do about [OutOfMemory].
const MoreMemory = "if that lasts, reserve what it takes with the annotation stagecoach.dev/gpu-memory, make inputs or batches smaller " +
	"(stagecoach.dev/batch), or use devices with more memory"

// Reply is the end of one attempt of a task.
type Reply struct {
	Key
	Code    Code
	Message string // cause, unless Code is OK
	Replica string
	Wait    time.Duration // time in the line
	Service time.Duration // time on the replica
	Output  tensor.Activation
	Header  []Header // for the HTTP response, from the last stage

	Batch     uint64 // Number of its batch, unique within the function; 0: none.
	BatchSize int    // number of tasks in the batch
	// Variant is the function whose replica got it, as pipeline.Key in text; empty: none, or unknown.
	Variant  string
	Revision uint64     // of the replica; 0: no replica got it, or unknown
	Reason   DropReason // with Dropped
	Blame    Blame      // with ReplicaLost: what the loss means for the task
	Lost     []string   // with InputLost: blobs of the items
}

// Replica is what a dispatcher knows about one replica.
type Replica struct {
	Name     string
	Slots    int // batches that it takes at a time
	Busy     int // batches that it has
	MaxBatch int
	Draining bool // gets no new tasks
}

// View is what a policy of the fast path may know of a lane. Policies must not change or keep it.
type View struct {
	Now      time.Time
	Function string // of the lane
	Waiting  int
	Replicas []Replica     // sorted by Name
	Service  time.Duration // mean per batch; 0: unknown
	// BatchWait is how long a task may wait for its batch to fill; 0: not at all.
	BatchWait time.Duration
}

// Orderer gives a task its place in the line. Lower keys go first, and equal keys go in order of
// arrival. The key is valid until the given time; zero means for ever.
type Orderer interface {
	Key(v *View, t *Task) (key float64, until time.Time)
}

// Action is a Binder's decision.
type Action uint8

// The actions of a Binder.
const (
	Hold Action = iota // wait in the line
	Bind               // send to Choice.Replica
	Drop               // end the task with Choice.Reason
)

// Choice is what a Binder decides about a task.
type Choice struct {
	Action  Action
	Replica int // index into View.Replicas
	Reason  DropReason
}

// Binder decides which replica of a lane runs the task at the head of the lane. The lane itself
// comes from the stage's routing table (see plan.Table).
type Binder interface {
	Bind(v *View, t *Task) Choice
}

// Batcher decides how many tasks at the head of the line run together on r, which has a free slot.
// If n is above 0, the first n tasks of head run now. If n is 0, Batch is called again after wait.
type Batcher interface {
	Batch(v *View, r *Replica, head []*Task) (n int, wait time.Duration)
}
