// Package keysmanager starts and stops the replicas of one node, and keeps parameters warm for them: QUART's KeysManager.
//
// A function with a model has a zygote, one for each (namespace, image digest, model): a process of the function's own
// binary that has loaded the parameters and forks replicas of itself, which share them copy-on-write. [Manager.Start] forks
// from it, and loads it first when it is not there. A function without a model is an ordinary process a replica.
//
// Zygotes without replicas stay as a cache until the memory that zygotes take passes a threshold; then the least recently
// used goes, key stages last. One that forks or has replicas is never evicted. A crashed zygote is loaded again on demand,
// after a back-off; its replicas are reported lost.
//
// In this form a Manager lives in the process that steers the cluster, and nothing outlives it: a zygote ends when its
// control socket closes, and its replicas end with it.
package keysmanager
