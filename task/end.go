package task

// Death is the end of a replica that may leave tasks unanswered.
type Death struct {
	Cause string // such as "killed by SIGKILL"
	End   End
	Busy  bool // the replica had unanswered calls, as far as the reporter knows
}

// End says how a replica ended. It is text because nodes report it over the network. Unknown text
// counts as EndUnclear.
type End string

// The ends of a replica.
const (
	// EndUnclear means that it is unknown whether one of the replica's tasks is the cause: the
	// replica got SIGKILL below its memory limit, it was a thread of a worker that ended, or its
	// connection closed without a reported cause.
	EndUnclear End = ""
	// EndItself means that the process exited, crashed, exceeded its memory limit or broke the
	// protocol. One of its tasks may be the cause.
	EndItself End = "itself"
	// EndShared means that its zygote, warden or node ended, or that the platform ended it. None of
	// its tasks is the cause.
	EndShared End = "shared"
)
