package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
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
	path string           // below the node's folder
	v1   cgroup1.Cgroup   // or
	v2   *cgroup2.Manager // or neither: it can only be removed

	mu      sync.Mutex
	removed bool
	pending *Limits // of the first group of a family in version 2, until Enforce
	last    Usage   // once removed
}

// Usage is what the processes of a group have used, including those that have ended.
type Usage struct {
	CPU time.Duration // of all cores
	// Bytes in use now, without file pages that the kernel can free at once.
	Memory       int64
	Throttled    time.Duration // time spent waiting because of the CPU limit
	Periods      uint64        // number of 100 ms periods with work while the CPU was limited
	ThrottledIn  uint64        // part of Periods: those in which processes had to wait
	OOMKills     uint64        // processes killed because of the limit on memory
	ForksRefused uint64        // because of the limit on processes
}

// ErrRemoved is the error of a group that has been removed.
var ErrRemoved = errors.New("cgroup: removed")

// period is the period of CPU quotas in µs. least is the smallest quota that the kernel accepts.
const (
	period = 100_000
	least  = 1_000
)

// Files opens the files through which a process enters the group, by writing "0" to each. The
// caller closes them. In v1, writing moves the calling thread; in v2, its process.
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

// OpenOwn opens the files through which another process enters the groups of this process, as
// Files does. The caller closes them.
func OpenOwn() ([]*os.File, error) { return openOwn(real) }

func openOwn(s system) ([]*os.File, error) {
	places, _, err := s.find()
	if err != nil {
		return nil, fmt.Errorf("cgroup: %w", err)
	}
	dirs := map[string]bool{} // several controllers may have one
	for _, p := range places {
		dirs[p.dir()] = true
	}
	var files []*os.File
	for _, dir := range slices.Sorted(maps.Keys(dirs)) {
		f, err := os.OpenFile(filepath.Join(dir, "cgroup.procs"), os.O_WRONLY, 0)
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

// SetCPU sets the CPU limit of all processes in the group together, in thousandths of a core and at
// least 10; 0: no limit. Without the controller cpu, it has no effect.
func (g *Group) SetCPU(milli int) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.removed {
		return fmt.Errorf("%w: %s", ErrRemoved, g.name)
	}
	if _, ok := g.root.places[cpu]; !ok {
		return nil
	}
	if g.pending != nil {
		g.pending.CPUMilli = milli
		return nil
	}
	return g.setCPU(milli)
}

func (g *Group) setCPU(milli int) error {
	quota := int64(-1)
	if milli > 0 {
		quota = max(int64(milli)*period/1000, least)
	}
	err := g.setQuota(quota)
	// v1 refuses a larger limit than that of a parent group. The parent's limit applies anyway.
	if errors.Is(err, unix.EINVAL) && !g.root.unified {
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

// Usage returns the group's usage so far. After Remove, it returns the last usage.
func (g *Group) Usage() (Usage, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.removed {
		return g.last, nil
	}
	return g.usage()
}

// Remove kills the group's remaining processes and removes the group, with any groups that its
// processes have created in it. The last group of a family ends the family. It is no error to
// remove a group twice.
func (g *Group) Remove() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.removed {
		return nil
	}
	if u, err := g.usage(); err == nil { // of half a group there is none
		g.last = u
	}
	err := g.remove()
	if err == nil {
		g.weighFamily()
		err = g.removeFamily()
	}
	if err != nil {
		return fmt.Errorf("cgroup %s: %w", g.name, err)
	}
	g.removed = true
	return nil
}

// patience bounds the wait for killed processes to end.
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
		time.Sleep(delay) // there is no event when the last process has ended
	}
}

// removeTree kills the processes in a folder's groups and removes the groups, innermost first. It
// returns EBUSY if killed processes have not ended yet.
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
	// If these files are missing or cannot be written, the loop below takes several rounds at
	// worst. The first write keeps processes from being started meanwhile.
	_ = os.WriteFile(filepath.Join(dir, "pids.max"), []byte("0"), 0)
	if os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0) == nil {
		return
	}
	procs, _ := readPIDs(filepath.Join(dir, "cgroup.procs"))
	for _, pid := range procs {
		// FindProcess opens a pidfd, so no other process with the same pid gets the signal.
		p, err := os.FindProcess(pid)
		if err != nil {
			continue
		}
		if pid != os.Getpid() && g.belongs(pid) {
			_ = p.Kill() // it may have ended
		}
		_ = p.Release()
	}
}

// belongs reports whether a process is in the group. A process that only starts another one does
// not belong, although one of its threads is in the group for a moment.
func (g *Group) belongs(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid)) // of its first thread
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(b)) {
		if strings.Contains(strings.TrimSpace(line)+"/", "/"+filepath.Join(above, g.root.node, g.path)+"/") {
			return true
		}
	}
	return false
}

// dirs returns the group's folders, one per hierarchy.
func (g *Group) dirs() []string {
	dirs := g.root.folders()
	for i := range dirs {
		dirs[i] = filepath.Join(dirs[i], g.path)
	}
	return dirs
}

// readPIDs reads a file with one number per line.
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

// descends reports whether a process is another one or its descendant.
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
