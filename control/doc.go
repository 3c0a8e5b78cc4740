// Package control is the loop that controls the cluster: observe, allocate, place, warm, validate,
// apply.
//
// A [Loop] ticks every second. When it is poked, for example to wake a function from zero, it ticks
// within milliseconds. The decision of a tick is a function of the plan.Snapshot and of the memory
// of the last applied plan. The policies are chosen by name and run by package policy.
//
//	Observer ──Snapshot──▶ allocate, correct (per domain) ─▶ share ─▶ place ─▶ warm
//	                                       Applier ◀── Validate ◀──Plan──────────┘
//
// A [Recorder] writes each decision to a file. [ReplayRecord] makes the recorded decisions again.
//
// If a policy fails or panics in a domain, only that domain keeps its replicas as they are.
package control
