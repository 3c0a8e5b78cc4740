// Package cgroup creates control groups, which limit and measure all processes of a replica
// together.
//
// [Open] finds out where this process may create groups, in cgroup v2 or v1. [Root.Create] creates
// a named group with limits. A process enters the group through the descriptors of [Group.Files]:
// it writes "0" to each before it does anything else. So all processes that it starts are in the
// group, too. Never give these descriptors to a function, because their holder can move any process
// into the group. [Group.SetCPU] changes the CPU limit, [Group.Usage] reports usage, and
// [Group.Remove] kills the remaining processes and removes the group.
//
// The groups of a node are in stagecoach/NODE below the cgroup of this process, so the limits of
// this process's cgroup apply to them, too:
//
//	v1  /sys/fs/cgroup/{cpu,cpuacct,memory,pids}/OURS/stagecoach/NODE/NAME
//	v2  /sys/fs/cgroup/OURS/stagecoach/NODE/NAME
//
// A zygote and its children are a family, whose groups are in family-FAMILY/NAME in place of NAME.
package cgroup
