package pods

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/kube"
	"github.com/stagecoach-serving/stagecoach/keysmanager/container/entry"
	"github.com/stagecoach-serving/stagecoach/keysmanager/container/guest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// process is a pod and the program in it. Its fields but status are set before start returns it.
type process struct {
	of     *Runtime
	pod    kube.Pod
	guest  *guest.Guest  // nil: none yet
	conn   *entry.Conn   // nil: none yet
	init   *os.File      // pidfd of its first program; nil: none yet
	ended  chan struct{} // closed when it has ended; then status is set. nil: it never ran
	status unix.WaitStatus
	once   sync.Once // of Forget
}

// start makes a pod and starts a command's program in it.
func (r *Runtime) start(ctx context.Context, c sandbox.Command) (_ *process, err error) {
	switch {
	case c.Held:
		return nil, errors.New("spare pods are not built: want stagecoach.dev/spares: 0")
	case len(c.Options.Devices) > 0:
		return nil, errors.New("CDI devices are for --runtime containerd")
	case c.Chroot == "" && c.As == nil:
		return nil, errors.New("a pod needs a user of its own")
	}
	namespace, err := r.namespaceOf(r.label(c, sandbox.LabelFunction))
	if err != nil {
		return nil, err
	}
	o, err := outline(c)
	if err != nil {
		return nil, err
	}
	p := &process{of: r}
	if p.pod, err = r.cfg.Cluster.CreatePod(ctx, r.pod(c, namespace)); err != nil {
		return nil, err
	}
	r.mu.Lock()
	r.live[p] = true
	r.mu.Unlock()
	defer func() {
		if err != nil {
			p.Forget()
		}
	}()
	init, err := p.connect(ctx)
	if err != nil {
		return nil, err
	}
	if c.Chroot == "" {
		if err := c.Show(int(p.init.Fd())); err != nil {
			return nil, err
		}
	}
	until, _ := ctx.Deadline()
	if p.guest, err = guest.Begin(ctx, p.conn, c, o, init, until.Add(time.Second)); err != nil {
		return nil, err
	}
	p.ended = make(chan struct{})
	r.tasks.Go(func() { defer close(p.ended); p.status = p.awaitEnd() })
	return p, nil
}

// outline returns what the program of a command gets.
func outline(c sandbox.Command) (sandbox.Outline, error) {
	if c.Chroot == "" {
		return c.Outline("")
	}
	o := sandbox.Outline{Argv: c.Args(), Dir: filepath.Join("/", c.Dir), Env: []string{"PATH=" + sandbox.Path, "TMPDIR=/tmp"}}
	for name, value := range c.Env {
		o.Env = append(o.Env, name+"="+value)
	}
	return o, nil
}

// connect waits for the first program of the pod, and returns its number.
func (p *process) connect(ctx context.Context) (init int, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var asking sync.WaitGroup
	asking.Go(func() { p.watchTrouble(ctx, cancel) })
	defer asking.Wait()
	defer cancel(nil)
	folder := p.of.volume(p.pod.Metadata.UID, runVolume)
	for {
		if _, err := os.Stat(folder); err == nil {
			break
		} else if !errors.Is(err, fs.ErrNotExist) {
			return 0, err
		}
		select {
		case <-ctx.Done():
			return 0, p.why(ctx)
		case <-time.After(lookPause):
		}
	}
	l, err := entry.Listen(filepath.Join(folder, entry.Socket), -1, -1)
	if err != nil {
		return 0, err
	}
	// Any user of the pod may connect, and nobody else has the folder.
	if err := os.Chmod(filepath.Join(folder, entry.Socket), 0o666); err != nil {
		l.Close()
		return 0, err
	}
	defer context.AfterFunc(ctx, l.Close)()
	until, _ := ctx.Deadline()
	p.conn, init, err = l.AcceptFrom(func(pid int) bool {
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			return false
		}
		f := os.NewFile(uintptr(fd), "pidfd")
		if !isOf(pid, p.pod.Metadata.UID) {
			_ = f.Close()
			return false
		}
		p.init = f
		return true
	}, until.Add(time.Second))
	if err != nil && ctx.Err() != nil {
		err = p.why(ctx)
	}
	return init, err
}

