package resources

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/stagecoach-serving/stagecoach/keysmanager/cache"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// Meter measures the memory of the machine and of processes. Sizes are in bytes.
type Meter interface {
	// Bounds returns the memory of the machine and of the cgroup. Used memory excludes file pages that
	// the kernel can take back.
	Bounds() []Bound
	// Resident returns the resident memory of a process: its own pages, and file pages.
	Resident(pid int) (anonymous, files int64)
	// Exact returns the proportional set size of a process. It takes some 12 ms per gigabyte.
	Exact(pid int) (int64, error)
}

// Kernel is the Meter of this machine.
type Kernel struct {
	root   string // folder that has /proc and /sys; empty: the root
	page   int64
	groups []string // folders of the cgroups around this process, innermost first
}

// NewKernel finds the cgroups of this process. It assumes that the process stays in them: whoever
// moves a process to another cgroup does so before it has much memory.
func NewKernel(root string) Kernel {
	k := Kernel{root: root, page: int64(os.Getpagesize())}
	k.groups = groupFolders(string(k.read("proc/self/cgroup")), string(k.read("proc/self/mountinfo")))
	return k
}

func (k Kernel) read(path ...string) []byte {
	// A file that cannot be read sets no limit.
	b, _ := os.ReadFile(filepath.Join(append([]string{k.root, "/"}, path...)...))
	return b
}

// Bounds implements Meter.
func (k Kernel) Bounds() []Bound {
	var all []Bound
	info := k.read("proc/meminfo")
	total, known := field(info, "MemTotal:")
	available, ok := field(info, "MemAvailable:")
	if known && ok {
		all = append(all, Bound{Name: BoundMachine, Total: total << 10, Used: (total - available) << 10})
	}
	// Each cgroup around this process bounds it. The tightest one counts.
	var inner *Bound
	for _, dir := range k.groups {
		if b, ok := k.group(dir); ok && (inner == nil || b.Below(cache.Threshold) < inner.Below(cache.Threshold)) {
			inner = &b
		}
	}
	if inner != nil {
		all = append(all, *inner)
	}
	return all
}

// group returns the limit and the usage of a cgroup; false: it has no limit.
func (k Kernel) group(dir string) (Bound, bool) {
	limit, usage, files := "memory.max", "memory.current", [2]string{"active_file", "inactive_file"}
	if k.read(dir, limit) == nil { // version 1
		limit, usage, files = "memory.limit_in_bytes", "memory.usage_in_bytes", [2]string{"total_active_file", "total_inactive_file"}
	}
	total, err := strconv.ParseInt(strings.TrimSpace(string(k.read(dir, limit))), 10, 64)
	if err != nil || total >= 1<<60 { // "max", or version 1's word for it
		return Bound{}, false
	}
	used, err := strconv.ParseInt(strings.TrimSpace(string(k.read(dir, usage))), 10, 64)
	if err != nil {
		return Bound{}, false
	}
	stat := k.read(dir, "memory.stat")
	for _, name := range files {
		n, _ := field(stat, name)
		used -= n
	}
	return Bound{Name: BoundCgroup, Total: total, Used: max(used, 0)}, true
}

// Resident implements Meter.
func (k Kernel) Resident(pid int) (anonymous, files int64) {
	f := strings.Fields(string(k.read("proc", strconv.Itoa(pid), "statm")))
	if len(f) < 3 {
		return 0, 0 // it has ended
	}
	all, _ := strconv.ParseInt(f[1], 10, 64)
	shared, _ := strconv.ParseInt(f[2], 10, 64)
	return (all - shared) * k.page, shared * k.page
}

// Exact implements Meter.
func (k Kernel) Exact(pid int) (int64, error) { return sandbox.PSS(pid) }

// field returns the number that follows a name at the start of a line.
func field(text []byte, name string) (int64, bool) {
	for line := range bytes.Lines(text) {
		if rest, ok := bytes.CutPrefix(line, []byte(name)); ok && len(rest) > 0 && (rest[0] == ' ' || rest[0] == '\t') {
			n, err := strconv.ParseInt(string(bytes.Fields(rest)[0]), 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}

// groupFolders returns the folders of the cgroups that bound the memory of a process, in versions 1
// and 2: the process's cgroup first, then each parent. cgroup and mountinfo are the texts of the
// files of that name in /proc/self.
func groupFolders(cgroup, mountinfo string) []string {
	var out []string
	for line := range strings.Lines(cgroup) {
		parts := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(parts) != 3 {
			continue
		}
		kind := "cgroup"
		if parts[1] == "" {
			kind = "cgroup2"
		} else if !hasWord(parts[1], "memory") {
			continue
		}
		for mount := range strings.Lines(mountinfo) {
			root, at, ok := cgroupMount(mount, kind)
			if !ok {
				continue
			}
			rel, err := filepath.Rel(root, parts[2])
			if err != nil || rel == ".." || strings.HasPrefix(rel, "../") {
				// The mount is not above the process's cgroup, so it is all that the process sees.
				rel = "."
			}
			for range 64 { // no system nests deeper
				out = append(out, filepath.Join(at, rel))
				if rel == "." {
					break
				}
				rel = filepath.Dir(rel)
			}
			break
		}
	}
	return out
}

// cgroupMount parses a line of mountinfo if it mounts a cgroup hierarchy: version 2, or the memory
// controller of version 1.
func cgroupMount(line, kind string) (root, at string, ok bool) {
	before, after, found := strings.Cut(strings.TrimSuffix(line, "\n"), " - ")
	f, tail := strings.Fields(before), strings.Fields(after)
	if !found || len(f) < 5 || len(tail) < 3 || tail[0] != kind || kind == "cgroup" && !hasWord(tail[2], "memory") {
		return "", "", false
	}
	return f[3], f[4], true
}

// hasWord reports whether a comma-separated list has a word.
func hasWord(list, word string) bool {
	for w := range strings.SplitSeq(list, ",") {
		if w == word {
			return true
		}
	}
	return false
}
