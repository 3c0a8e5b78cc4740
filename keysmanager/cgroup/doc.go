// Package cgroup creates control groups, which limit and measure all processes of a replica
// together.
//
// [Open] finds out where this process may create groups, in cgroup v2 or v1. [Root.Create] creates
// a named group with limits. [Group.SetCPU] changes the CPU limit, [Group.Usage] reports usage, and
// [Group.Remove] kills the remaining processes and removes the group.
//
// A process enters a group by writing "0" to each file of [Group.Files]. It writes before it does
// anything else, so all processes that it starts are in the group, too. Never give these files to a
// function: with them, it could move any process into the group.
//
// The groups of a node are in stagecoach/NODE below the cgroup of this process, so a limit on that
// cgroup applies to them too:
//
//	v1  /sys/fs/cgroup/{cpu,cpuacct,memory,pids}/OURS/stagecoach/NODE/NAME
//	v2  /sys/fs/cgroup/OURS/stagecoach/NODE/NAME
package cgroup
