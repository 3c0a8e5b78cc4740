package task

// Blame says how likely a task caused the loss of its replica (see [ReplicaLost]).
type Blame uint8

// The kinds of blame.
const (
	BlameNone   Blame = iota // no replica ended; the replica could not run the task
	BlameShared              // the task did not cause the end; see [EndShared]
	// The replica also had other tasks, and any of them may be the cause.
	BlameCompany
	// The replica had only this task, but why it ended is unclear; see [EndUnclear].
	BlameUnclear
	// The replica had only this task and ended by itself, so the task is the cause.
	BlameAlone
)
