package main

import (
	"fmt"
	"hash/fnv"
	"log/slog"
	"path/filepath"
	"strings"

	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/keysmanager/cgroup"
)

// nodeGroups gives a KeysManager the cgroups of a node.
type nodeGroups struct{ *cgroup.Root }

type nodeGroup struct{ *cgroup.Group }

// Create implements keysmanager.Groups.
func (g nodeGroups) Create(name, _ string, l keysmanager.GroupLimits) (keysmanager.Group, error) {
	made, err := g.Root.Create(name, cgroup.Limits{Memory: l.Memory, CPUMilli: l.CPUMilli, PIDs: l.PIDs})
	if err != nil {
		return nil, err
	}
	return nodeGroup{made}, nil
}

// Adopt implements keysmanager.Groups.
func (g nodeGroups) Adopt(name string) (keysmanager.Group, error) {
	found, err := g.Root.Adopt(name)
	if err != nil {
		return nil, err
	}
	return nodeGroup{found}, nil
}

// Enforce implements keysmanager.Group.
func (g nodeGroup) Enforce(int) error { return g.Group.Enforce() }

// Usage implements keysmanager.Group.
func (g nodeGroup) Usage() (keysmanager.GroupUsage, error) {
	u, err := g.Group.Usage()
	return keysmanager.GroupUsage(u), err
}

// nodeID returns a name of a node that differs from that of another node of this name, whose state
// is in another folder.
func nodeID(node, state string) string {
	abs, err := filepath.Abs(state)
	if err != nil {
		abs = state
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(abs)) // never fails
	return fmt.Sprintf("%s-%08x", node, h.Sum32())
}

// openGroups returns the cgroups of a node. The state folder tells them from the cgroups of another
// node of the same name. If cgroups cannot be made, openGroups logs one warning and returns nil.
func openGroups(node, state string, log *slog.Logger) (keysmanager.Groups, func()) {
	root, err := cgroup.Open(nodeID(node, state))
	if err != nil {
		log.Warn("no cgroups: functions have no limits, and usage is estimated", "error", err)
		return nil, func() {}
	}
	if lacks := root.Lacks(); len(lacks) > 0 {
		log.Warn("some cgroup controllers are not available: their limits do not apply", "controllers", strings.Join(lacks, ", "))
	}
	return nodeGroups{root}, func() { _ = root.Close() } // only folders are left
}
