// Package warden is the parent of a node's processes and the store of their descriptors, so that these outlive the daemon
// that manages them, as with systemd's descriptor store or a container's shim. It knows nothing of functions or models: a
// manager starts processes under names of its choice, puts descriptors and a description beside them, and after a restart
// gets all of it back from [Client.Attach], with the ends that nobody has heard of.
//
// [InProcess] keeps them in this process; they end with it. [Launch] keeps them in a process of its own, which runs [Serve]:
// it is found by its socket, started when it is not there, and goes on when the manager is killed. It takes one manager at
// a time. While there is none it reads away what processes print, so that none is held up, and counts it; after a while it
// ends processes that are no use to anybody (see [Process].Idle) and, when none is left, itself. What it has started gets
// SIGKILL from the kernel when it dies.
package warden
