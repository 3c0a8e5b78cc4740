// Package keysmanager starts and stops the replicas of one node, and keeps parameters in memory for
// them. It is QUART's KeysManager.
//
// # How replicas start
//
// A function with a model has a zygote. Functions share a zygote if they agree in namespace, image,
// model, network and secrets folder. A zygote is a process of the function's own binary. It has
// loaded the parameters and forks replicas of itself, which share the parameters copy-on-write.
// [Manager.Start] loads the zygote if it is not in memory, and forks a replica from it. A function
// without a model has an ordinary process per replica. A stage in Python always has a zygote,
// because a fork saves its imports (docs/adr/0031).
//
// Functions in Python may also share a worker: a process on a device or the CPU whose threads are
// their replicas. Children of a key stage's zygote may be parked on devices: they wait there and
// lack only their parameters (docs/adr/0033).
//
// # What stays in memory
//
// Zygotes without replicas stay in memory until more than 85 % of a bound is in use. The bounds are
// the machine's memory, the cgroup's, and the configured share. Then the least recently used
// zygotes are evicted, and zygotes of key stages last. A zygote that loads, forks or has replicas
// is never evicted. A load that cannot fit is refused.
//
// A redeploy or [Manager.Invalidate] replaces parameters. The old parameters serve the replicas
// that already run, and are freed with the last of them. When a zygote crashes, its replicas are
// reported lost. The next order loads the parameters again, after a back-off if the zygote keeps
// crashing.
//
// # What outlives the Manager
//
// The warden (package warden) holds the processes, their descriptors, and a description of each
// process. If the warden is a separate process, all of these outlive a Manager that has died or
// called [Manager.Detach]. The next Manager adopts them in [New]. If the warden is in this process,
// it ends with this process, and so do all processes that it holds.
//
// # Parts
//
// The [Manager] has these parts. The comment of each part says what guards it (docs/adr/0077).
//
//   - The store knows which parameters are in memory and which replicas there are.
//   - The loader loads parameters.
//   - The starter starts processes.
//   - The parker parks children on devices.
//   - The type ahead loads parameters ahead of need.
//
// Package cache decides what stays in memory, package zygote speaks with zygotes, and package
// resources tracks what processes hold.
package keysmanager
