package container

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/cgroup"
	"github.com/stagecoach-serving/stagecoach/keysmanager/container/entry"
)

// groups says in which cgroups the processes of a container are. containerd's tools show those that
// the first process is in when the container has been created.
//
// In version 2, the container's group is that of the command, or the folder of its family. In
// version 1, the hierarchies may have these at different paths, which a container's spec cannot
// say. So the container has a group of its own, in which it stays in the hierarchies that have none
// for the command, such as devices. A hook moves the first process into the others.
type groups struct {
	path string     // of the container's group, as its spec has it
	hook []string   // files by which the hook moves the first process
	leaf []*os.File // by which that enters the program's groups, before it starts; nil: it is there
	back []string   // by which that goes back, once the program runs; nil: it stays
}

// ownGroup returns the path of the group of a container that has one of its own.
func ownGroup(id string) string { return "/stagecoach." + id }

// groupsFor returns the groups of a container whose program enters the groups of these files.
// Without files these are the groups of this process, as a child process would have them. So the
// program of a watchdog has the limits of its replica.
func groupsFor(id string, files []*os.File) (groups, error) {
	if len(files) == 0 {
		own, err := cgroup.OpenOwn()
		if err != nil {
			return groups{}, err
		}
		g := groups{path: ownGroup(id)}
		for _, f := range own {
			g.hook = append(g.hook, f.Name())
			_ = f.Close() // nothing was written
		}
		return g, nil
	}
	var folders []string
	unified := false
	for _, f := range files {
		var s unix.Statfs_t
		if err := unix.Fstatfs(int(f.Fd()), &s); err != nil {
			return groups{}, fmt.Errorf("cgroup: %w", err)
		}
		unified = unified || s.Type == unix.CGROUP2_SUPER_MAGIC
		name, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
		if err != nil {
			return groups{}, fmt.Errorf("cgroup: %w", err)
		}
		folders = append(folders, filepath.Dir(name))
	}
	return groupsIn(id, folders, files, unified), nil
}

// groupsIn is groupsFor for files of groups with these folders.
func groupsIn(id string, folders []string, files []*os.File, unified bool) groups {
	g := groups{path: ownGroup(id)}
	for _, folder := range folders {
		family := cgroup.FamilyFolder(folder)
		if family != "" {
			g.leaf, folder = files, family
		}
		procs := filepath.Join(folder, "cgroup.procs")
		switch {
		case unified:
			g.path = strings.TrimPrefix(folder, "/sys/fs/cgroup")
		case family != "":
			g.hook, g.back = append(g.hook, procs), append(g.back, procs)
		default:
			g.hook = append(g.hook, procs)
		}
	}
	return g
}

// addTo adds the groups to the spec of a container whose first program is init.
func (g groups) addTo(s *specs.Spec, init string) {
	s.Linux.CgroupsPath = g.path
	if len(g.hook) == 0 {
		return
	}
	if s.Hooks == nil {
		s.Hooks = &specs.Hooks{}
	}
	timeout := int(startTimeout.Seconds())
	own := specs.Hook{Path: init, Args: append([]string{filepath.Base(init), entry.EnterGroups}, g.hook...), Timeout: &timeout}
	s.Hooks.CreateRuntime = append(s.Hooks.CreateRuntime, own)
}

// enter moves the first process of a container, which waits for its start, into the groups of the
// program. In version 1 the files are named tasks, and take in one thread. That is enough: runc
// calls exec from this one, and the kernel ends all others then.
func (g groups) enter(init int) error {
	for _, f := range g.leaf {
		if _, err := f.WriteString(strconv.Itoa(init)); err != nil {
			return fmt.Errorf("cgroup of the container's program: %w", err)
		}
	}
	return nil
}

// leave moves the first process back, once the program runs. So the limits on the program are not
// those of the process that tells how it has ended.
func (g groups) leave(init int) error {
	for _, procs := range g.back {
		if err := os.WriteFile(procs, []byte(strconv.Itoa(init)), 0); err != nil {
			return fmt.Errorf("cgroup of the container: %w", err)
		}
	}
	return nil
}

// removeLeft removes what a container has left on this machine beside its processes: the group of
// its own, which runc does not remove if it was killed while it made the container, and the folder.
func removeLeft(id string) error {
	if err := cgroup.RemoveFolders(ownGroup(id)); err != nil {
		return err
	}
	return (&folder{filepath.Join(Folders, id)}).remove()
}
