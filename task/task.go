// Package task holds the fast path's types: a [Task] is one call of one function on behalf of a request, a [Reply] is its
// end, and [Orderer], [Router] and [Batcher] are the decisions that a dispatcher leaves to policies.
//
// A task travels from a coordinator to the dispatcher of its function, and its reply back, both in the encoding of
// package wire. Policies see a [View] and never a connection, a clock or a goroutine.
package task

import (
	"time"

	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Key identifies one attempt of one task. Coordinators and dispatchers drop what they have already done by this key.
type Key struct {
	Request string
	Task    uint32 // unique within the request
	Attempt uint8  // from 1
}

// Task is one call of one function.
type Task struct {
	Key
	Function    string // pipeline.Key of the function
	Pipeline    string // pipeline.Key; empty: the function was invoked by itself
	Stage       string // the stage's name within the pipeline
	ReplyTo     string // where the reply goes, opaque to the dispatcher
	Deadline    time.Time
	Arrived     time.Time // set by the dispatcher when the task enters its line
	Traceparent string    // W3C trace context; empty: none
	Header      []Header  // of the request, for the function to read
	Input       tensor.Input

	Revision uint64 // of the function's spec whose replicas alone may run it; 0: any
	Together bool   // it is one of several of its request for this function, all of which one revision must run
	Last     bool   // its output is the response, so a coordinator in the same process gets the output from memory; not encoded
	Alone    bool   // an earlier replica ended under it: it runs in a batch of one, on a replica without other tasks
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
	Canceled         // the coordinator asked for it
	Unavailable      // no replica could be started: 503
	Redeployed       // there is no replica left of the revision that its request must have: 503, or retried while none was used
	OutOfMemory      // the replica's device has not the memory that it takes: retried on a replica on other devices, else 503
)

// MoreMemory says what to do about [OutOfMemory].
const MoreMemory = "if that lasts, reserve what it takes with the annotation stagecoach.dev/gpu-memory, make inputs or batches smaller " +
	"(stagecoach.dev/batch), or use devices with more memory"

// Reply is the end of one attempt of a task.
type Reply struct {
	Key
	Code    Code
	Message string // why, unless Code is OK
	Replica string
	Wait    time.Duration // from the line's entrance to the replica
	Service time.Duration // on the replica
	Output  tensor.Activation
	Header  []Header // for the HTTP response, from the last stage

	Batch     uint64 // number of the batch that it ran in, unique within the function; 0: it ran in none
	BatchSize int    // tasks that the batch was sent with
	Revision  uint64 // of the replica; 0: it got to none, or nobody knows
	Blame     Blame  // with ReplicaLost: what the loss means for the task
}

// Replica is a dispatcher's knowledge of one replica.
type Replica struct {
	Name     string
	Slots    int // batches it takes at a time
	Busy     int // batches it has
	MaxBatch int
	Draining bool // gets nothing new
}

// View is what a fast-path policy may know. It must not be changed or kept.
type View struct {
	Now      time.Time
	Function string
	Waiting  int
	Replicas []Replica     // sorted by Name
	Service  time.Duration // mean per batch; 0: not yet known
}

// Orderer gives a task its place in the line: lower keys first, ties by arrival. The key holds until the given time; zero
// means for ever.
type Orderer interface {
	Key(v *View, t *Task) (key float64, until time.Time)
}

// Action is what a Router decides.
type Action uint8

// The actions of a Router.
const (
	Hold Action = iota // wait in the line
	Bind               // send to Choice.Replica
	Drop               // end it with Choice.Reason
)

// Choice is a routing decision.
type Choice struct {
	Action  Action
	Replica int // index into View.Replicas
	Reason  string
}

// Router decides where the task at the head of the line runs. T is a table made once per plan by the same policy; a
// router that needs none uses struct{}.
type Router[T any] interface {
	Route(table T, v *View, t *Task) Choice
}

// Batcher decides how many of the head of the line run together on r, which has a free slot: n of head now, or, when n is
// 0, again after wait.
type Batcher interface {
	Batch(v *View, r *Replica, head []*Task) (n int, wait time.Duration)
}
