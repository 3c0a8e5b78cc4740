package container

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// Names of labels of containers.
const (
	labelNode     = "stagecoach.dev/node"
	labelOwner    = "stagecoach.dev/warden"
	labelFunction = "stagecoach.dev/function"
	labelImage    = "stagecoach.dev/image"
	labelReplica  = "stagecoach.dev/replica"
)

// labels returns the labels of a command's container.
func (r *Runtime) labels(c sandbox.Command) map[string]string {
	out := map[string]string{labelNode: r.cfg.Node, labelOwner: r.owner}
	for name, label := range map[string]string{sandbox.LabelFunction: labelFunction, sandbox.LabelImage: labelImage, sandbox.LabelReplica: labelReplica} {
		for _, from := range []map[string]string{r.cfg.Labels, c.Labels} {
			if v := from[name]; v != "" {
				out[label] = v
			}
		}
	}
	return out
}

// ownName returns a name that identifies a Runtime of this process: its number, the time of its
// start, and a random text.
func ownName() string {
	return fmt.Sprintf("%d-%s-%s", os.Getpid(), startOf(os.Getpid()), strings.ToLower(rand.Text()[:8]))
}

// startOf returns when a process has started, in the kernel's clock; empty: it does not run.
func startOf(pid int) string {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	// The fields after the name are state, parent, … The name may contain any characters.
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) < 20 || fields[0][0] == 'Z' || fields[0][0] == 'X' {
		return ""
	}
	return string(fields[19])
}

// lives reports whether the process of a Runtime lives.
func lives(owner string) bool {
	parts := strings.Split(owner, "-")
	if len(parts) != 3 {
		return false
	}
	pid, err := strconv.Atoi(parts[0])
	return err == nil && startOf(pid) == parts[1]
}

// Sweep removes what killed processes of this node have left: containers and folders. What it
// cannot remove, it logs.
func (r *Runtime) Sweep(ctx context.Context) {
	r.sweeping.Lock()
	defer r.sweeping.Unlock()
	ctx, cancel := context.WithTimeout(ctx, removeTimeout)
	defer cancel()
	left, err := r.client.Containers(ctx, fmt.Sprintf("labels.%q==%q", labelNode, r.cfg.Node))
	if err != nil {
		r.cfg.Log.Warn("containers of an earlier KeysManager are not looked for", "error", err)
		return
	}
	for _, c := range left {
		labels, err := c.Labels(ctx)
		if err != nil || lives(labels[labelOwner]) { // it has been removed meanwhile
			continue
		}
		if err := r.removeContainer(ctx, c.ID()); err != nil {
			r.cfg.Log.Warn("container of an earlier KeysManager is not removed", "container", c.ID(), "error", err)
			continue
		}
		if err := (&folder{filepath.Join(Folders, c.ID())}).remove(); err != nil {
			r.cfg.Log.Warn("folder of a container is not removed", "container", c.ID(), "error", err)
		}
	}
	folders, _ := os.ReadDir(Folders) // there are none
	for _, e := range folders {
		f := &folder{filepath.Join(Folders, e.Name())}
		if who, err := f.owner(); err == nil && (who.Node != r.cfg.Node || lives(who.Owner)) || err != nil && !f.abandoned() {
			continue
		}
		if err := f.remove(); err != nil {
			r.cfg.Log.Warn("folder of a container is not removed", "container", e.Name(), "error", err)
		}
	}
}
