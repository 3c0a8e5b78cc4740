// Package keysmanager starts and stops the replicas of one node, and keeps parameters warm for
// them: QUART's KeysManager.
//
// A function with a model has one zygote per (namespace, image digest, model). A zygote is a
// process of the function's own binary. It has loaded the parameters and forks replicas of itself,
// which share them copy-on-write. [Manager.Start] forks from the zygote, and loads it first if it
// is not there. A function without a model has an ordinary process per replica. A stage in Python
// always has a zygote, because a fork saves its imports (docs/adr/0031).
//
// Functions in Python may also share a worker: a process on a device or the CPU whose threads are
// their replicas. The zygote of a key stage has children wait on devices, ready except for
// parameters (docs/adr/0033).
//
// Zygotes without replicas stay as a cache until more than 85 % of the node's memory is in use. The
// bound is the machine's memory, the cgroup's, or the configured share, whichever leaves least
// room. Then the least recently used zygotes are evicted, key stages last. A zygote that loads,
// forks or has replicas is never evicted, and a load that cannot fit is refused. Parameters that a
// redeploy or [Manager.Invalidate] has replaced serve the replicas that already run, and are freed
// with the last of them. A crashed zygote is loaded again on demand, after a back-off; its replicas
// are reported lost.
//
// The warden (package warden) holds the processes, their descriptors, and a description of each
// process. If the warden is a process of its own, they outlive the Manager: [Manager.Detach] leaves
// them running, as the Manager's death does, and the next Manager adopts them in [New]. A warden
// inside this process ends with it, and so do all its processes.
//
// The [Manager] has parts. Each has a comment that says what guards it (docs/adr/0077). The store
// knows which parameters are in memory and which replicas there are. The loader loads parameters.
// The starter starts processes. The parker parks children on devices. The type ahead loads
// parameters ahead of need. Package cache decides what stays in memory, package zygote speaks with
// zygotes, and package resources tracks what processes hold.
package keysmanager
