// Package flow is the coordinator. The process that accepted a request runs it through its
// pipeline's graph.
//
// [Core] is a state machine without clock, goroutines or I/O. [Core.Step] takes the time and an
// [Event] and returns the [Effect]s to carry out. So a simulator runs the same code as production.
// Core handles deadlines, attempts, cancellation, fan-out, joins, and stages with one call per item
// (each), even if there are no items. A join is a set of parts, so a duplicate part changes
// nothing. Before a request's first task, Core predicts when the request would be done, and refuses
// it if that is too late.
//
// [Coordinator] is the shell. It distributes requests over several Cores, each with a mutex. A
// [Bus] carries tasks out and replies in. A caller waits in [Coordinator.Invoke].
//
// Guarantees:
//
//   - Each request ends exactly once, by its deadline at the latest.
//   - If a stage has several calls in a request, all their answers come from one revision of the
//     stage's function.
//   - A call is tried again only if its replica was lost or out of memory, or if its revision has
//     no replica left and no answer of that revision was used. If the stage is not idempotent, the
//     call is tried again only if no replica got its task.
//   - A call has three attempts. An attempt does not count if the call did not cause the loss, or
//     if other calls on the replica may have caused it.
//   - A call that may have ended its replica runs alone from then on. If another replica then ends
//     by itself under the same call, the request ends with 502.
//   - The statuses 429 and 503 invite a retry. A request ends with them only if all stages that may
//     have run are idempotent.
package flow
