// Package policy makes one decision for a cluster: it runs the chosen policy of each level in
// order. The input is a [plan.Snapshot] and the memory; the result is a [plan.Plan] and the new
// memory.
//
//	set, err := policy.Names{}.Choose() // the defaults
//	p, memory, held, err := set.Decide(snapshot, memory)
//
// A decision is pure, so that production, the simulator and a replay run the same code. Package
// control decides for a running cluster, and package sim for a simulated one in virtual time.
package policy
