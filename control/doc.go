// Package control is the loop that controls the cluster: observe, allocate, place, warm, validate,
// apply.
//
// A [Loop] ticks every second, and within milliseconds when it is poked, which is how a function
// wakes from zero. Its decision is a function of the plan.Snapshot and of the memory of the last
// applied plan. The policies are chosen by name and run by package policy.
//
//	Observer ──Snapshot──▶ allocate, correct (per domain) ─▶ share ─▶ place ─▶ warm
//	                                       Applier ◀── Validate ◀──Plan──────────┘
//
// A [Recorder] writes each decision to a file. [ReplayRecord] makes the recorded decisions again.
//
// If a policy fails or panics in a domain, only that domain keeps its replicas as they are.
package control
