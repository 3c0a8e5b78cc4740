// Package control is the ticker that steers the cluster: observe, allocate, place, warm, validate, apply.
//
// A [Loop] ticks every second, and within milliseconds when it is poked, which is how a function wakes from zero. What it
// decides is a function of the plan.Snapshot and of what was remembered of the last applied plan; the policies are chosen by
// name and run by package policy.
//
//	Observer ──Snapshot──▶ allocate, correct (a domain at a time) ─▶ share ─▶ place ─▶ warm ─▶ Plan ─▶ Validate ──▶ Applier
//
// A [Recorder] writes each decision to a file, which [ReplayRecord] decides again.
//
// A policy that fails or panics in one domain holds that domain where it is and no other.
package control
