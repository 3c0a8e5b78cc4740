package provider

// The states of a function's deployed revision. A status begins with one of them.
const (
	StatusReady    = "ready"    // it has a replica that takes requests
	StatusUpdating = "updating" // it should have such a replica, and has none yet
	StatusFailing  = "failing"  // it cannot have the replicas that it should have
	StatusAsleep   = "asleep"   // it has no replicas until its next request
)
