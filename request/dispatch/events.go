package dispatch

import (
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// Event is an input of the core: one of [Submit], [Expect], [Cancel], [Leave], [Ask], [ReplicaUp],
// [ReplicaDrain], [ReplicaDown], [Result], [Credit], [Deployed], [Removed], [NoReplica], [Fail],
// [Routed], [Batched], [Tick] and [Close].
//
// A Lane in an event or effect is the name of the lane's function. In an event, an empty Lane means
// the lane of the stage's own function. Names of replicas are unique within the stage, so events
// about a replica need no lane.
type Event interface{ event() }

// Submit adds a task. The Core keeps the task until its end and sets its Arrived.
type Submit struct{ Task *task.Task }

// Expect announces that a request in an earlier stage of a pipeline will send a task. If no replica
// takes tasks, the Core asks for one with [Wanted].
type Expect struct{}

// Cancel reports that nobody waits for the task any more.
type Cancel struct{ Key task.Key }

// Leave reports that a request with several tasks will send no more of them. So the Core need not
// keep replicas of the tasks' revision for the request.
type Leave struct{ Request string }

// Ask asks whether the Core has a task. If the task has ended or has never come, a message about it
// was lost, and the Core replies with [task.ReplicaLost]. Otherwise its end replies.
type Ask struct {
	Key     task.Key
	ReplyTo string
}

// ReplicaUp adds a replica that takes up to Slots batches at a time, each of at most MaxBatch
// tasks. Values below 1 count as 1.
type ReplicaUp struct {
	Lane            string
	Name            string
	Slots, MaxBatch int
	Revision        uint64 // revision of the spec that the replica was started from
	// The function's exec_timeout; 0: a call may run until its deadline.
	Timeout time.Duration
}

// ReplicaDrain lets a replica finish its calls. The replica gets no new tasks, except tasks of
// requests that began on its revision if all replicas of that revision drain. [Idle] follows once
// the replica has no calls, and these requests have left or their deadlines have passed.
type ReplicaDrain struct{ Name string }

// ReplicaDown removes a replica. Its tasks are answered with [task.ReplicaLost] and the cause.
type ReplicaDown struct {
	Name, Cause string
	End         task.End
}

// Result is a replica's answer to one call of a batch, with or without an error. The Core completes
// Reply and does not keep it after the Step.
type Result struct {
	Replica string
	Batch   uint64
	Call    int // index into the batch
	Reply   *task.Reply
}

// Credit sets how many batches a replica takes at a time.
type Credit struct {
	Replica string
	Slots   int
}

// Deployed reports which revision of a lane's function is deployed now. If there is no such lane,
// it is added. Requests that began on another revision may still need it. If that revision has no
// replica left, the Core asks for one with [Revive], and the tasks wait for it.
type Deployed struct {
	Lane       string
	Revision   uint64 // of the function's spec
	MaxLength  int    // of inputs, in the unit of task.Task.Length; 0: any
	QueueLimit int    // largest number of tasks that wait in the lane; 0: as before
	// Batch is the largest batch that may ever be sent; 0: as large as the replicas take. With
	// AutoBatch, batches have one task until a plan says otherwise.
	Batch     int
	AutoBatch bool
	// BatchWait is how long a task may wait for its batch to fill; 0: not at all.
	BatchWait time.Duration
}

// Removed reports that a lane's function was removed. The lane gets no more tasks, and its waiting
// tasks are routed again. Its running tasks go on until its replicas drain or are lost; then the
// lane has [Gone]. Tasks that invoked the function by its own name are answered with
// [task.Unavailable] and the cause. If no other lane is left, Removed does what [Close] does.
type Removed struct{ Lane, Cause string }

// NoReplica reports that no replica can be started for a [Revive]. The tasks that wait for the
// revision are answered with [task.Redeployed].
type NoReplica struct {
	Lane     string
	Revision uint64
	Cause    string
}

// Fail reports that no replica of Revision can be started. The lane's waiting tasks go to its
// backups. If there are none, they are answered with [task.Unavailable] and Cause, except tasks
// that need another revision (see [NoReplica]). Running tasks go on. If another revision has been
// deployed since, Fail does nothing.
type Fail struct {
	Lane     string
	Revision uint64
	Cause    string
}

// Routed sets the routing table of a stage with several lanes, and the order of its lines.
type Routed struct {
	Table *plan.Table // nil: the stage has one lane
	Rank  string      // as in plan.Want
}

// Batched sets the largest batch of a lane, as a plan wants it. It holds from each replica's next
// batch on.
type Batched struct {
	Lane string
	Most int // at least 1
}

// Tick reports that time has passed; see [Wake].
type Tick struct{}

// Close ends the function. Waiting, running and later tasks are answered with [task.Unavailable]
// and the cause.
type Close struct{ Cause string }

func (Submit) event()       {}
func (Expect) event()       {}
func (Cancel) event()       {}
func (Leave) event()        {}
func (Ask) event()          {}
func (ReplicaUp) event()    {}
func (ReplicaDrain) event() {}
func (ReplicaDown) event()  {}
func (Result) event()       {}
func (Credit) event()       {}
func (Deployed) event()     {}
func (Removed) event()      {}
func (NoReplica) event()    {}
func (Fail) event()         {}
func (Routed) event()       {}
func (Batched) event()      {}
func (Tick) event()         {}
func (Close) event()        {}

// Effect is an output of the core: one of [Send], [CancelCall], [Reply], [Idle], [Evict],
// [Exhausted], [Stuck], [Halved], [Revive], [Wanted], [Unknown], [Gone] and [Wake]. The effects for
// one replica must be carried out in order, except that a Send may come after later effects
// that are not about its batch.
type Effect interface{ effect() }

// Send gives a replica a batch. Batch numbers are unique within the function. A call's number is
// its index in Tasks.
type Send struct {
	Replica string
	Batch   uint64
	Tasks   []*task.Task
}

// CancelCall tells a replica that nobody will read the call's answer. The slot stays taken until
// the replica answers.
type CancelCall struct {
	Replica string
	Batch   uint64
	Call    int
}

// Reply ends an attempt of a task.
type Reply struct {
	To    string
	Reply *task.Reply
	Lane  string // the lane in which the task was last; empty: none
	Last  bool   // copied from the task
}

// Idle reports that a draining replica has no calls left, or that a stuck one has only calls that
// are over. The Core has forgotten the replica.
type Idle struct{ Replica string }

// Evict reports that a replica broke the protocol. The Core has forgotten it and answered its
// tasks.
type Evict struct{ Replica, Cause string }

// Exhausted reports that a replica answered a call with [task.OutOfMemory]. The replica drains and
// gets no more tasks, not even of requests that began on its revision. The Core returns Exhausted
// once per replica.
type Exhausted struct{ Replica, Cause string }

// Stuck reports that a handler goes on although its call is over: the call ran beyond exec_timeout
// or its deadline, or was canceled. The replica drains and gets no more tasks, not even of requests
// that began on its revision. The Core returns Stuck once per replica. [Idle] follows when all
// other calls of the replica have ended, at their limits at the latest.
type Stuck struct{ Replica, Cause string }

// Halved reports that replicas ended under batches of Size calls, and not under these calls alone.
// So batches of the lane have at most Most calls now.
type Halved struct {
	Lane       string
	Size, Most int
}

// Revive asks for a replica of a revision that is no longer deployed and has no replica left. Tasks
// wait for it because their requests began on this revision. The Core does not repeat a Revive
// until a replica of the revision has come and gone, or [NoReplica] has arrived.
type Revive struct {
	Lane     string
	Revision uint64
}

// Wanted asks for more replicas of a lane, for one of three reasons:
//
//   - A task came or a replica was lost, and more tasks wait than the replicas have slots for.
//   - A task is expected, and there is no replica.
//   - A task came that went to a backup, because this lane cannot run it.
type Wanted struct{ Lane string }

// Unknown reports that a routing table names lanes that the stage does not have. The Core follows
// the rest of the table. It returns Unknown once per version of the table.
type Unknown struct {
	Version uint64   // of the table
	Lanes   []string // sorted
}

// Gone reports that a removed lane has no replicas left. The Core has forgotten it.
type Gone struct{ Lane string }

// Wake asks for a [Tick] at At. It replaces an earlier Wake, which had a later time.
type Wake struct{ At time.Time }

func (Send) effect()       {}
func (CancelCall) effect() {}
func (Reply) effect()      {}
func (Idle) effect()       {}
func (Evict) effect()      {}
func (Exhausted) effect()  {}
func (Stuck) effect()      {}
func (Halved) effect()     {}
func (Revive) effect()     {}
func (Wanted) effect()     {}
func (Unknown) effect()    {}
func (Gone) effect()       {}
func (Wake) effect()       {}
