// Package keysmanager starts and stops the replicas of one node, and keeps parameters in memory for
// them. It is QUART's KeysManager.
//
// A function with a model has a zygote: a process of the function's own binary that has loaded the
// parameters and forks replicas of itself, which share the parameters copy-on-write. Functions
// share a zygote if they agree in namespace, image digest, model, network and secrets folder.
// [Manager.Start] forks from the zygote. If the zygote is not in memory, Start loads it first. A
// function without a model has an ordinary process per replica. A stage in Python always has a
// zygote, because a fork saves the time of its imports (docs/adr/0031).
//
// Functions in Python may also share a worker: a process on a device or the CPU whose threads are
// their replicas. The zygote of a key stage in Python has children that wait on devices, ready
// except for parameters (docs/adr/0033).
//
// Zygotes without replicas stay in memory until more than 85 % of the node's memory is in use. The
// node's memory is that of the machine, of the cgroup, or of the configured share, whichever leaves
// least room. Then the least recently used zygotes are evicted, and key stages last. A zygote that
// loads, forks or has replicas is never evicted, and a load that cannot fit is refused.
//
// A redeploy or [Manager.Invalidate] replaces parameters. The old ones serve the replicas that
// already run, and are freed with the last of these replicas. If a zygote crashes, its replicas are
// reported lost. The next order loads it again, after a back-off if zygotes keep ending soon.
//
// The warden (package warden) holds the processes, their descriptors, and a description of each
// process. If the warden is a process of its own, it keeps them when the Manager dies or calls
// [Manager.Detach], and the next Manager adopts them in [New]. If the warden is inside this
// process, the node's processes end with this process.
//
// The [Manager] has parts. The comment of each part says what guards it (docs/adr/0077):
//
//   - store knows which parameters are in memory and which replicas there are
//   - loader loads parameters
//   - starter starts processes
//   - parker parks children on devices
//   - ahead loads parameters ahead of need
//
// Package cache decides what stays in memory, package zygote speaks with zygotes, and package
// resources tracks what processes hold.
package keysmanager
