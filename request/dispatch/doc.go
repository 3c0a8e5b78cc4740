// Package dispatch owns the lines of functions. Each function has one dispatcher. It keeps all
// waiting tasks in memory and orders them. When a slot of a replica becomes free, the dispatcher
// fills it with a batch from the head of the line.
//
// [Core] is the dispatcher of one function as a state machine. [Core.Step] takes the time and an
// [Event] and returns the [Effect]s to carry out. It has no clock, no goroutine and no I/O, so a
// simulator runs the same code as production. Policies are behind task.Orderer, task.Router and
// task.Batcher; the defaults are [FIFO], [LeastLoaded] and [Fill].
//
// [Shell] runs one Core per function. Tasks come from a [Bus] or from coordinators in this process.
// Replicas are sockets that speak package wire. Admission reads a function's load ([Shell.Load]),
// and control its measurements ([Shell.Signals]).
//
//	bus ── Submit, Cancel ──▶ ┌──────┐ ── Send, CancelCall ──▶ outbox ──▶ replica's socket
//	reader ── Result, … ────▶ │ Core │ ── Reply ─────────────▶ bus
//	timer ── Tick ──────────▶ └──────┘ ── Wake, Wanted, … ───▶ shell
//
// Each function has a mutex. The goroutine that receives an event runs Step, and holds the mutex
// only meanwhile. It writes the frames for replicas after it has released the mutex, in the order
// of the Core's decisions. It never waits for a replica that does not read: each replica's outbox
// has its own goroutine for such writes.
//
// # Guarantees
//
//   - Each attempt of a submitted task gets exactly one reply.
//   - No replica has more batches than slots, whatever a policy decides.
//   - A suspect, which is a task whose earlier replica ended, runs alone on a replica.
//   - If a request has several tasks for a function, they run on replicas of one revision.
//   - An expired task never takes a replica.
//   - Every wait is bounded. If a handler goes on for too long after its call was canceled, its
//     replica gets no more tasks.
package dispatch
