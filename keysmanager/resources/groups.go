package resources

import (
	"os"
	"time"
)

// Groups makes cgroups for the processes of a node: one for each replica and each zygote. A name
// FAMILY/NAME is that of a group in the folder of a family, which is a zygote and its children. The
// family's first group is the zygote's. Package cgroup implements Groups.
type Groups interface {
	// Create creates an empty group of a function's process with these limits. An earlier group of
	// this name is removed, and its processes are killed.
	Create(name, function string, l Limits) (Group, error)
	// Adopt returns the group of this name that an earlier daemon has made. Its limits do not change.
	Adopt(name string) (Group, error)
	// Retain removes all groups except these, and kills the processes in the groups that it removes.
	// Those are groups of an earlier daemon that were not adopted.
	Retain(names []string) error
}

// Group is a cgroup. Its methods are safe for concurrent use.
type Group interface {
	// Files opens the files by which a process enters the group: it writes "0" to each. The caller
	// closes them. See sandbox.Command.Groups.
	Files() ([]*os.File, error)
	// Enforce puts the limits of a group into force that could not be earlier: those of a family's
	// first process, which runs now with this number.
	Enforce(pid int) error
	// SetCPU sets the CPU limit of all processes of the group together, in thousandths of a core; 0:
	// no limit.
	SetCPU(milli int) error
	// Usage returns the usage of the processes, including processes that have ended. It works until
	// Remove.
	Usage() (GroupUsage, error)
	// Remove kills the processes in the group and removes the group.
	Remove() error
}

// Limits bound the processes of a group together; 0: no limit.
type Limits struct {
	Memory int64 `json:"memory,omitempty"` // bytes, without swap, of the function's own processes
	// Bytes in addition to Memory, for a process of the platform in the group. Groups get a sum in
	// Memory.
	Platform int64 `json:"platform,omitempty"`
	CPUMilli int   `json:"cpuMilli,omitempty"` // thousandths of a core
	PIDs     int   `json:"pids,omitempty"`     // processes and threads
}

// GroupUsage is the usage of the processes of a group.
type GroupUsage struct {
	CPU          time.Duration // of all cores
	Memory       int64         // bytes now; pages that a fork shares with its zygote are the zygote's
	Throttled    time.Duration // time for which they waited because of the CPU limit
	Periods      uint64        // periods of 100 ms in which they needed the CPU while it was limited
	ThrottledIn  uint64        // periods in which they had to wait
	OOMKills     uint64        // processes killed because of the limit on memory
	ForksRefused uint64        // because of the limit on processes
}

// Usage is the usage of a replica or zygote, including all processes that it has started.
type Usage struct {
	GroupUsage
	At time.Time // of the measurement
	// Thousandths of a core, since the previous measurement, which is at least a second older, or
	// since the start.
	CPUMilli float64
}
