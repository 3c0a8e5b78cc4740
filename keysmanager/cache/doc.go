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
// that replicas map, or a worker. What K names is the shell's matter. Another revision, or another
// form of the same parameters, has another name. An entry is, one after the other:
//
//   - empty: orders wait for its parameters, or its latest load failed;
//   - loading: its load is expected to take some bytes;
//   - ready: replicas start from it. Children may be parked on devices beside it;
//   - stale: it was invalidated. No order starts from it any more. It ends with its last replica.
//
// An entry is busy while it loads, an order holds it, or replicas run from it. Otherwise it is
// idle. The spare child of a zygote does not count: it ends with its zygote. Pre-packed files are
// on a disk, not in memory, so they are no entries.
//
// # Rules
//
//   - No load takes a node above [Threshold] of any of its bounds. Idle entries make room for a
//     load that an order waits for. If that is not enough, the load is refused and nothing is
//     evicted.
//   - Above Threshold, idle entries are evicted until at most 80 % of each bound are in use. If
//     there are too few of them, eviction goes on with those that become idle.
//   - Least recently used entries go first, and those of key stages last. An entry is used when an
//     order takes hold of it. Busy entries stay.
//   - Parked children go before any entry.
//   - Ahead of need, parameters are loaded and children parked only into free memory. Parameters of
//     a key stage may also take the place of idle entries of others. For ten seconds after memory
//     was short, nothing is done ahead of need.
//   - An entry that no function uses any more ends as soon as it is idle. A worker ends when it has
//     been idle for a while.
//   - A load that failed is not tried again before a back-off of 0.5 s has passed, which doubles
//     with each further failure to at most 30 s. Parameters that had loaded are loaded again at
//     once; if they keep ending within ten seconds, after at most 4 s.
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
// that depend on it. So the core counts only what no measurement shows yet: loads under way.
package cache
