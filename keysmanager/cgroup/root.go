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

	"github.com/containerd/cgroups/v3/cgroup1"
	"github.com/containerd/cgroups/v3/cgroup2"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// Names of folders. All groups of Stagecoach are in above. A v2 group's own processes move to leaf,
// because a group with child groups may not have processes.
const (
	above = "stagecoach"
	leaf  = "stagecoach.daemon"
)

// Root holds the groups of a node. Its methods are safe for concurrent use on groups with different
// names.
type Root struct {
	unified bool
	places  map[string]place // by controller
	node    string
	lacks   []string
	lock    *os.File // the node's folder, locked while it is open

	weighing sync.Mutex // held while a family's weight is set
}

// Limits bound the processes of a group together; 0: no limit.
type Limits struct {
	Memory   int64 // bytes; none of it is swapped
	CPUMilli int   // thousandths of a core
	PIDs     int   // processes and threads
}

// Open creates the folder for the groups of a node, below the cgroup of this process. It removes
// the empty groups of nodes whose process has ended. It fails if the node is open already, in this
// or another process. The caller closes the Root.
func Open(node string) (*Root, error) { return open(real, node) }

func open(s system, node string) (*Root, error) {
	if err := checkName(node); err != nil {
		return nil, fmt.Errorf("cgroup: node %w", err)
	}
	places, unified, err := s.find()
	if err != nil {
		return nil, fmt.Errorf("cgroup: %w", err)
	}
	r := &Root{unified: unified, places: places, node: node}
	if err := r.settle(); err != nil {
		return nil, fmt.Errorf("cgroup: %w", err)
	}
	for _, c := range []string{cpu, memory, pids} {
		if _, ok := r.places[c]; !ok {
			r.lacks = append(r.lacks, c)
		}
	}
	r.sweep()
	return r, nil
}

// settle creates the node's folders and locks them. If a concurrent sweep removes them before they
// are locked, settle tries again.
func (r *Root) settle() error {
	enter := r.enterV1
	if r.unified {
		enter = r.delegate
	}
	for range 100 {
		if err := enter(); err != nil {
			return err
		}
		lock, err := claim(r.folders()[0], claimWait)
		if errors.Is(err, fs.ErrNotExist) {
			continue // swept; after a retry the folder is locked in time
		}
		if err != nil {
			return err
		}
		if err := enter(); err != nil {
			_ = lock.Close()
			return err
		}
		r.lock = lock
		return nil
	}
	return fmt.Errorf("%s is removed again and again", r.folders()[0])
}

// mkdirAll is like os.MkdirAll, but tries again if another process removes an empty parent folder
// meanwhile.
func mkdirAll(folder string) error {
	err := os.MkdirAll(folder, 0o755)
	for range 100 {
		if !errors.Is(err, fs.ErrNotExist) {
			break
		}
		err = os.MkdirAll(folder, 0o755)
	}
	return err
}

// mkdirOwn is mkdirAll for a folder that this process makes folders in. A daemon of another user
// may have left the folder.
func mkdirOwn(folder string) error {
	if err := mkdirAll(folder); err != nil {
		return err
	}
	err := unix.Faccessat(unix.AT_FDCWD, folder, unix.W_OK, unix.AT_EACCESS)
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // a sweep of another node may have removed it
		return fmt.Errorf("%s is of another user: %w", folder, err)
	}
	return nil
}

// Lacks returns which of the controllers cpu, memory and pids cannot be used here, so that their
// limits have no effect.
func (r *Root) Lacks() []string { return r.lacks }

// enterV1 creates the node's folders, and drops controllers for which it cannot.
func (r *Root) enterV1() error {
	var errs []error
	for _, c := range r.controllers() {
		err := mkdirOwn(r.folder(c))
		if here, there := filepath.Join(filepath.Dir(r.places[c].mount), c), r.places[c].mount; err == nil && !same(here, there) {
			err = fmt.Errorf("%s is mounted on %s, want a folder or link of the controller's name beside it", c, there)
		}
		if err != nil {
			errs = append(errs, err)
			delete(r.places, c)
		}
	}
	if len(r.places) == 0 {
		return errors.Join(errs...)
	}
	return nil
}

func same(a, b string) bool {
	x, err := os.Stat(a)
	y, err2 := os.Stat(b)
	return err == nil && err2 == nil && os.SameFile(x, y)
}

