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
		who, err := f.owner()
		// A folder is removed a moment after its program has ended.
		if err == nil && who.Node == node && who.PID != 0 && startOf(who.PID) != "" {
			out = append(out, Info{ID: e.Name(), Function: who.Function, Replica: who.Replica, PID: who.PID, Class: who.Class})
		}
	}
	slices.SortFunc(out, func(a, b Info) int {
		return cmp.Or(cmp.Compare(a.Function, b.Function), cmp.Compare(a.Replica, b.Replica))
	})
	return out
}

// whose returns to whom the container of a command belongs.
func (r *Runtime) whose(c sandbox.Command) whose {
	l := r.labels(c)
	return whose{Node: r.cfg.Node, Owner: r.owner, Function: l[labelFunction], Replica: l[labelReplica], Class: c.Options.Class}
}
