package keysmanager

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// Groups makes cgroups for the processes of a node: one for each replica and each zygote. Package
// cgroup has them.
type Groups interface {
	// Create makes an empty group with these limits. What is left of an earlier one of this name is
	// killed and removed.
	Create(name string, l GroupLimits) (Group, error)
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
	// SetCPU sets how much of the processor its processes may use together, in thousandths of a core;
	// 0: all there is.
	SetCPU(milli int) error
	// Usage returns what they have used, also when they have ended, until Remove.
	Usage() (GroupUsage, error)
	// Remove kills what is left in the group and removes it.
	Remove() error
}

// GroupLimits bound a group's processes together; 0: not at all.
type GroupLimits struct {
	Memory   int64 `json:"memory,omitempty"`   // bytes, without swap, of the function's own processes
	Platform int64 `json:"platform,omitempty"` // bytes beside Memory, for a process of the platform in the group
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
	At       time.Time // of the measurement
	CPUMilli float64   // thousandths of a core: since the measurement before, a second earlier at least, or since the start
}

// maxProcesses bounds the processes and threads of a replica or zygote.
const maxProcesses = 1024

// measureEvery is the least time between two measurements of a group, whoever asks.
const measureEvery = time.Second

// enclosure is the group of a replica or zygote, and what was seen of it. That of a node without
// groups is nil.
type enclosure struct {
	group          Group
	id             string // of the group, unlike any other
	name, function string // of the replica, or of what has none yet or is none
	replica        bool   // a replica's: its use counts in its function's totals
	done           bool   // it does already; guarded by the mutex of totals
	limits         GroupLimits
	began          time.Time

	setting sync.Mutex   // held while cpu is set
	cpu     atomic.Int64 // the limit on the processor, in thousandths of a core; 0: none

	shared GroupUsage // of a worker: what its replicas' functions have been given of its use; guarded by the mutex of totals

	mu     sync.Mutex
	latest Usage // At is zero: none yet
	told   GroupUsage
}

// enclose makes a group for a zygote, or for what becomes a replica later. The caller closes the
// files by which a process enters it, and calls bound once it has.
func (m *Manager) enclose(id, function string, l GroupLimits) (*enclosure, []*os.File, error) {
	if m.cfg.Groups == nil {
		return nil, nil, nil
	}
	first := l
	if first.Memory > 0 {
		first.Memory += first.Platform
	}
	first.Platform = 0
	first.CPUMilli = 0 // the processor is not bounded while it is started, by threads that others wait for as well
	g, err := m.cfg.Groups.Create(id, first)
	if err != nil {
		return nil, nil, err
	}
	e := &enclosure{group: g, id: id, name: id, function: function, limits: l, began: time.Now()}
	files, err := g.Files()
	if err != nil {
		m.disclose(e)
		return nil, nil, err
	}
	return e, files, nil
}

// become says that a group is that of an ordered replica. It must not be known to others yet.
func (e *enclosure) become(m *Manager, o Order) {
	if e == nil {
		return
	}
	e.name, e.function, e.replica, e.began = o.Replica, o.Spec.Function, true, time.Now()
	e.cpu.Store(int64(cmp.Or(o.CPUMilli, e.limits.CPUMilli)))
	m.totals.began(e.function)
}

// adoptGroup takes over a group that an earlier daemon has made with these limits, for a zygote or
// for the replica of this name, and given milli of the processor since; nil when it cannot be.
func (m *Manager) adoptGroup(id, function, replica string, l GroupLimits, milli int, began time.Time) *enclosure {
	if m.cfg.Groups == nil {
		return nil
	}
	g, err := m.cfg.Groups.Adopt(id)
	if err != nil {
		m.cfg.Log.Warn("what runs is neither bounded nor measured: its cgroup is not there", "name", cmp.Or(replica, id), "error", err)
		return nil
	}
	e := &enclosure{group: g, id: id, name: cmp.Or(replica, id), function: function, limits: l, began: began, replica: replica != ""}
	e.cpu.Store(int64(milli))
	if e.replica {
		m.totals.began(function)
	}
	return e
}

// retainGroups removes the groups of an earlier daemon that were not adopted.
func (m *Manager) retainGroups() {
	if m.cfg.Groups == nil {
		return
	}
	var names []string
	for _, e := range m.enclosures() {
		names = append(names, e.id)
	}
	if err := m.cfg.Groups.Retain(names); err != nil {
		m.cfg.Log.Warn("cgroups of an earlier KeysManager are left", "error", err)
	}
}

// zygoteLimits bound a zygote: by what all zygotes may take.
func (m *Manager) zygoteLimits() GroupLimits {
	return GroupLimits{Memory: m.cfg.Memory, PIDs: maxProcesses}
}

// watchdogMemory is the memory that a replica has beside its function's limit if a watchdog runs
// its program, in bytes: twice what a watchdog takes after thousands of requests on 16 connections
// (docs/adr/0062).
const watchdogMemory = 24 << 20

// limits bound a replica.
func (s Spec) limits() GroupLimits {
	return GroupLimits{Memory: s.Memory, CPUMilli: s.CPUMilli, PIDs: maxProcesses}
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		_ = f.Close() // nothing was written through it
	}
}

// bound sets the limit on the processor, once the process runs; 0: as declared.
func (e *enclosure) bound(milli int) error {
	if e == nil {
		return nil
	}
	milli = cmp.Or(milli, e.limits.CPUMilli)
	e.setting.Lock()
	defer e.setting.Unlock()
	if err := e.group.SetCPU(milli); err != nil {
		return err
	}
	e.cpu.Store(int64(milli))
	return nil
}

