// Package baseline has autoscalers of others, to compare ours with: each a plan.Allocator after its published rules, with a Config of
// what its authors leave to be set. A Config's zero fields mean what they publish as defaults.
//
// [Static] and [Oracle] are the ends of the scale: one does nothing, the other knows what will come. [HPA] and [KPA] are what clusters
// have today; the rest are of papers. Each file names its source, says what signal of a plan.Function stands for each of its source's,
// and where it had to differ.
//
// They are pure, as package autoscaler is, and keep to the bounds of a function. What they remember can be encoded, by function, so that
// recordings of their decisions replay.
package baseline
