// Package cache decides which parameters a node keeps in memory.
//
// [Core] is the cache of one node as a state machine. [Core.Step] takes the time and an [Event],
// and returns the [Effect]s to carry out. It has no clock, no goroutine and no I/O, so the
// simulator runs the same code as production. Two shells call it: package keysmanager, with its
// mutex held, and package sim, for each node of a virtual cluster.
//
// # Entries
//
// An entry is one set of parameters in a form from which replicas start: a zygote, sealed memory
// that replicas map, or a worker. The shell chooses the type K of its name. Each revision of the
// parameters and each form has another name. An entry goes through these states:
//
//   - empty: orders wait for its parameters, or its latest load failed;
//   - loading: its parameters are being loaded, and their size is an estimate;
//   - ready: replicas start from it, and children of it may be parked on devices;
//   - stale: it was invalidated. No order starts from it any more. It ends with its last replica.
//
// An entry is busy while it loads, while an order holds it, or while replicas run from it.
// Otherwise it is idle. The spare child of a zygote does not keep the entry busy, because the child
// ends with the zygote. Pre-packed files are on a disk, so they are no entries.
//
// # Rules
//
//   - A load must not take the node above [Threshold] of any [Bound]. If an order waits for the
//     load, idle entries are evicted to make room. If evicting all of them would not be enough, the
//     load is refused and nothing is evicted.
//   - Above Threshold, idle entries are evicted until at most 80 % of each bound are in use. If
//     there are too few idle entries, entries that become idle later are evicted, too.
//   - The least recently used entry is evicted first, but entries of key stages come last. An entry
//     is used when an order begins to hold it. Busy entries are never evicted.
//   - Parked children are ended before any entry is evicted.
//   - Loads and parked children that no order waits for take only free memory, with one exception:
//     parameters of a key stage may replace idle entries of other stages. While memory is short,
//     and for ten seconds afterwards, nothing is loaded or parked ahead of need.
//   - An entry that no function uses any more ends as soon as it is idle. A worker ends when it has
//     been idle for a while.
//   - A failed load is tried again only after a back-off. It is 0.5 s after the first failure,
//     doubles with each further failure, and is 30 s at most.
//   - If a ready entry's process ends, its parameters are loaded again at once. If processes keep
//     ending within ten seconds of their loads, the next load waits for a back-off of at most 4 s.
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
// Sizes are in bytes. The shell measures memory, and passes the latest sample along with each event
// that depends on it. The core itself counts only loads under way, which no sample shows yet.
package cache
