// Package container is a [sandbox.Runtime] whose processes are in containers of containerd. A
// container is made for each Command: for a zygote, whose forks live inside it, for a stage that
// has no zygote, and for a program of a watchdog.
//
// A container's descriptors, arguments and environment do not pass through containerd: see package
// entry. A container ends with the process of its Runtime, as the processes of a sandbox.Spawner
// do. It is removed when the Runtime is told to forget it. What a killed process has left is
// removed by the next Runtime of the same node.
package container
