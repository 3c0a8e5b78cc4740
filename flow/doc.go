// Package flow is the coordinator: the process that accepted a request walks it through its
// pipeline's graph.
//
// [Core] is a state machine without clock, goroutines and I/O: [Core.Step] takes the time and an
// [Event] and returns the [Effect]s that the world should see, so that a simulator runs the very
// code that production runs. It knows deadlines, attempts, cancellation, fan-out, one call an item
// (each, also of nothing), and joins as sets of parts, so that a duplicate changes nothing. Before
// a request's first task it predicts the wait and refuses what cannot be done in time.
//
// [Coordinator] is the shell: shards of cores behind mutexes, tasks out over a [Bus], replies in,
// and a caller that waits in [Coordinator.Invoke].
//
// What is promised: each request ends exactly once, by its deadline at the latest. What several
// calls of a stage answer comes from one revision of its function. A call is tried again only when
// its replica was lost or out of memory, and only if the stage may run twice. It has three
// attempts. An attempt does not count if the call did not cause the loss, or if other calls on the
// replica may have caused it. A call that may have ended its replica runs alone from then on. If a
// second replica ends under it, its request ends with 502. A request ends with 429 or 503, for
// which it is made again, only while nothing has run that may not run twice.
package flow
