package task

// Death describes the end of a replica, which may leave tasks unanswered.
type Death struct {
	Cause string // for example "killed by SIGKILL"
	End   End
	Busy  bool // the replica had unanswered calls, as far as the reporter knows
	// The lack of device memory that ended the replica; nil: the end has another cause.
	Memory *MemoryError
}

// MemoryError means that a replica's devices have too little memory for the replica or for a call.
// Package wire makes it from what replicas write.
type MemoryError struct {
	Devices []string // UUIDs of the full devices; empty: unknown
	Text    string   // how much memory was wanted and free, in the replica's words
}

// Error returns the text.
func (e *MemoryError) Error() string { return e.Text }

// End says how a replica ended. It is a string because nodes send it over the network. Unknown
// values count as EndUnclear.
type End string

// The ends of a replica.
const (
	// EndUnclear means that it is unknown whether one of the replica's tasks is the cause. There
	// are three cases:
	//   - The replica got SIGKILL below its memory limit.
	//   - The replica was a thread of a worker that ended.
	//   - The replica's connection closed without a reported cause.
	EndUnclear End = ""
	// EndItself means that the process exited, crashed, exceeded its memory limit or broke the
	// protocol. One of its tasks may be the cause.
	EndItself End = "itself"
	// EndShared means that the replica's zygote, warden or node ended, or that the platform ended
	// the replica. None of its tasks is the cause.
	EndShared End = "shared"
)

// LostError means that an item of a task's input is lost with the node that kept it.
type LostError struct {
	Item string // blob of its reference
	Text string // names the node and the item
}

// Error returns the text.
func (e *LostError) Error() string { return e.Text }
