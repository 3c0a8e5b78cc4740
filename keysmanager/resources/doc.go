// Package resources gives the processes of a node what they hold of it: a cgroup, a user account, a
// network, and memory of devices.
//
// A [Pool] gives, and a [Reservation] is what one process holds. The owner of a process makes the
// reservation with [Pool.Reserve], [Pool.New] or [Pool.Adopt], before the process starts. The
// reservation grows with Enter, Take and Start. Release gives everything back. It is the only
// function that does, and may be called more than once.
//
// The package also says what memory there is: [Kernel] reads the machine and its processes, and
// [Scale] counts what the node's own processes take of it.
package resources
