package container

import (
	"cmp"
	"os"
	"path/filepath"
	"slices"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// Info describes a container.
type Info struct {
	ID       string
	Function string
	Replica  string // or what else it is, such as a zygote
	PID      int    // of its program on this machine
	Class    string // its runtime class; empty: the default
}

// List returns the containers of a node whose programs run, whichever Runtime has started them:
// sorted by function, then by replica. It does not ask containerd.
func List(node string) (out []Info) {
	entries, _ := os.ReadDir(Folders) // there are none
	for _, e := range entries {
		f := folder{filepath.Join(Folders, e.Name())}
		of, err := f.record()
		// A folder is removed a moment after its program has ended.
		if err == nil && of.Node == node && of.PID != 0 && startOf(of.PID) != "" {
			out = append(out, Info{ID: e.Name(), Function: of.Function, Replica: of.Replica, PID: of.PID, Class: of.Class})
		}
	}
	slices.SortFunc(out, func(a, b Info) int {
		return cmp.Or(cmp.Compare(a.Function, b.Function), cmp.Compare(a.Replica, b.Replica))
	})
	return out
}

// record returns the record of a command's container, whose program does not run yet.
func (r *Runtime) record(c sandbox.Command) record {
	l := r.labels(c)
	return record{Node: r.cfg.Node, Owner: r.owner, Function: l[labelFunction], Replica: l[labelReplica], Class: c.Options.Class}
}
