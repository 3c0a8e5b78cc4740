// Package dispatch owns the lines of functions. Each function has one dispatcher. It keeps all
// waiting tasks in memory, orders them, routes the head to a replica with a free slot, and forms a
// batch when a slot becomes free.
//
// [Core] is the dispatcher of one function as a state machine. [Core.Step] takes the time and an
// [Event] and returns the [Effect]s to carry out. It has no clock, no goroutine and no I/O, so a
// simulator runs the same code as production. Policies are behind task.Orderer, task.Router and
// task.Batcher; the defaults are [FIFO], [LeastLoaded] and [Fill].
//
// [Shell] runs one Core per function. Tasks come from a [Bus], replicas are sockets that speak
// package wire, and load goes to admission ([Shell.Load]) and control ([Shell.Signals]).
//
//	bus ── Submit, Cancel ──▶ ┌──────┐ ── Send, CancelCall ──▶ outbox ──▶ replica's socket
//	reader ── Result, … ────▶ │ Core │ ── Reply ─────────────▶ bus
//	timer ── Tick ──────────▶ └──────┘ ── Wake, Wanted, … ───▶ shell
//
// Each function has a mutex, held for Step alone, in the goroutine that has the event: the
// bus's goroutine for tasks, and one reader per replica for answers. Frames are written after the
// mutex is released, in the order of the decisions, and never by a goroutine that could have to
// wait for the replica (see outbox).
//
// # Guarantees
//
//   - Each attempt of a submitted task gets exactly one reply.
//   - No replica has more batches than slots, whatever a policy says.
//   - A suspect, which is a task whose earlier replica ended, runs alone on a replica.
//   - If a request has several tasks for a function, they run on replicas of one revision.
//   - An expired task never takes a replica.
//   - Every wait is bounded. If a call is not answered long after it was canceled, its replica's
//     connection is closed.
package dispatch
