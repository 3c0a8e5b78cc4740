// Package cgroup makes control groups: what bounds and measures the processes of a replica together, whatever they start.
//
// [Open] finds out where this process may make groups, in cgroup v2 or v1, and [Root.Create] makes one of a name with its
// limits. A process enters it with the descriptors of [Group.Files], by writing "0" to each, before it does anything else:
// so nothing that it starts is ever outside. They are never given to a function: who has them can move any process there. [Group.SetCPU] changes the share of the processor live, [Group.Usage] tells
// what was used, and [Group.Remove] kills what is left and removes the group.
//
// The groups of a node lie in stagecoach/NODE below the cgroup of this process, so that a limit on that holds for them too:
//
//	v1  /sys/fs/cgroup/{cpu,cpuacct,memory,pids}/OURS/stagecoach/NODE/NAME
//	v2  /sys/fs/cgroup/OURS/stagecoach/NODE/NAME
package cgroup