// milli is the limit on the processor as it is now; 0: none.
func (e *enclosure) milli() int {
	if e == nil {
		return 0
	}
	return int(e.cpu.Load())
}

// passedItsLimit reports whether the kernel killed processes of the group because the replica
// exceeded its own memory limit.
func (e *enclosure) passedItsLimit() bool {
	if e == nil || e.limits.Memory == 0 || !e.replica {
		return false
	}
	u, err := e.group.Usage()
	return err == nil && u.OOMKills > 0
}

// tellsOutOfMemory returns the value of wire.EnvOutOfMemory for a watchdog in the group. With it,
// the watchdog recognises that the kernel killed a process because of the replica's memory limit.
// files are the files by which the group is entered. It returns an empty string if there is no
// limit.
func (e *enclosure) tellsOutOfMemory(files []*os.File) string {
	if e == nil || e.limits.Memory == 0 {
		return ""
	}
	for _, f := range files {
		for _, name := range []string{"memory.events", "memory.oom_control"} { // of version 2 and 1
			path := filepath.Join(filepath.Dir(f.Name()), name)
			if _, err := os.Stat(path); err == nil {
				return path + " " + e.outOfMemory()
			}
		}
	}
	return ""
}

func (e *enclosure) outOfMemory() string {
	if e.limits.Memory == 0 || !e.replica {
		return "out of memory, that of the machine or of all this node's processes"
	}
	return "out of memory, its limit is " + plan.Size(e.limits.Memory) + " (limits.memory)"
}

// disclose removes a group whose process has ended, kills what that has left in it, and counts what
// it has used.
func (m *Manager) disclose(e *enclosure) {
	if e == nil {
		return
	}
	if err := e.group.Remove(); err != nil {
		m.cfg.Log.Warn("cgroup is left", "name", e.name, "error", err)
	}
	u, err := e.group.Usage()
	if err != nil {
		u = e.usage().GroupUsage
	}
	m.totals.ended(e, u)
}

// usage returns what was seen of it last; the zero Usage: nothing.
func (e *enclosure) usage() Usage {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.latest
}

// info is usage for an inventory.
func (e *enclosure) info() *Usage {
	if e == nil {
		return nil
	}
	u := e.usage()
	if u.At.IsZero() {
		return nil
	}
	return &u
}

// measure looks at the group, unless that was done a moment ago, and returns what its limits have
// kept it from since it was last asked.
func (e *enclosure) measure(now time.Time) (news string, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if now.Sub(e.latest.At) < measureEvery {
		return "", nil
	}
	u, err := e.group.Usage()
	if err != nil {
		return "", err
	}
	before := e.latest
	if before.At.IsZero() {
		before.At = e.began
	}
	e.latest = Usage{GroupUsage: u, At: now}
	if d := now.Sub(before.At); d > 0 {
		e.latest.CPUMilli = max(0, 1000*(u.CPU-before.CPU).Seconds()/d.Seconds())
	}
	if n := u.ForksRefused; n > 0 && e.told.ForksRefused == 0 {
		news = fmt.Sprintf("a process was not started: the limit is %d processes and threads", e.limits.PIDs)
	}
	if u.OOMKills > e.told.OOMKills {
		news = "a process was killed: " + e.outOfMemory()
	}
	e.told = u
	return news, nil
}

// measure looks at all groups, so that an inventory has what they use. One that is just being
// removed is passed over.
func (m *Manager) measure() {
	if m.cfg.Groups == nil || !m.measuring.TryLock() {
		return
	}
	defer m.measuring.Unlock()
	now := time.Now()
	for _, e := range m.enclosures() {
		news, err := e.measure(now)
		switch {
		case err != nil:
			m.cfg.Log.Debug("usage cannot be measured", "name", e.name, "error", err)
		case news != "":
			m.cfg.Log.Warn("a limit was hit", "function", e.function, "name", e.name, "what", news)
			m.cfg.Output(e.function, e.name, "stderr", "stagecoach: "+news)
		}
	}
	for e, functions := range m.guests() {
		m.totals.share(e, functions)
	}
}

// ErrUnknown is the error of a replica that does not run here.
var ErrUnknown = errors.New("no replica of this name runs here")

// SetCPU sets how much of the processor a replica may use from now on, in thousandths of a core; 0:
// as its function says. On a node without cgroups the error is errors.ErrUnsupported.
func (m *Manager) SetCPU(_ context.Context, replica string, milli int) error {
	m.mu.Lock()
	p := m.processes[replica]
	runs := p != nil && p.running
	m.mu.Unlock()
	switch {
	case !runs:
		return fmt.Errorf("replica %q: %w", replica, ErrUnknown)
	case p.zygote.works():
		return fmt.Errorf("replica %q: its processor cannot be bounded, it is a part of worker %q: %w", replica, p.zygote.key.worker, errors.ErrUnsupported)
	case p.group == nil:
		return fmt.Errorf("replica %q: its processor cannot be bounded without cgroups: %w", replica, errors.ErrUnsupported)
	case milli < 0:
		return fmt.Errorf("replica %q: cpu %dm, want none below 0", replica, milli)
	}
	if err := p.group.bound(milli); err != nil {
		return err
	}
	m.keep(p)
	return nil
}
