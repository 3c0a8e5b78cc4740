// Package control is the loop that controls the cluster: observe, allocate, place, warm, validate,
// apply.
//
// A [Loop] ticks every second. When it is poked, for example to wake a function from zero, it ticks
// within milliseconds. The decision of a tick depends only on the plan.Snapshot and on the memory
// that policies returned with the last applied plan. Package policy runs the policies, which are
// chosen by name.
//
//	Observer ──Snapshot──▶ allocate, correct (per domain) ─▶ share ─▶ place ─▶ warm
//	                                       Applier ◀── Validate ◀──Plan──────────┘
//
// A [Recorder] writes each decision to a file. [ReplayRecord] makes the recorded decisions again.
//
// A domain is a set of pipelines that share functions. If a policy fails or panics in a domain,
// only the functions of that domain keep their replicas as they are.
package control
