// Package policy makes one decision for a cluster. It runs the chosen policies of each level in
// order. The input is a [plan.Snapshot] and the memory; the result is a [plan.Plan] and the new
// memory.
//
//	set, err := policy.Names{}.Choose() // the defaults
//	p, memory, held, err := set.Decide(snapshot, memory)
//
// It is pure, so that production, the simulator and a replay run the same code. Package control
// runs it against a cluster, and package sim in virtual time.
package policy