// isOf reports whether a process is in a cgroup of a pod.
func isOf(pid int, uid string) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	text := string(b)
	return err == nil && (strings.Contains(text, "pod"+uid) || strings.Contains(text, "pod"+strings.ReplaceAll(uid, "-", "_")))
}

// watchTrouble asks the cluster from time to time why the pod does not start. It gives up the start
// if the pod never will.
func (p *process) watchTrouble(ctx context.Context, giveUp func(error)) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(troublePause):
		}
		now, err := p.of.cfg.Cluster.Pod(ctx, p.pod.Metadata.Namespace, p.pod.Metadata.Name)
		if kube.NotFound(err) {
			giveUp(fmt.Errorf("pod %s was deleted", p.pod.Metadata.Name))
			return
		}
		if text, final := now.Trouble(); err == nil && final {
			giveUp(fmt.Errorf("pod %s: %s", p.pod.Metadata.Name, text))
			return
		}
	}
}

// why returns why the pod has not started when ctx ended.
func (p *process) why(ctx context.Context) error {
	cause := context.Cause(ctx)
	short, cancel := context.WithTimeout(p.of.remove, endTimeout)
	defer cancel()
	if now, err := p.of.cfg.Cluster.Pod(short, p.pod.Metadata.Namespace, p.pod.Metadata.Name); err == nil {
		if text, final := now.Trouble(); text != "" && !final {
			return fmt.Errorf("%w: pod %s: %s", cause, p.pod.Metadata.Name, text)
		}
	}
	return cause
}

// PID implements sandbox.Process.
func (p *process) PID() int { return p.guest.PID() }

// Signal implements sandbox.Process.
func (p *process) Signal(s syscall.Signal) error { return p.guest.Signal(s) }

// Wait implements sandbox.Process.
func (p *process) Wait() unix.WaitStatus {
	<-p.ended
	return p.status
}

// awaitEnd waits until the program has ended, and returns how. If the pod has ended first, SIGKILL
// is assumed, and logged with what the cluster says.
func (p *process) awaitEnd() unix.WaitStatus {
	status, err := p.conn.Status()
	if err == nil {
		return status
	}
	p.conn.Close()
	ctx, cancel := context.WithTimeout(p.of.remove, endTimeout)
	defer cancel()
	now, asked := p.of.cfg.Cluster.Pod(ctx, p.pod.Metadata.Namespace, p.pod.Metadata.Name)
	text, _ := now.Trouble()
	if asked != nil {
		text = asked.Error()
	}
	p.of.cfg.Log.Warn("a pod has ended", "pod", p.pod.Metadata.Name, "namespace", p.pod.Metadata.Namespace, "says", text, "error", err)
	return unix.WaitStatus(unix.SIGKILL)
}

// Forget implements sandbox.Process. It ends the pod if it still runs, and deletes it in the
// background.
func (p *process) Forget() {
	p.once.Do(func() {
		p.of.tasks.Go(func() {
			if p.conn != nil {
				p.conn.Close()
			}
			if p.ended != nil {
				<-p.ended
			}
			if p.guest != nil {
				p.guest.Close()
			}
			if p.init != nil {
				_ = p.init.Close()
			}
			p.delete()
			p.of.mu.Lock()
			defer p.of.mu.Unlock()
			delete(p.of.live, p)
		})
	})
}

// delete deletes the pod. It tries again until the Runtime gives up.
func (p *process) delete() {
	for {
		ctx, cancel := context.WithTimeout(p.of.remove, endTimeout)
		err := p.of.cfg.Cluster.DeletePod(ctx, p.pod.Metadata.Namespace, p.pod.Metadata.Name, 0)
		cancel()
		if err == nil {
			return
		}
		p.of.cfg.Log.Warn("a pod is not deleted", "pod", p.pod.Metadata.Name, "error", err)
		select {
		case <-time.After(removePause):
		case <-p.of.remove.Done():
			return
		}
	}
}
