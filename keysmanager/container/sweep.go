package container

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	containerd "github.com/containerd/containerd/v2/client"

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
// start since the machine's, the machine's start, and a random text.
func ownName() string {
	return fmt.Sprintf("%d-%s-%s-%s", os.Getpid(), startOf(os.Getpid()), boot(), strings.ToLower(rand.Text()[:8]))
}

// boot returns what identifies this start of the machine.
var boot = sync.OnceValue(func() string {
	b, _ := os.ReadFile("/proc/sys/kernel/random/boot_id") // without /proc, no process is found either
	return strings.ReplaceAll(strings.TrimSpace(string(b)), "-", "")
})

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
	if len(parts) != 4 || parts[2] != boot() {
		return false
	}
	pid, err := strconv.Atoi(parts[0])
	return err == nil && startOf(pid) == parts[1]
}

// sweepSoon calls Sweep in the background. One that waits for another finds what all would find.
func (r *Runtime) sweepSoon() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed || r.waiting {
		return
	}
	r.waiting = true
	r.removes.Go(func() { r.Sweep(r.open) })
}

// ownerless is the age from which a folder without an owner is removed. A folder has none while it
// is made or removed.
const ownerless = time.Minute

// age returns the time since a folder was changed; 0: it is not there.
func (f *folder) age() time.Duration {
	info, err := os.Stat(f.path)
	if err != nil {
		return 0
	}
	return time.Since(info.ModTime())
}

// Sweep removes what killed processes of this node have left: containers, with their cgroups and
// folders. It also tries
// again what this Runtime could not remove before. What it cannot remove, it logs. The caller calls
// it before Close.
func (r *Runtime) Sweep(ctx context.Context) {
	r.sweeping.Lock()
	defer r.sweeping.Unlock()
	r.mu.Lock()
	r.waiting = false
	r.mu.Unlock()
	r.retry(cap(r.removing) / 2)
	ctx, cancel := context.WithTimeout(ctx, removeTimeout)
	defer cancel()
	left, err := r.client.Containers(ctx, fmt.Sprintf("labels.%q==%q", labelNode, r.cfg.Node))
	if err != nil {
		r.cfg.Log.Warn("containers of killed processes are not looked for", "error", err)
		return
	}
	for _, c := range left {
		info, err := c.Info(ctx, containerd.WithoutRefreshedMetadata)
		if err != nil || lives(info.Labels[labelOwner]) {
			continue
		}
		if err := r.removeContainer(ctx, c.ID()); err != nil {
			r.cfg.Log.Warn("container of a killed process is not removed", "container", c.ID(), "error", err)
			continue
		}
		if err := removeLeft(c.ID()); err != nil {
			r.cfg.Log.Warn("folder or cgroup of a container is not removed", "container", c.ID(), "error", err)
		}
	}
	folders, _ := os.ReadDir(Folders) // there are none
	for _, e := range folders {
		f := &folder{filepath.Join(Folders, e.Name())}
		of, err := f.record()
		switch {
		case errors.Is(err, fs.ErrNotExist):
			if f.age() < ownerless {
				continue
			}
		case err != nil, of.Node != r.cfg.Node, lives(of.Owner):
			continue
		}
		if err := removeLeft(e.Name()); err != nil {
			r.cfg.Log.Warn("folder or cgroup of a container is not removed", "container", e.Name(), "error", err)
		}
	}
}
