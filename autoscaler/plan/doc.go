// Package plan defines the data of the control loop. A [Snapshot] is all that a policy may know
// about the cluster at one instant. A [Plan] is the wanted state of the cluster. The level
// interfaces ([Allocator], [Corrector], [Sharer], [Placer], [Warmer]) are the steps from a Snapshot
// to a Plan, in this order.
//
// Each level is decided once and sees only the decisions of earlier levels. Policies are functions
// of their arguments. They do no I/O, use no clock but Snapshot.At, and no randomness but a seed in
// their memory. So production, simulator and replay run the same code. Package plantest has the
// suite that every policy must pass.
//
// A Plan is the wanted state, not a list of steps. Applying it is idempotent and checks each
// function's revision again, because the cluster may have changed since the Snapshot.
package plan
