package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/containerd/cgroups/v3/cgroup1"
	"github.com/containerd/cgroups/v3/cgroup2"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// Group is a control group. Its methods are safe for concurrent use.
type Group struct {
	root *Root
	name string
	v1   cgroup1.Cgroup   // or
	v2   *cgroup2.Manager // or neither: it can only be removed

	mu      sync.Mutex
	removed bool
	last    Usage // once removed
}

// Usage is what the processes of a group have used, those that have ended included.
type Usage struct {
	CPU          time.Duration // of all cores
	Memory       int64         // bytes now; file pages that can be let go at once do not count
	Throttled    time.Duration // for which they waited because of the limit on the processor
	Periods      uint64        // of 100 ms in which they wanted the processor, while it was limited
	ThrottledIn  uint64        // of these, those in which they had to wait
	OOMKills     uint64        // processes killed because of the limit on memory
	ForksRefused uint64        // because of the limit on processes
}

// ErrRemoved is the error of a group that has been removed.
var ErrRemoved = errors.New("cgroup: removed")

// period is what quotas are of, in µs; least is the smallest quota that the kernel takes.
const (
	period = 100_000
	least  = 1_000
)

// Files opens what a process enters the group with, by writing "0" to each; the caller closes them. In v1 that moves the
// thread that writes, in v2 its process.
func (g *Group) Files() ([]*os.File, error) {
	name := "tasks"
	if g.root.unified {
		name = "cgroup.procs"
	}
	var files []*os.File
	for _, dir := range g.dirs() {
		f, err := os.OpenFile(filepath.Join(dir, name), os.O_WRONLY, 0)
		if err != nil {
			for _, f := range files {
				_ = f.Close()
			}
			return nil, fmt.Errorf("cgroup: %w", err)
		}
		files = append(files, f)
	}
	return files, nil
}

// SetCPU sets how much of the processor the group's processes may use together, in thousandths of a core, 10 at least; 0: all
// there is. Where there is no controller cpu, it has no effect.
func (g *Group) SetCPU(milli int) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.removed {
		return fmt.Errorf("%w: %s", ErrRemoved, g.name)
	}
	if _, ok := g.root.places[cpu]; !ok {
		return nil
	}
	quota := int64(-1)
	if milli > 0 {
		quota = max(int64(milli)*period/1000, least)
	}
	err := g.setQuota(quota)
	if errors.Is(err, unix.EINVAL) && !g.root.unified { // more than a group above has, which bounds it as well
		err = g.setQuota(-1)
	}
	if err != nil {
		return fmt.Errorf("cgroup %s: cpu %dm: %w", g.name, milli, err)
	}
	return nil
}

func (g *Group) setQuota(quota int64) error {
	every := uint64(period)
	if g.v1 != nil {
		return g.v1.Update(&specs.LinuxResources{CPU: &specs.LinuxCPU{Quota: &quota, Period: &every}})
	}
	limit := &quota
	if quota < 0 {
		limit = nil
	}
	return g.v2.Update(&cgroup2.Resources{CPU: &cgroup2.CPU{Max: cgroup2.NewCPUMax(limit, &every)}})
}

// Usage returns what the group has used so far, and after Remove what it had used then.
func (g *Group) Usage() (Usage, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.removed {
		return g.last, nil
	}
	return g.usage()
}

// Remove kills what is left in the group and removes it, with the groups that its processes may have made in it. Removing
// twice is no error.
func (g *Group) Remove() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.removed {
		return nil
	}
	if u, err := g.usage(); err == nil { // of half a group there is none
		g.last = u
	}
	if err := g.remove(); err != nil {
		return fmt.Errorf("cgroup %s: %w", g.name, err)
	}
	g.removed = true
	return nil
}

// patience bounds how long the end of killed processes is waited for.
const patience = 10 * time.Second

func (g *Group) remove() error {
	until := time.Now().Add(patience)
	for delay := time.Millisecond; ; delay = min(2*delay, 100*time.Millisecond) {
		var errs []error
		for _, dir := range g.dirs() {
			errs = append(errs, g.removeTree(dir))
		}
		err := errors.Join(errs...)
		if err == nil || !errors.Is(err, unix.EBUSY) || time.Now().After(until) {
			return err
		}
		time.Sleep(delay) // the kernel tells nobody when the last one has gone
	}
}

// removeTree kills what is in a folder's groups and removes them, the innermost first. That a killed process is still there
// is EBUSY.
func (g *Group) removeTree(dir string) error {
	if err := os.Remove(dir); err == nil || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	g.kill(dir)
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := g.removeTree(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// kill sends SIGKILL to the processes of one folder.
func (g *Group) kill(dir string) {
	// Where these are missing or not ours, what follows takes several rounds at worst, which remove goes.
	_ = os.WriteFile(filepath.Join(dir, "pids.max"), []byte("0"), 0) // so that nothing is started meanwhile
	if os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0) == nil {
		return
	}
	procs, _ := readPIDs(filepath.Join(dir, "cgroup.procs"))
	for _, pid := range procs {
		p, err := os.FindProcess(pid) // by a descriptor, so that nobody else gets the signal
		if err != nil {
			continue
		}
		if pid != os.Getpid() && g.belongs(pid) {
			_ = p.Kill() // it may have ended
		}
		_ = p.Release()
	}
}

// belongs tells a process of the group from one of whose threads only is in there, for the moment in which it starts a process.
func (g *Group) belongs(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid)) // of its first thread
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(b)) {
		if strings.Contains(strings.TrimSpace(line)+"/", "/"+filepath.Join(above, g.root.node, g.name)+"/") {
			return true
		}
	}
	return false
}

// dirs are the group's folders, one a hierarchy.
func (g *Group) dirs() []string {
	dirs := g.root.folders()
	for i := range dirs {
		dirs[i] = filepath.Join(dirs[i], g.name)
	}
	return dirs
}

// readPIDs reads a file of numbers, one a line.
func readPIDs(file string) ([]int, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var all []int
	for f := range strings.FieldsSeq(string(b)) {
		if n, err := strconv.Atoi(f); err == nil && n > 0 {
			all = append(all, n)
		}
	}
	return all, nil
}

// descends tells whether a process is another or one of its descendants.
func descends(pid, from int) bool {
	for range 100 {
		if pid == from {
			return true
		}
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return errors.Is(err, fs.ErrNotExist) // it has ended, and is in nobody's way
		}
		f := strings.Fields(string(b[slices.Index(b, ')')+1:]))
		if len(f) < 2 {
			return false
		}
		if pid, err = strconv.Atoi(f[1]); err != nil || pid == 0 {
			return false
		}
	}
	return false
}
