// Package warden is the parent of a node's processes, and it stores their descriptors. So processes
// and descriptors outlive the daemon that manages them, as with systemd's descriptor store or a
// container's shim. A warden knows nothing of functions or models. A manager starts processes under
// names of its choice, and stores descriptors and a description under each name. After a restart of
// the manager, [Client.Attach] returns all of these, including processes that have ended in the
// meantime.
//
// [InProcess] runs a warden in this process; its processes end with this process. [Launch] connects
// to a warden in a separate process, which runs [Serve], and starts it if there is none. That
// warden is found by its socket and survives its manager. It accepts one manager at a time.
//
// While there is no manager, the warden reads and counts the output of its processes, so that none
// of them blocks. After [Server].Linger, it ends processes that are useful only to a manager (see
// [Process].Idle). It ends itself after its last process. If the warden dies, the kernel sends
// SIGKILL to its processes.
package warden
