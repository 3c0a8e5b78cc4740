// Package baseline has autoscalers by other authors, to compare ours with. Each is a plan.Allocator
// that follows its published rules. Its Config has the settings that its authors leave open; a zero
// field means the default.
//
// [Static] and [Oracle] are the two ends of the scale: Static never reacts, and Oracle knows the
// future load. [HPA] and [KPA] are what clusters use today. The others come from papers. Each file
// names its source. It lists the signals of a plan.Function that replace those of the source, and
// other differences.
//
// All these allocators are pure, as package autoscaler is, and keep counts within a function's
// bounds. Their memories can be encoded, so that recorded decisions can be replayed.
package baseline
