package dispatch

import (
	"time"

	"github.com/stagecoach-serving/stagecoach/task"
)

// Event is something that happened to a function: one of [Submit], [Expect], [Cancel], [Leave],
// [ReplicaUp], [ReplicaDrain], [ReplicaDown], [Result], [Credit], [Deployed], [NoReplica], [Fail],
// [Tick] and [Close].
type Event interface{ event() }

// Submit brings a task. The Core keeps it until its end and sets its Arrived.
type Submit struct{ Task *task.Task }

// Expect says that a request in an earlier stage of a pipeline will send a task. If no replica takes
// tasks, the Core asks for one with [Wanted].
type Expect struct{}

// Cancel says that nobody waits for the task any more.
type Cancel struct{ Key task.Key }

// Leave says that a request with several tasks sends no more of them, so that no replica of their
// revision has to be kept for it.
type Leave struct{ Request string }

// ReplicaUp brings a replica that takes Slots batches at a time of at most MaxBatch tasks; less than 1 counts as 1.
type ReplicaUp struct {
	Name            string
	Slots, MaxBatch int
	Revision        uint64        // of the function's spec that it was started from
	Timeout         time.Duration // the longest time that a call may run, the function's exec_timeout; 0: until its deadline
}

// ReplicaDrain lets a replica finish its calls and gives it no new ones. The exception are tasks of
// requests that have begun on its revision, if no other replica can take them. [Idle] follows once
// these requests have left or their deadlines have passed.
type ReplicaDrain struct{ Name string }

// ReplicaDown ends a replica; its tasks are answered [task.ReplicaLost] with the cause.
type ReplicaDown struct {
	Name, Cause string
	End         task.End
}

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

// Deployed says which revision of the function's spec is wanted from now on. If the last replica of
// another revision is lost, the Core asks for a new one with [Revive], and the tasks that need the
// revision wait for it.
type Deployed struct{ Revision uint64 }

// NoReplica says that no replica can be started for a [Revive]. The tasks that wait for the
// revision are answered [task.Redeployed].
type NoReplica struct {
	Revision uint64
	Cause    string
}

// Fail answers what waits [task.Unavailable] with the cause, because no replica of a revision can be
// started. It does nothing if another revision has been deployed since. What runs goes on, and so does
// what must have another revision: see [NoReplica].
type Fail struct {
	Revision uint64
	Cause    string
}

// Tick says that time has passed: see [Wake].
type Tick struct{}

// Close ends the function: what waits or runs is answered [task.Unavailable] with the cause, and so is what comes later.
type Close struct{ Cause string }

func (Submit) event()       {}
func (Expect) event()       {}
func (Cancel) event()       {}
func (Leave) event()        {}
func (ReplicaUp) event()    {}
func (ReplicaDrain) event() {}
func (ReplicaDown) event()  {}
func (Result) event()       {}
func (Credit) event()       {}
func (Deployed) event()     {}
func (NoReplica) event()    {}
func (Fail) event()         {}
func (Tick) event()         {}
func (Close) event()        {}

// Effect is something that the Core wants done: one of [Send], [CancelCall], [Reply], [Idle], [Evict], [Exhausted], [Stuck],
// [Revive], [Wanted] and [Wake]. Those that name a replica are carried out in order.
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
	Last  bool // as the task's
}

// Idle says that a draining replica has no calls left, or that a stuck one has only calls that are
// over. The Core has forgotten the replica.
type Idle struct{ Replica string }

// Evict says that a replica broke its side of the protocol. The Core has forgotten it and answered its tasks.
type Evict struct{ Replica, Cause string }

// Exhausted says that a replica answered a call with [task.OutOfMemory]. It drains, and gets not even tasks of requests that have
// begun on its revision; once for each replica.
type Exhausted struct{ Replica, Cause string }

// Stuck says that a handler did not end after its call was over: the call ran beyond exec_timeout or
// its deadline, and was canceled. The replica drains, and gets not even tasks of requests that have
// begun on its revision. Stuck is sent once per replica. [Idle] follows when no other call runs on
// the replica; each of them ends at its limit.
type Stuck struct{ Replica, Cause string }

// Revive asks for a replica of a revision that is not the deployed one. Tasks wait for it because
// their requests have begun on this revision, and it has no replica any more. The Core sends one
// Revive per revision. It sends another one only after a replica has come and gone, or after
// [NoReplica].
type Revive struct{ Revision uint64 }

// Wanted says that more replicas would help, for one of two reasons:
//   - A task came, or a replica was lost, and more tasks wait than the remaining replicas take at a
//     time.
//   - A task is expected, and there is no replica.
type Wanted struct{}

// Wake asks for a [Tick] at At. It replaces an earlier Wake, which asked for a later one.
type Wake struct{ At time.Time }

func (Send) effect()       {}
func (CancelCall) effect() {}
func (Reply) effect()      {}
func (Idle) effect()       {}
func (Evict) effect()      {}
func (Exhausted) effect()  {}
func (Stuck) effect()      {}
func (Revive) effect()     {}
func (Wanted) effect()     {}
func (Wake) effect()       {}
