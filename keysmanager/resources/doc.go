// Package resources assigns a node's resources to its processes: a cgroup, a user account, a
// network, and memory of devices.
//
// A [Pool] assigns resources, and a [Reservation] is what one process holds. The owner of a process
// makes the reservation with [Pool.Reserve] or [Pool.New] before the process starts, or with
// [Pool.Adopt] for a process of an earlier daemon. Enter, Take and Start add resources to the
// reservation. Only Release frees them. It may be called more than once.
//
// The package also measures memory: [Kernel] reads the memory of the machine and of processes, and
// [Scale] counts the memory that the node's own processes take.
package resources
