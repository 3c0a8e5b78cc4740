package resources

import (
	"os"
	"time"
)

// Groups makes cgroups for the processes of a node: one for each replica and each zygote. Package
// cgroup has them.
type Groups interface {
	// Create makes an empty group with these limits. What is left of an earlier one of this name is
	// killed and removed.
	Create(name string, l Limits) (Group, error)
	// Adopt returns the group of this name that an earlier daemon has made, with its limits as they
	// are.
	Adopt(name string) (Group, error)
	// Retain kills and removes all groups but those of these names: what an earlier daemon has left
	// and nobody adopts.
	Retain(names []string) error
}

// Group is a cgroup. Its methods are safe for concurrent use.
type Group interface {
	// Files opens what a process enters the group with, by writing "0" to each; the caller closes
	// them. See sandbox.Command.Groups.
	Files() ([]*os.File, error)
	// SetCPU sets how much of the processor its processes may use together, in thousandths of a
	// core; 0: all there is.
	SetCPU(milli int) error
	// Usage returns what they have used, also when they have ended, until Remove.
	Usage() (GroupUsage, error)
	// Remove kills what is left in the group and removes it.
	Remove() error
}

// Limits bound a group's processes together; 0: not at all.
type Limits struct {
	Memory int64 `json:"memory,omitempty"` // bytes, without swap, of the function's own processes
	// Bytes beside Memory, for a process of the platform in the group.
	Platform int64 `json:"platform,omitempty"`
	CPUMilli int   `json:"cpuMilli,omitempty"` // thousandths of a core
	PIDs     int   `json:"pids,omitempty"`     // processes and threads
}

// GroupUsage is what the processes of a group have used.
type GroupUsage struct {
	CPU          time.Duration // of all cores
	Memory       int64         // bytes now; pages that a fork shares with its zygote are the zygote's
	Throttled    time.Duration // for which they waited for the processor because of SetCPU
	Periods      uint64        // of 100 ms in which they wanted the processor, while it was bounded
	ThrottledIn  uint64        // of these, those in which they had to wait
	OOMKills     uint64        // processes killed because of the limit on memory
	ForksRefused uint64        // because of the limit on processes
}

// Usage is what a replica or zygote uses, all that it has started included.
type Usage struct {
	GroupUsage
	At time.Time // of the measurement
	// Thousandths of a core: since the measurement before, a second earlier at least, or since the
	// start.
	CPUMilli float64
}
