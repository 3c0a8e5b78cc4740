package task

// Blame is what a [ReplicaLost] means for one of the replica's tasks.
type Blame uint8

// The kinds of blame.
const (
	BlameNone    Blame = iota // no replica ended, but a replica could not run the task
	BlameShared               // the task is not to blame, see [EndShared]
	BlameCompany              // the replica also had other tasks, and any of them may be to blame
	BlameUnclear              // the replica had only this task, but why it ended is unclear, see [EndUnclear]
	BlameAlone                // the replica had only this task and ended by itself: the task is to blame
)
