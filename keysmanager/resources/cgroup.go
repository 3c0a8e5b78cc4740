package resources

import (
	"cmp"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// MaxProcesses bounds the processes and threads of a replica or zygote.
const MaxProcesses = 1024

// measureEvery is the shortest time between two measurements of a group.
const measureEvery = time.Second

// Cgroup is the group of a replica or zygote, and its latest measurement. A node without cgroups
// uses a nil Cgroup, so the methods that are called for any process accept nil.
//
// The fields up to began, except done, are set before other goroutines know the process.
type Cgroup struct {
	group          Group
	id             string // unique name of the group
	name, function string // of the replica; name is empty for a spare child or a zygote
	replica        bool   // it is a replica's: its usage counts in its function's totals
	done           bool   // its usage is in the totals already; guarded by the mutex of totals
	limits         Limits
	began          time.Time

	setting sync.Mutex   // held while cpu is set
	cpu     atomic.Int64 // the limit on the processor, in thousandths of a core; 0: none

	// Of a worker: the usage that its replicas' functions have been charged; guarded by the mutex of
	// totals.
	shared GroupUsage

	mu     sync.Mutex // guards the fields below
	latest Usage      // At is zero: not measured yet
	told   GroupUsage // usage at the time of the latest line in the function's log about its limits
}

// Enter creates the cgroup of a process, and removes the reservation's earlier one. The process
// enters the cgroup by the returned files, which the caller closes. Then the caller calls Bound,
// because the cgroup has no CPU limit yet. On a node without cgroups, there are no files.
func (r *Reservation) Enter(id, function string, l Limits) ([]*os.File, error) {
	r.pool.leave(r.group)
	r.group = nil
	if r.pool.cfg.Groups == nil {
		return nil, nil
	}
	first := l
	if first.Memory > 0 {
		first.Memory += first.Platform
	}
	// There is no CPU limit during the start, because other processes wait for threads that start it.
	first.CPUMilli = 0
	g, err := r.pool.cfg.Groups.Create(id, function, first)
	if err != nil {
		return nil, err
	}
	r.group = &Cgroup{group: g, id: id, name: id, function: function, limits: l, began: time.Now()}
	return g.Files()
}

// Become makes the reservation's cgroup count as its replica's. milli is the CPU limit, in
// thousandths of a core, that the caller sets with Bound later; 0 means the declared limit. Other
// goroutines must not see the process yet.
func (r *Reservation) Become(milli int) {
	c := r.group
	if c == nil {
		return
	}
	c.name, c.function, c.replica, c.began = r.replica, r.function, true, time.Now()
	c.cpu.Store(int64(cmp.Or(milli, c.limits.CPUMilli)))
	r.pool.totals.began(c.function)
}

// Take moves the cgroup of a child or a spare process that becomes a replica to the replica's
// reservation, in place of an earlier one. The account of a spare process moves with it.
func (r *Reservation) Take(from *Reservation, milli int) {
	r.pool.leave(r.group)
	r.group, from.group = from.group, nil
	if from.account != nil {
		r.account, from.account = from.account, nil
	}
	r.Become(milli)
}

// AdoptGroup takes over the cgroup of a zygote or replica of an earlier daemon. replica is empty
// for a zygote. l are the limits that the cgroup was made with, and milli is its CPU limit now. If
// the cgroup does not exist, AdoptGroup logs a warning.
func (r *Reservation) AdoptGroup(id, function, replica string, l Limits, milli int, began time.Time) {
	p := r.pool
	if p.cfg.Groups == nil {
		return
	}
	g, err := p.cfg.Groups.Adopt(id)
	if err != nil {
		p.cfg.Log.Warn("an adopted process has no limits and is not measured: its cgroup does not exist", "name", cmp.Or(replica, id), "error", err)
		return
	}
	r.group = &Cgroup{group: g, id: id, name: cmp.Or(replica, id), function: function, limits: l, began: began, replica: replica != ""}
	r.group.cpu.Store(int64(milli))
	if r.group.replica {
		p.totals.began(function)
	}
}

// RetainGroups removes the cgroups of an earlier daemon, except these, which were adopted.
func (p *Pool) RetainGroups(adopted []*Cgroup) {
	if p.cfg.Groups == nil {
		return
	}
	var names []string
	for _, c := range adopted {
		names = append(names, c.id)
	}
	if err := p.cfg.Groups.Retain(names); err != nil {
		p.cfg.Log.Warn("cgroups of an earlier KeysManager are not removed", "error", err)
	}
}

// leave removes the cgroup of an ended process, kills the processes that remain in it, and counts
// its usage. c may be nil.
func (p *Pool) leave(c *Cgroup) {
	if c == nil {
		return
	}
	if err := c.group.Remove(); err != nil {
		p.cfg.Log.Warn("cgroup is not removed", "name", c.name, "error", err)
	}
	u, err := c.group.Usage()
	if err != nil {
		u = c.Usage().GroupUsage
	}
	p.totals.ended(c, u)
}

// Bound sets the CPU limit, once the process runs. 0 sets the declared limit.
func (c *Cgroup) Bound(milli int) error {
	if c == nil {
		return nil
	}
	milli = cmp.Or(milli, c.limits.CPUMilli)
	c.setting.Lock()
	defer c.setting.Unlock()
	if err := c.group.SetCPU(milli); err != nil {
		return err
	}
	c.cpu.Store(int64(milli))
	return nil
}

// Milli returns the current CPU limit in thousandths of a core; 0: none.
func (c *Cgroup) Milli() int {
	if c == nil {
		return 0
	}
	return int(c.cpu.Load())
}

// PassedItsLimit reports whether the kernel killed processes of the group because the replica
// exceeded its own memory limit.
func (c *Cgroup) PassedItsLimit() bool {
	if c == nil || c.limits.Memory == 0 || !c.replica {
		return false
	}
	u, err := c.group.Usage()
	return err == nil && u.OOMKills > 0
}

// TellsOutOfMemory returns the value of wire.EnvOutOfMemory for a watchdog in the group. The value
// names a file, from which the watchdog sees when the kernel kills a process because of the
// replica's memory limit. files are those that Enter has returned. The value is empty if there is
// no limit, or no such file.
func (c *Cgroup) TellsOutOfMemory(files []*os.File) string {
	if c == nil || c.limits.Memory == 0 {
		return ""
	}
	for _, f := range files {
		for _, name := range []string{"memory.events", "memory.oom_control"} { // of version 2 and 1
			path := filepath.Join(filepath.Dir(f.Name()), name)
			if _, err := os.Stat(path); err == nil {
				return path + " " + c.outOfItsMemory()
			}
		}
	}
	return ""
}

func (c *Cgroup) outOfMemory() string {
	if c.limits.Memory == 0 || !c.replica {
		return "out of memory, that of the machine or of all this node's processes"
	}
	return c.outOfItsMemory()
}

func (c *Cgroup) outOfItsMemory() string {
	return "out of memory, its limit is " + plan.Size(c.limits.Memory) + " (limits.memory)"
}

// ID returns the unique name of the group; empty: there is none.
func (c *Cgroup) ID() string {
	if c == nil {
		return ""
	}
	return c.id
}

// Limits returns the limits that the group was made with.
func (c *Cgroup) Limits() Limits { return c.limits }