// delegate creates the node's folder and enables the controllers for it.
func (r *Root) delegate() error {
	if len(r.places) == 0 {
		return errors.New("this process's group has none of the controllers cpu, memory and pids: want a group that was delegated, " +
			"as by systemd-run --scope -p Delegate=yes")
	}
	var home string
	for _, p := range r.places {
		home = p.dir()
	}
	folder := filepath.Join(home, above, r.node)
	if err := mkdirAll(folder); err != nil {
		return err
	}
	wanted := r.controllers()
	err := enable(home, wanted)
	if errors.Is(err, unix.EBUSY) {
		if err = moveProcesses(home); err == nil {
			err = enable(home, wanted)
		}
	}
	if err != nil {
		return fmt.Errorf("%w: want a group of its own that was delegated, as by systemd-run --scope -p Delegate=yes", err)
	}
	if err := enable(filepath.Join(home, above), wanted); err != nil {
		return err
	}
	return enable(folder, wanted)
}

// enable enables controllers for the groups in a folder.
func enable(folder string, controllers []string) error {
	return os.WriteFile(filepath.Join(folder, "cgroup.subtree_control"), []byte("+"+strings.Join(controllers, " +")), 0)
}

// moveProcesses moves the processes of a v2 group into a child group, because the kernel allows
// children with controllers only in a group without processes. It fails if some of the processes
// are neither this process nor its descendants. In a container, whose own group looks like the
// root, all processes are moved.
func moveProcesses(home string) error {
	procs, err := readPIDs(filepath.Join(home, "cgroup.procs"))
	if err != nil {
		return err
	}
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return err
	}
	container := strings.Contains("\n"+string(own), "\n0::/\n")
	for _, pid := range procs {
		if !container && !descends(pid, os.Getpid()) {
			return fmt.Errorf("%s has processes that are not ours, such as %d", home, pid)
		}
	}
	to := filepath.Join(home, leaf)
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	for _, pid := range procs {
		err := os.WriteFile(filepath.Join(to, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0)
		if err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("process %d: %w", pid, err)
		}
	}
	return nil
}

// folder is where a controller's groups of this node are.
func (r *Root) folder(controller string) string {
	return filepath.Join(r.places[controller].dir(), above, r.node)
}

