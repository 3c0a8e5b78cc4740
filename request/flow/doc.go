// Package flow is the coordinator. The process that accepted a request runs it through its
// pipeline's graph.
//
// [Core] is a state machine without clock, goroutines or I/O. [Core.Step] takes the time and an
// [Event] and returns the [Effect]s to carry out. So a simulator runs the same code as production.
// Core handles deadlines, attempts, cancellation, fan-out, one call per item (each, also of no
// items), and joins. A join is a set of parts, so a duplicate changes nothing. Before a request's
// first task, Core predicts its wait and refuses it if it cannot be done in time.
//
// [Coordinator] is the shell: sharded cores behind mutexes, a [Bus] that carries tasks out and
// replies in, and a caller that waits in [Coordinator.Invoke].
//
// Guarantees:
//
//   - Each request ends exactly once, by its deadline at the latest.
//   - If a stage has several calls in a request, all their answers come from one revision of its
//     function.
//   - A call is tried again only if its replica was lost or out of memory, and only if the stage is
//     idempotent.
//   - A call has three attempts. An attempt does not count if the call did not cause the loss, or
//     if other calls on the replica may have caused it.
//   - A call that may have ended its replica runs alone from then on. If a second replica ends
//     under it, its request ends with 502.
//   - A request ends with 429 or 503, which invite a retry, only if no stage that is not idempotent
//     may have run.
package flow
