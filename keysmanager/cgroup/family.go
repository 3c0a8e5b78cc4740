package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/containerd/cgroups/v3/cgroup2"
)

// A family is a zygote and its children, which are in one container if there are containers. Their
// groups are in a folder of their own, NODE/family-FAMILY/NAME. That folder is a group, too. It has
// no limits, so each process is bounded by its own group alone. It exists as long as one of the
// family's groups does.
//
// In version 1 the container's first process, which is none of the family's, is in the folder
// itself. In version 2 only a group without processes may enable controllers for the groups in it,
// and a container's first process begins in the folder. So the first group of a family is created
// without limits, the container's process moves there, and then Enforce enables the controllers.

const familyPrefix = "family-"

// pathOf returns the path of a group below the folder of its node. That of FAMILY/ is the path of
// the family's folder.
func pathOf(name string) string {
	if family, own, ok := strings.Cut(name, "/"); ok {
		return filepath.Join(familyPrefix+family, own)
	}
	return name
}

// checkGroup makes sure that a name from outside is that of a group or of a family's group.
func checkGroup(name string) error {
	family, own, ok := strings.Cut(name, "/")
	if !ok {
		family, own = "none", name
	}
	if err := errors.Join(checkName(family), checkName(own)); err != nil {
		return err
	}
	if !ok && strings.HasPrefix(name, familyPrefix) {
		return fmt.Errorf("name %q: want one that does not begin with %s", name, familyPrefix)
	}
	return nil
}

// folderNames returns the names of the groups in the folder of a node. If there is no such folder,
// it has no groups.
func folderNames(folder string) ([]string, error) {
	groups, err := subfolders(folder)
	if err != nil {
		return nil, err
	}
	var all []string
	for _, group := range groups {
		family, ok := strings.CutPrefix(group, familyPrefix)
		if !ok {
			all = append(all, group)
			continue
		}
		of, err := subfolders(filepath.Join(folder, group))
		if err != nil {
			return nil, err
		}
		if len(of) == 0 {
			all = append(all, family+"/")
		}
		for _, own := range of {
			all = append(all, family+"/"+own)
		}
	}
	return all, nil
}

func subfolders(folder string) (names []string, err error) {
	entries, err := os.ReadDir(folder)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// FamilyFolder returns the folder of the family of a group, which is named by its own folder.
// Empty: the group is in no family.
func FamilyFolder(group string) string {
	if family := filepath.Dir(group); strings.HasPrefix(filepath.Base(family), familyPrefix) {
		return family
	}
	return ""
}

// family returns the path of the group's family below the folder of the node; empty: it has none.
func (g *Group) family() string {
	if family := filepath.Dir(g.path); family != "." {
		return family
	}
	return ""
}

// founds reports whether the group is the first one of a family.
func (g *Group) founds() bool {
	if g.family() == "" {
		return false
	}
	_, err := os.Stat(filepath.Dir(g.dirs()[0]))
	return errors.Is(err, fs.ErrNotExist)
}

// found creates the first group of a family in version 2, without limits.
func (g *Group) found(l Limits) (err error) {
	if err := mkdirAll(g.dirs()[0]); err != nil {
		return err
	}
	g.pending = &l
	g.v2, err = cgroup2.Load("/"+g.path, cgroup2.WithMountpoint(g.root.folders()[0]))
	return err
}

// Enforce puts the limits of a family's first group into force, once the process of that group
// runs. For other groups, and in version 1, it does nothing.
func (g *Group) Enforce() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.pending == nil || g.removed {
		return nil
	}
	err := enable(filepath.Dir(g.dirs()[0]), g.root.controllers())
	if err == nil {
		err = g.v2.Update(g.root.resourcesV2(*g.pending))
	}
	if _, ok := g.root.places[cpu]; ok && err == nil && g.pending.CPUMilli > 0 {
		err = g.setCPU(g.pending.CPUMilli)
	}
	if err != nil {
		return fmt.Errorf("cgroup %s: its limits: %w", g.name, err)
	}
	g.pending = nil
	return nil
}

// weighFamily sets the share of the processor that the group's family gets when the processor is
// short. The kernel would give a family as much as a single group, whatever its number of replicas.
// Of the family's groups, all but the zygote's and that of the spare child are taken for replicas.
func (g *Group) weighFamily() {
	file, weight, most := "cpu.shares", 1024, 262_144 // the kernel's default and limit
	if g.root.unified {
		file, weight, most = "cpu.weight", 100, 10_000
	}
	if _, ok := g.root.places[cpu]; !ok || g.family() == "" {
		return
	}
	g.root.weighing.Lock()
	defer g.root.weighing.Unlock()
	dir := filepath.Join(g.root.folder(cpu), g.family())
	groups, err := subfolders(dir)
	if err != nil {
		return
	}
	weight = min(weight*max(1, len(groups)-2), most)
	// It fails if the family has just been removed. With a wrong weight, everything runs.
	if f, err := os.OpenFile(filepath.Join(dir, file), os.O_WRONLY, 0); err == nil {
		_, _ = f.WriteString(strconv.Itoa(weight))
		_ = f.Close()
	}
}

// removeFamily removes the folder of the group's family if no group is left in it, and kills what
// is in it: the first process of a container whose zygote has ended.
func (g *Group) removeFamily() error {
	path := g.family()
	if path == "" {
		return nil
	}
	family := &Group{root: g.root, name: g.name, path: path}
	for _, dir := range family.dirs() {
		if left, err := subfolders(dir); err != nil || len(left) > 0 {
			return err
		}
	}
	return family.remove()
}

// RemoveFolders removes the folder with this path below the mount of each hierarchy of cgroups,
// with the groups in it. It leaves groups with processes, and then returns an error.
func RemoveFolders(path string) error { return removeFolders(real, path) }

func removeFolders(s system, path string) error {
	f, err := os.Open(s.mountinfo)
	if err != nil {
		return err
	}
	defer f.Close()
	mounts, err := parseMounts(f)
	if err != nil {
		return fmt.Errorf("%s: %w", s.mountinfo, err)
	}
	var errs []error
	for _, m := range mounts {
		errs = append(errs, removeEmpty(filepath.Join(m.point, path)))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("cgroups %s: %w", path, err)
	}
	return nil
}

// removeEmpty removes a group and the groups in it, unless they have processes.
func removeEmpty(dir string) error {
	err := os.Remove(dir)
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	inner, err := subfolders(dir)
	if err != nil {
		return err
	}
	for _, name := range inner {
		if err := removeEmpty(filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
