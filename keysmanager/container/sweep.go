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
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/errdefs"

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

// sweeps is the state of a Runtime's Sweeps. Its fields but running are guarded by Runtime.mu.
type sweeps struct {
	running sync.Mutex // held while a Sweep runs

	waiting bool            // a Sweep in the background has not begun yet
	due     bool            // a killed process may have left what no Sweep has removed
	late    map[string]bool // containers that removeLate removes
}

// sweepSoon calls Sweep in the background. One that waits for another finds what all would find.
// Once the Runtime is closed, Close sweeps instead.
func (r *Runtime) sweepSoon() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sweeps.due = true
	r.sweepDue()
}

// sweepDue calls Sweep in the background, if one is due. The caller holds r.mu.
func (r *Runtime) sweepDue() {
	if r.closed || r.sweeps.waiting || !r.sweeps.due {
		return
	}
	r.sweeps.waiting = true
	r.removes.Go(func() { r.Sweep(r.remove) })
}

// sweepLast sweeps until no Sweep is due, or until Close has waited long enough.
func (r *Runtime) sweepLast() {
	for {
		r.mu.Lock()
		due := r.sweeps.due
		r.mu.Unlock()
		if !due {
			return
		}
		err := r.sweep(r.remove)
		r.removes.Wait() // for removeLate
		if err == nil {
			continue
		}
		select {
		case <-time.After(retryPause): // containerd may come back
		case <-r.remove.Done():
			r.cfg.Log.Warn("what killed processes have left is not removed; the node's next start tries it again", "error", err)
			return
		}
	}
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
// folders. It also tries again what this Runtime could not remove before. If the Sweep fails, it
// logs why, and the next start, the next end of a watchdog, or Close tries it again. What a killed
// process had asked containerd for may appear later: Sweep has it removed in the background. The
// caller calls Sweep before Close.
func (r *Runtime) Sweep(ctx context.Context) {
	if err := r.sweep(ctx); err != nil {
		r.cfg.Log.Warn("what killed processes have left is not removed; a later start, the end of a watchdog or the node's end tries it again", "error", err)
	}
}

// sweep does the work of Sweep. If it fails, another one is due.
func (r *Runtime) sweep(ctx context.Context) error {
	r.sweeps.running.Lock()
	defer r.sweeps.running.Unlock()
	r.mu.Lock()
	r.sweeps.waiting, r.sweeps.due = false, false
	r.mu.Unlock()
	r.retry(cap(r.removing) / 2)
	ctx, cancel := context.WithTimeout(ctx, removeTimeout)
	defer cancel()
	left, err := r.orphans(ctx)
	errs := []error{err}
	for id, starting := range left {
		if starting {
			r.removeLate(id)
			continue
		}
		errs = append(errs, r.removeOrphan(ctx, id))
	}
	err = errors.Join(errs...)
	r.swept(err)
	return err
}

// swept notes whether another Sweep is due after one, or after a part of one.
func (r *Runtime) swept(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sweeps.due = r.sweeps.due || err != nil
}

// orphans returns the ids of containers to remove: those of containers and folders that killed
// processes of this node have left, and those of shims whose container no Runtime has. The value is
// true if a process was killed during the start, so that containerd may still make the container.
// If containerd does not answer, orphans returns none.
func (r *Runtime) orphans(ctx context.Context) (starting map[string]bool, _ error) {
	shims := r.shims.all() // before the containers: see unowned
	containers, err := r.client.Containers(ctx, fmt.Sprintf("labels.%q==%q", labelNode, r.cfg.Node))
	if err != nil {
		return nil, fmt.Errorf("containers of killed processes are not looked for: %w", err)
	}
	starting = map[string]bool{}
	var errs []error
	for _, c := range containers {
		info, err := c.Info(ctx, containerd.WithoutRefreshedMetadata)
		if err == nil && !lives(info.Labels[labelOwner]) {
			starting[c.ID()] = false
		}
		errs = append(errs, err)
	}
	folders, _ := os.ReadDir(Folders) // there are none
	for _, e := range folders {
		f := &folder{filepath.Join(Folders, e.Name())}
		of, err := f.record()
		switch {
		case errors.Is(err, fs.ErrNotExist):
			if f.age() >= ownerless {
				starting[e.Name()] = false
			}
		case err == nil && of.Node == r.cfg.Node && !lives(of.Owner):
			starting[e.Name()] = of.PID == 0
		}
	}
	for _, id := range shims {
		none, err := unowned(ctx, r.client, id)
		if none {
			starting[id] = false
		}
		errs = append(errs, err)
	}
	return starting, errors.Join(errs...)
}

// newIDs matches the ids that newID returns.
var newIDs = regexp.MustCompile(`^[a-zA-Z0-9-]+-[a-z2-7]{12}$`)

// unowned reports whether some Runtime has made the container of a shim, and no Runtime has it any
// more: it has neither a record in containerd nor a folder. A start makes both before the shim, and
// a removal ends the shim before it removes the folder. So no Runtime, of any node, is starting or
// using such a container.
func unowned(ctx context.Context, client *containerd.Client, id string) (bool, error) {
	if _, err := os.Lstat(filepath.Join(Folders, id)); !errors.Is(err, fs.ErrNotExist) || !newIDs.MatchString(id) {
		return false, nil
	}
	_, err := client.LoadContainer(ctx, id)
	if errdefs.IsNotFound(err) {
		return true, nil
	}
	return false, err
}

// removeOrphan removes a container that a killed process has left, and all that belongs to it.
func (r *Runtime) removeOrphan(ctx context.Context, id string) error {
	if err := r.removeAll(ctx, id); err != nil {
		return fmt.Errorf("container %s of a killed process: %w", id, err)
	}
	return nil
}

// removeLate removes in the background what a killed process has left of a start, once containerd
// makes nothing of it any more. The caller is a Sweep under way.
func (r *Runtime) removeLate(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.sweeps.late[id] {
		return
	}
	r.sweeps.late[id] = true
	r.removes.Go(func() {
		r.awaitLate()
		ctx, cancel := context.WithTimeout(r.remove, removeTimeout)
		defer cancel()
		err := r.removeOrphan(ctx, id)
		if err != nil {
			r.cfg.Log.Warn("not removed; a later Sweep tries it again", "error", err)
		}
		r.mu.Lock()
		delete(r.sweeps.late, id)
		r.mu.Unlock()
		r.swept(err)
	})
}

// awaitLate waits until containerd makes nothing any more of a call that has got no answer.
func (r *Runtime) awaitLate() {
	select {
	case <-time.After(lateTime):
	case <-r.remove.Done():
	}
}
