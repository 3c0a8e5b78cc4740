package cgroup

import (
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// Found is what a machine offers for groups of replicas.
type Found struct {
	Unified  bool     // cgroups v2
	Has      []string // controllers that this process could use, sorted
	Lacks    []string // controllers that are missing, sorted
	Writable bool     // this process may create groups
	Folder   string   // where it would create them
}

// Look says what [Open] would find. root is the folder that has /proc; empty: the root. It changes
// nothing.
func Look(root string) (Found, error) {
	s := system{filepath.Join(root, real.cgroup), filepath.Join(root, real.mountinfo)}
	places, unified, err := s.find()
	if err != nil {
		return Found{}, err
	}
	f := Found{Unified: unified, Writable: true}
	for _, c := range []string{cpu, memory, pids} {
		p, ok := places[c]
		if !ok {
			f.Lacks = append(f.Lacks, c)
			continue
		}
		f.Has, f.Folder = append(f.Has, c), p.dir()
		f.Writable = f.Writable && unix.Access(p.dir(), unix.W_OK) == nil
	}
	slices.Sort(f.Lacks)
	f.Writable = f.Writable && len(f.Has) > 0
	return f, nil
}