// folders returns the node's folders of all hierarchies, without duplicates.
func (r *Root) folders() []string {
	var all []string
	for c := range r.places {
		all = append(all, r.folder(c))
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// Create creates an empty group with these limits. It kills and removes what is left of an earlier
// group with this name. A name FAMILY/NAME makes a group of a family. In version 2, the first group
// of a family has no limits before Enforce.
func (r *Root) Create(name string, l Limits) (*Group, error) {
	if err := checkGroup(name); err != nil {
		return nil, fmt.Errorf("cgroup: %w", err)
	}
	g := r.group(name)
	err := g.remove()
	switch {
	case err != nil:
	case !r.unified:
		g.v1, err = cgroup1.New(r.pathV1(g.path), r.resourcesV1(l), cgroup1.WithHierarchy(r.hierarchyV1))
	case g.founds():
		err = g.found(l)
	default:
		err = g.createV2(l)
	}
	if err == nil && l.CPUMilli > 0 {
		err = g.SetCPU(l.CPUMilli)
	}
	if err != nil {
		_ = g.Remove() // a part of it may exist
		return nil, fmt.Errorf("cgroup %s: %w", name, err)
	}
	g.weighFamily()
	return g, nil
}

// createV2 creates a group in version 2.
func (g *Group) createV2(l Limits) (err error) {
	if family := g.family(); family != "" {
		if err := enable(filepath.Join(g.root.folders()[0], family), g.root.controllers()); err != nil {
			return err
		}
	}
	g.v2, err = cgroup2.NewManager(g.root.folders()[0], "/"+g.path, g.root.resourcesV2(l))
	return err
}

// Adopt returns a group that an earlier process created, with its present limits.
func (r *Root) Adopt(name string) (*Group, error) {
	if err := checkGroup(name); err != nil {
		return nil, fmt.Errorf("cgroup: %w", err)
	}
	g := r.group(name)
	for _, dir := range g.dirs() {
		if _, err := os.Stat(dir); err != nil {
			return nil, fmt.Errorf("cgroup: %w", err)
		}
	}
	var err error
	if r.unified {
		g.v2, err = cgroup2.Load("/"+g.path, cgroup2.WithMountpoint(r.folders()[0]))
	} else {
		g.v1, err = cgroup1.Load(r.pathV1(g.path), cgroup1.WithHierarchy(r.hierarchyV1))
	}
	if err != nil {
		return nil, fmt.Errorf("cgroup %s: %w", name, err)
	}
	return g, nil
}

// Names returns the groups that there are, sorted. A family without groups is listed as FAMILY/.
func (r *Root) Names() ([]string, error) {
	found := map[string]bool{}
	for _, folder := range r.folders() {
		names, err := folderNames(folder)
		if err != nil {
			return nil, fmt.Errorf("cgroup: %w", err)
		}
		for _, name := range names {
			found[name] = true
		}
	}
	for name := range found { // a family may have groups in some hierarchies alone
		if family, own, ok := strings.Cut(name, "/"); ok && own != "" {
			delete(found, family+"/")
		}
	}
	return slices.Sorted(maps.Keys(found)), nil
}

// Retain kills and removes all groups except those with these names.
func (r *Root) Retain(names []string) error {
	have, err := r.Names()
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range have {
		if !slices.Contains(names, name) {
			errs = append(errs, r.group(name).Remove())
		}
	}
	return errors.Join(errs...)
}

// Close removes the folders of this node if they are empty, and lets others open it.
func (r *Root) Close() error {
	defer r.lock.Close()
	for _, folder := range slices.Backward(r.folders()) { // the locked folder goes last
		if os.Remove(folder) == nil {
			_ = os.Remove(filepath.Dir(folder)) // fails while other nodes have groups
		}
	}
	return nil
}

func (r *Root) group(name string) *Group { return &Group{root: r, name: name, path: pathOf(name)} }

// controllers returns the controllers that groups have, sorted.
func (r *Root) controllers() []string { return slices.Sorted(maps.Keys(r.places)) }

// checkName makes sure that a name from outside is a single folder.
func checkName(name string) error {
	if name == "" || len(name) > 200 || name[0] == '.' || strings.ContainsAny(name, "/\x00\n") {
		return fmt.Errorf("name %q: want one of at most 200 bytes without slashes that does not begin with a dot", name)
	}
	return nil
}

// pathV1 is a group as the library wants it: its path below each controller's mount. path is below
// the node's folder.
func (r *Root) pathV1(path string) cgroup1.Path {
	return func(c cgroup1.Name) (string, error) {
		p, ok := r.places[string(c)]
		if !ok {
			return "", cgroup1.ErrControllerNotActive
		}
		return filepath.Join(p.home, above, r.node, path), nil
	}
}

// hierarchyV1 are the controllers of v1 that may be used.
func (r *Root) hierarchyV1() ([]cgroup1.Subsystem, error) {
	var all []cgroup1.Subsystem
	for c, p := range r.places {
		switch root := filepath.Dir(p.mount); c {
		case cpu:
			all = append(all, cgroup1.NewCpu(root))
		case cpuacct:
			all = append(all, cgroup1.NewCpuacct(root))
		case memory:
			all = append(all, cgroup1.NewMemory(root, cgroup1.OptionalSwap()))
		case pids:
			all = append(all, cgroup1.NewPids(root))
		}
	}
	return all, nil
}

func (r *Root) resourcesV1(l Limits) *specs.LinuxResources {
	res := &specs.LinuxResources{}
	if l.Memory > 0 {
		res.Memory = &specs.LinuxMemory{Limit: &l.Memory, Swappiness: new(uint64)}
		if _, err := os.Stat(filepath.Join(r.folder(memory), "memory.memsw.limit_in_bytes")); err == nil {
			res.Memory.Swap = &l.Memory // of both together
		}
	}
	if n := int64(l.PIDs); n > 0 {
		res.Pids = &specs.LinuxPids{Limit: &n}
	}
	return res
}

func (r *Root) resourcesV2(l Limits) *cgroup2.Resources {
	res := &cgroup2.Resources{}
	if _, ok := r.places[memory]; ok && l.Memory > 0 {
		res.Memory = &cgroup2.Memory{Max: &l.Memory}
		if _, err := os.Stat(filepath.Join(r.folder(memory), "memory.swap.max")); err == nil {
			res.Memory.Swap = new(int64)
		}
	}
	if _, ok := r.places[pids]; ok && l.PIDs > 0 {
		res.Pids = &cgroup2.Pids{Max: int64(l.PIDs)}
	}
	return res
}
