// Package dispatch owns the lines of stages. Each stage has one dispatcher, its owner. The owner
// keeps all waiting tasks in memory and orders them. When a slot of a replica becomes free, the
// owner fills it with a batch from the head of a line.
//
// A stage is served by its own function and by the function's variants. The owner has one [Lane]
// per function: a line of waiting tasks, and the replicas that take from it. The routing table of
// the plan chooses a task's lane when the task comes, and again when the table or the lanes change.
// A stage without variants has one lane. ADR 0086 has the rules.
//
// [Core] is the owner as a state machine. [Core.Step] takes the time and an [Event] and returns the
// [Effect]s to carry out. It has no clock, no goroutine and no I/O, so a simulator runs the same
// code as production. Policies are behind task.Orderer, task.Binder and task.Batcher; the defaults
// are [FIFO], [LeastLoaded] and [Fill].
//
// [Shell] runs one Core per stage. Tasks come from a [Bus] or from coordinators in this process.
// Replicas are sockets that speak package wire. Admission reads a function's load ([Shell.Load]),
// and control its measurements ([Shell.Signals]). Control publishes tables and ranks
// ([Shell.Publish]).
//
//	bus ── Submit, Cancel ──▶ ┌──────┐ ── Send, CancelCall ──▶ outbox ──▶ replica's socket
//	reader ── Result, … ────▶ │ Core │ ── Reply ─────────────▶ bus
//	plan ── Routed ─────────▶ │      │ ── Wake, Wanted, … ───▶ shell
//	timer ── Tick ──────────▶ └──────┘
//
// Each owner has a mutex. The goroutine that receives an event runs Step, and holds the mutex only
// meanwhile. It writes the frames for replicas after it has released the mutex, in the order of the
// Core's decisions. It never waits for a replica that does not read: each replica's outbox has its
// own goroutine for such writes. A batch that needs items of other nodes (ADR 0112) is written once
// the outbox has fetched them. Other frames of its replica do not wait for that.
//
// # Guarantees
//
//   - Each attempt of a submitted task gets exactly one reply.
//   - A task is in exactly one lane, or runs on one replica, or has ended.
//   - A held task blocks no other lane.
//   - No replica has more batches than slots, whatever a policy decides.
//   - A suspect, which is a task whose earlier replica ended, runs alone on a replica.
//   - If a request has several tasks for a function, they run on replicas of one revision.
//   - An expired task never takes a replica.
//   - No order starves a task (see [LeastSlack]; with fair, each application has its share).
//   - Every wait is bounded. If a handler goes on for too long after its call was canceled, its
//     replica gets no more tasks.
package dispatch
