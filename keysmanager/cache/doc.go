// Package cache decides which parameters a node keeps in memory.
//
// [Core] is the cache of one node as a state machine. [Core.Step] takes the time and an [Event] and
// returns the [Effect]s to carry out. It has no clock, no goroutine and no I/O, so a simulator runs
// the same code as production. Two shells call it: package keysmanager, with its mutex held, and
// package sim, for each node of a virtual cluster.
//
// # Entries
//
// An entry is one set of parameters in the form that replicas start from: a zygote, sealed memory
// that replicas map, or a worker. The shell chooses the names of entries (the type K). It gives
// each revision and each form of the same parameters a separate name. An entry is in one of these
// states:
//
//   - empty: orders wait for its parameters, its latest load failed, or its process ended;
//   - loading: its load is under way, and the expected size of its parameters is known;
//   - ready: replicas start from it, and children may be parked on devices beside it;
//   - stale: it was invalidated. No order starts from it any more. It ends with its last replica.
//
// An entry is busy while it loads, an order holds it, or replicas run from it. Otherwise it is
// idle. A zygote's spare child does not make the entry busy, because the child ends with its
// zygote. Pre-packed files are on a disk, not in memory, so they are not entries.
//
// # Rules
//
//   - A load is never begun if more than [Threshold] of a bound would then be in use. If an order
//     waits for the load, idle entries are evicted to make room for it. If that is not enough, the
//     load is refused and nothing is evicted.
//   - If more than Threshold of a bound is in use, idle entries are evicted until at most 80 % of
//     each bound is in use. If too few entries are idle, eviction continues as others become idle.
//   - The least recently used entries are evicted first, and entries of key stages last. An entry
//     counts as used when an order takes hold of it. Busy entries are never evicted.
//   - Parked children are ended before any entry is evicted.
//   - Ahead of need, loads and parked children may use only free memory. As an exception, a load
//     for a key stage may evict idle entries that do not belong to key stages. For ten seconds
//     after memory was short, nothing is done ahead of need.
//   - An entry that no function uses any more ends as soon as it is idle. A worker ends when it has
//     been idle for a while.
//   - After a failed load, the next load waits for a back-off of 0.5 s. The back-off doubles with
//     each further failure, to at most 30 s.
//   - If a process ends after a successful load, its parameters may be loaded again at once. If it
//     keeps ending within ten seconds of the load, there is a back-off of at most 4 s.
//
// The reasons are in docs/adr:
//
//   - 0022: what counts as memory in use, and the two shares;
//   - 0023: the forms of parameters;
//   - 0029 and 0033: spare children, parked children, workers;
//   - 0042 and 0047: what is loaded ahead of need;
//   - 0057: which failures count;
//   - 0078: one core for product and simulator.
//
// # Units
//
// Sizes are in bytes. The shell measures memory and passes the latest sample along with the events
// that depend on it. The core itself counts only loads under way, because no sample shows them yet.
package cache
