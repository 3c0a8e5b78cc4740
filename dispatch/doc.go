// Package dispatch owns the lines of functions: each function has one dispatcher, which keeps everything that waits in
// memory, orders it, routes its head to a replica with a free slot and batches when a slot frees up.
//
// [Core] is the dispatcher of one function as a state machine: [Core.Step] takes the time and an [Event] and returns the
// [Effect]s that the world should see. It has no clock, no goroutine and no I/O, so that a simulator runs the very code
// that production runs. What it decides by policy lies behind task.Orderer, task.Router and task.Batcher; [FIFO],
// [LeastLoaded] and [Fill] are the ones used when nothing else is asked for.
//
// [Shell] runs one Core a function: tasks come from a [Bus], replicas are the far ends of sockets that speak package wire,
// and signals of load go to admission ([Shell.Load]) and to control ([Shell.Signals]).
//
//	bus ── Submit, Cancel ──▶ ┌──────┐ ── Send, CancelCall ──▶ outbox ──▶ replica's socket
//	reader ── Result, … ────▶ │ Core │ ── Reply ─────────────▶ bus
//	timer ── Tick ──────────▶ └──────┘ ── Wake, Wanted, … ───▶ shell
//
// A mutex a function is held for Step alone, in the goroutine that brought the event: the bus's own
// for tasks, one reader a replica for answers. Frames are written after the lock is released, in
// the order of the decisions, and never by a goroutine that could have to wait for the replica: see
// outbox.
//
// # What is promised
//
// Each attempt of a task that is submitted gets exactly one reply. No replica has more batches than
// slots, whatever a policy says. A suspect, which is a task whose earlier replica ended, runs alone
// on a replica. Tasks that a request has together run on replicas of one revision. A task that has
// expired costs no replica. Every wait has a bound: a call that is not answered long after it was
// canceled costs its replica the connection.
package dispatch
