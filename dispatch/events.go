package dispatch

import (
	"time"

	"github.com/stagecoach-serving/stagecoach/task"
)

// Event is something that happened to a function: one of [Submit], [Cancel], [ReplicaUp], [ReplicaDrain], [ReplicaDown],
// [Result], [Credit], [Deployed], [Fail], [Tick] and [Close].
type Event interface{ event() }

// Submit brings a task. The Core keeps it until its end and sets its Arrived.
type Submit struct{ Task *task.Task }

// Cancel says that nobody waits for the task any more.
type Cancel struct{ Key task.Key }

// ReplicaUp brings a replica that takes Slots batches at a time of at most MaxBatch tasks; less than 1 counts as 1.
type ReplicaUp struct {
	Name            string
	Slots, MaxBatch int
	Revision        uint64 // of the function's spec that it was started from
}

// ReplicaDrain lets a replica finish what it has and gives it nothing new, but for tasks of requests that have begun on its
// revision and have no other replica to go to. [Idle] follows.
type ReplicaDrain struct{ Name string }

// ReplicaDown ends a replica; its tasks are answered [task.ReplicaLost] with the cause.
type ReplicaDown struct{ Name, Cause string }

// Result is a replica's answer to one call of a batch, good or bad. The Core completes Reply and keeps it no longer than
// its Step.
type Result struct {
	Replica string
	Batch   uint64
	Call    int // index into the batch
	Reply   *task.Reply
}

// Credit changes how many batches a replica takes at a time.
type Credit struct {
	Replica string
	Slots   int
}

// Deployed says which revision of the function's spec is wanted from now on. Tasks that must have another one end when its last
// replica is gone.
type Deployed struct{ Revision uint64 }

// Fail answers what waits, and not what runs, [task.Unavailable] with the cause: no replica can be had for it.
type Fail struct{ Cause string }

// Tick says that time has passed: see [Wake].
type Tick struct{}

// Close ends the function: what waits or runs is answered [task.Unavailable] with the cause, and so is what comes later.
type Close struct{ Cause string }

func (Submit) event()       {}
func (Cancel) event()       {}
func (ReplicaUp) event()    {}
func (ReplicaDrain) event() {}
func (ReplicaDown) event()  {}
func (Result) event()       {}
func (Credit) event()       {}
func (Deployed) event()     {}
func (Fail) event()         {}
func (Tick) event()         {}
func (Close) event()        {}

// Effect is something that the Core wants done: one of [Send], [CancelCall], [Reply], [Idle], [Evict], [Exhausted],
// [Wanted] and [Wake]. Those that name a replica are carried out in order.
type Effect interface{ effect() }

// Send gives a replica a batch. Its number is unique within the function; calls are numbered by their place in Tasks.
type Send struct {
	Replica string
	Batch   uint64
	Tasks   []*task.Task
}

// CancelCall tells a replica that the call's answer will not be read. The slot stays taken until it answers.
type CancelCall struct {
	Replica string
	Batch   uint64
	Call    int
}

// Reply ends an attempt of a task.
type Reply struct {
	To    string
	Reply *task.Reply
}

// Idle says that a draining replica has nothing left. The Core has forgotten it.
type Idle struct{ Replica string }

// Evict says that a replica broke its side of the protocol. The Core has forgotten it and answered its tasks.
type Evict struct{ Replica, Cause string }

// Exhausted says that a replica answered a call with [task.OutOfMemory]. It drains, and gets not even tasks of requests that have
// begun on its revision; once for each replica.
type Exhausted struct{ Replica, Cause string }

// Wanted says that more replicas would help: a task came, or a replica was lost, and more tasks wait than the replicas that
// are left take at a time; none, when there is none.
type Wanted struct{}

// Wake asks for a [Tick] at At. It replaces an earlier Wake, which asked for a later one.
type Wake struct{ At time.Time }

func (Send) effect()       {}
func (CancelCall) effect() {}
func (Reply) effect()      {}
func (Idle) effect()       {}
func (Evict) effect()      {}
func (Exhausted) effect()  {}
func (Wanted) effect()     {}
func (Wake) effect()       {}
