// Package plan is the language of control: a [Snapshot] is all that a policy may know about the cluster at one instant, a
// [Plan] is what it wants the cluster to be, and the level interfaces ([Allocator], [Corrector], [Sharer], [Placer],
// [Warmer]) are the steps from one to the other.
//
// Each level is decided once and sees only what the levels above decided. Policies are functions of their arguments: no
// I/O, no clock but Snapshot.At, no randomness but a seed in their memory, so that production, simulator and replay run
// the same code. Package plantest has the suite that every policy passes.
//
// A Plan is the wanted state, not steps. Applying it is idempotent and re-checks each function's revision, because the
// world may have moved since the Snapshot.
package plan
