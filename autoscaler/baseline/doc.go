// Package baseline has the autoscalers of others, to compare ours with. Each is a plan.Allocator
// after its published rules. Its Config has the settings that its authors leave open; zero fields
// mean the published defaults.
//
// [Static] and [Oracle] are the two ends of the scale: Static never reacts, and Oracle knows the
// future load. [HPA] and [KPA] are what clusters use today. The others come from papers. Each file
// names its source. It says which signal of a plan.Function replaces each signal of the source, and
// where it had to differ.
//
// All are pure, as package autoscaler is, and keep to a function's bounds. Their memories can be
// encoded, by function, so that recordings of their decisions can be replayed.
package baseline
