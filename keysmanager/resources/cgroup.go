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

// measureEvery is the least time between two measurements of a group, whoever asks.
const measureEvery = time.Second

// Cgroup is the group of a replica or zygote, and what was measured of it. A node without cgroups
// has nil in its place; those methods that others call for any process work then, too.
//
// The fields up to began are set before the process is known to others.
type Cgroup struct {
	group          Group
	id             string // of the group, unlike any other
	name, function string // of the replica, or of what has none yet or is none
	replica        bool   // a replica's: its use counts in its function's totals
	done           bool   // it does already; guarded by the mutex of totals
	limits         Limits
	began          time.Time

	setting sync.Mutex   // held while cpu is set
	cpu     atomic.Int64 // the limit on the processor, in thousandths of a core; 0: none

	// Of a worker: what its replicas' functions have been given of its use; guarded by the mutex of
	// totals.
	shared GroupUsage

	mu     sync.Mutex // guards what follows
	latest Usage      // At is zero: none yet
	told   GroupUsage // of which the function's log was told what the limits have prevented
}

// Enter makes the cgroup of a process, in place of an earlier one of the reservation. The caller
// closes the files by which a process enters it, and calls Bound once it has. Without cgroups there
// are none.
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
	first.Platform = 0
	// The processor is not bounded while it is started, by threads that others wait for as well.
	first.CPUMilli = 0
	g, err := r.pool.cfg.Groups.Create(id, first)
	if err != nil {
		return nil, err
	}
	r.group = &Cgroup{group: g, id: id, name: id, function: function, limits: l, began: time.Now()}
	return g.Files()
}

// Become says that the cgroup is now the replica's of this reservation, which may use so many
// thousandths of a core once it is bound; 0: as its limits say. The process must not be known to
// others yet.
func (r *Reservation) Become(milli int) {
	c := r.group
	if c == nil {
		return
	}
	c.name, c.function, c.replica, c.began = r.replica, r.function, true, time.Now()
	c.cpu.Store(int64(cmp.Or(milli, c.limits.CPUMilli)))
	r.pool.totals.began(c.function)
}

// Take moves the cgroup of a child that becomes a replica to the replica's reservation, in place of
// an earlier one.
func (r *Reservation) Take(child *Reservation, milli int) {
	r.pool.leave(r.group)
	r.group, child.group = child.group, nil
	r.Become(milli)
}

// AdoptGroup takes over a cgroup that an earlier daemon has made with these limits, for a zygote or
// for the replica of this name, and given milli of the processor since. A cgroup that is not there
// is logged.
func (r *Reservation) AdoptGroup(id, function, replica string, l Limits, milli int, began time.Time) {
	p := r.pool
	if p.cfg.Groups == nil {
		return
	}
	g, err := p.cfg.Groups.Adopt(id)
	if err != nil {
		p.cfg.Log.Warn("what runs is neither bounded nor measured: its cgroup is not there", "name", cmp.Or(replica, id), "error", err)
		return
	}
	r.group = &Cgroup{group: g, id: id, name: cmp.Or(replica, id), function: function, limits: l, began: began, replica: replica != ""}
	r.group.cpu.Store(int64(milli))
	if r.group.replica {
		p.totals.began(function)
	}
}

// RetainGroups removes the cgroups of an earlier daemon that are not among these, which were
// adopted.
func (p *Pool) RetainGroups(adopted []*Cgroup) {
	if p.cfg.Groups == nil {
		return
	}
	var names []string
	for _, c := range adopted {
		names = append(names, c.id)
	}
	if err := p.cfg.Groups.Retain(names); err != nil {
		p.cfg.Log.Warn("cgroups of an earlier KeysManager are left", "error", err)
	}
}

// leave removes a cgroup whose process has ended, kills what that has left in it, and counts what
// it has used. nil is none.
func (p *Pool) leave(c *Cgroup) {
	if c == nil {
		return
	}
	if err := c.group.Remove(); err != nil {
		p.cfg.Log.Warn("cgroup is left", "name", c.name, "error", err)
	}
	u, err := c.group.Usage()
	if err != nil {
		u = c.Usage().GroupUsage
	}
	p.totals.ended(c, u)
}

// Bound sets the limit on the processor, once the process runs; 0: as declared.
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

// Milli is the limit on the processor as it is now; 0: none.
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

// TellsOutOfMemory returns the value of wire.EnvOutOfMemory for a watchdog in the group. With it,
// the watchdog recognises that the kernel killed a process because of the replica's memory limit.
// files are the files by which the group is entered. It returns an empty string if there is no
// limit.
func (c *Cgroup) TellsOutOfMemory(files []*os.File) string {
	if c == nil || c.limits.Memory == 0 {
		return ""
	}
	for _, f := range files {
		for _, name := range []string{"memory.events", "memory.oom_control"} { // of version 2 and 1
			path := filepath.Join(filepath.Dir(f.Name()), name)
			if _, err := os.Stat(path); err == nil {
				return path + " " + c.outOfMemory()
			}
		}
	}
	return ""
}

func (c *Cgroup) outOfMemory() string {
	if c.limits.Memory == 0 || !c.replica {
		return "out of memory, that of the machine or of all this node's processes"
	}
	return "out of memory, its limit is " + plan.Size(c.limits.Memory) + " (limits.memory)"
}

// ID returns the name of the group, which no other one has.
func (c *Cgroup) ID() string { return c.id }

// Limits returns the limits that it was made with.
func (c *Cgroup) Limits() Limits { return c.limits }
