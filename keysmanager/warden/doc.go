// Package warden is the parent of a node's processes, and it stores their descriptors. So processes
// and descriptors outlive the daemon that manages them, as with systemd's descriptor store or a
// container's shim. A warden knows nothing of functions or models. A manager starts processes under
// names of its choice, and puts descriptors and a description beside them. After a restart,
// [Client.Attach] returns all of them, and the ends that no manager has seen yet.
//
// [InProcess] keeps the processes in this process, and they end with it. [Launch] keeps them in a
// separate process that runs [Serve]. That warden is found by its socket, is started if it does not
// exist, and survives its manager. It takes one manager at a time.
//
// While there is no manager, the warden reads and counts the output of its processes, so that none
// of them blocks. After a while, it ends processes that are of no use alone (see [Process].Idle),
// and itself after its last process. If the warden dies, the kernel sends SIGKILL to its processes.
package warden
