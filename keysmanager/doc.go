// Package keysmanager starts and stops the replicas of one node, and keeps parameters warm for
// them: QUART's KeysManager.
//
// A function with a model has a zygote, one for each (namespace, image digest, model): a process of
// the function's own binary that has loaded the parameters and forks replicas of itself, which
// share them copy-on-write. [Manager.Start] forks from it, and loads it first when it is not there.
// A function without a model has an ordinary process per replica. A stage in Python has a zygote in
// any case: its imports are what a fork saves (docs/adr/0031).
//
// Functions in Python may also share a worker, a process whose threads are their replicas, on a
// device or the CPU; and a key stage's zygote has children wait on devices, ready but for
// parameters (docs/adr/0033).
//
// Zygotes without replicas stay as a cache until more than 85 % of the node's memory is in use: of
// the machine's, the cgroup's, or the share that it was given, whichever leaves least. Then the
// least recently used go, key stages last. One that loads, forks or has replicas is never evicted,
// and a load that cannot fit is refused. Parameters that a redeploy or [Manager.Invalidate] has
// replaced serve the replicas that they have, and go with the last of them. A crashed zygote is
// loaded again on demand, after a back-off; its replicas are reported lost.
//
// Processes and their descriptors are the warden's (package warden), with a description of each.
// When that is in a process of its own, they outlive the Manager: [Manager.Detach] leaves them, as
// its death does, and the next Manager adopts them in [New]. A warden inside this process ends with
// it, and all its processes.
//
// The [Manager] has parts, each with a comment that says what guards it (docs/adr/0077): the store
// has what is in memory and which replicas there are; the loader loads parameters; the starter
// starts processes; the parker has children parked on devices; ahead loads ahead of need. Package
// cache decides what stays in memory, package zygote speaks with zygotes, and package resources has
// what processes hold.
package keysmanager
