// Package policy is one decision on a cluster: the chosen policies of each level, in their order,
// from a [plan.Snapshot] and what was remembered to a [plan.Plan] and what is to be remembered.
//
//	set, err := policy.Names{}.Choose() // the defaults
//	p, memory, held, err := set.Decide(snapshot, memory)
//
// It is pure, so that production, the simulator and a replay of a recording run the same: package
// control ticks it against a cluster, package sim against virtual time.
package policy
