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
	"sync/atomic"
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
	of      *Runtime
	pod     kube.Pod
	outline sandbox.Outline
	guest   *guest.Guest  // nil: none yet, or in a room
	conn    *entry.Conn   // nil: none yet
	init    *os.File      // pidfd of its first program; nil: none yet
	pid     int           // of its first program, on this machine
	note    string        // file that says so to Logs; empty: none
	closing atomic.Bool   // this Runtime ends it
	ended   chan struct{} // closed when it has ended; then status is set. nil: it never ran
	status  unix.WaitStatus
	once    sync.Once // of Forget
}

// start makes a pod and starts a command's program in it.
func (r *Runtime) start(ctx context.Context, c sandbox.Command) (*process, error) {
	p, err := r.prepare(ctx, c)
	if err != nil {
		return nil, err
	}
	if p.guest, err = guest.Begin(ctx, p.conn, c, p.outline, p.pid, deadline(ctx)); err != nil {
		p.Forget()
		return nil, err
	}
	p.ended = make(chan struct{})
	r.tasks.Go(func() { defer close(p.ended); p.status = p.awaitEnd(p.conn.Status()) })
	if err := r.adopt(p); err != nil {
		return nil, err
	}
	return p, nil
}

// deadline returns the end of a message's time. ctx ends first, and says why.
func deadline(ctx context.Context) time.Time {
	until, _ := ctx.Deadline()
	return until.Add(time.Second)
}

// prepare makes a pod in which a command's program can begin.
func (r *Runtime) prepare(ctx context.Context, c sandbox.Command) (_ *process, err error) {
	switch {
	case c.Held:
		return nil, errors.New("spare pods are not built: want stagecoach.dev/spares: 0")
	case c.Chroot != "" && c.GPUs:
		return nil, errors.New("a function that speaks HTTP gets no GPU in a pod")
	case len(c.Options.Devices) > 0:
		return nil, errors.New("CDI devices are for --runtime containerd")
	case c.Chroot == "" && c.As == nil:
		return nil, errors.New("a pod needs a user of its own")
	}
	namespace, err := r.namespaceOf(r.label(c, sandbox.LabelFunction))
	if err != nil {
		return nil, err
	}
	p := &process{of: r}
	if p.outline, err = outline(c); err != nil {
		return nil, err
	}
	wanted := r.pod(c, p.outline, namespace)
	wanted.Metadata.Owners = r.ownersOf(ctx, c, namespace)
	if p.pod, err = r.cfg.Cluster.CreatePod(ctx, wanted); err != nil {
		refused := (*kube.Refused)(nil)
		if !errors.As(err, &refused) { // it may be there, or appear
			r.tasks.Go(func() { r.deleteLate(namespace, wanted.Metadata.Name) })
		}
		if c.Chroot != "" && p.outline.UID == 0 && refused != nil && strings.Contains(refused.Message, "PodSecurity") {
			err = fmt.Errorf("%w (the image's user is root: want a USER in the image, or a namespace whose Pod Security is baseline)", err)
		}
		return nil, err
	}
	defer func() {
		if err != nil {
			p.Forget()
		}
	}()
	if p.pid, err = p.connect(ctx); err != nil {
		return nil, err
	}
	give := c.Show
	if c.Chroot != "" {
		give = func(pidfd int) error { return c.Fill(pidfd, p.outline.UID, p.outline.GID) }
	}
	if err := give(int(p.init.Fd())); err != nil {
		return nil, err
	}
	p.note = noteOf(r.label(c, sandbox.LabelReplica))
	if err := writeNote(p.note, p.pod.Metadata.UID, p.pid); err != nil {
		r.cfg.Log.Warn("kubectl logs will not show the lines of a pod", "pod", p.pod.Metadata.Name, "error", err)
	}
	return p, nil
}

// outline returns what the program of a command gets.
func outline(c sandbox.Command) (sandbox.Outline, error) {
	if c.Chroot == "" {
		return c.Outline("")
	}
	return c.Guest()
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
	}, deadline(ctx))
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

// awaitEnd returns how the program has ended, if err is nil. Else the pod has ended first: SIGKILL
// is assumed, and logged with what the cluster says, unless this Runtime has ended the pod.
func (p *process) awaitEnd(status unix.WaitStatus, err error) unix.WaitStatus {
	if err == nil {
		return status
	}
	p.conn.Close()
	if p.closing.Load() {
		return unix.WaitStatus(unix.SIGKILL)
	}
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
		p.closing.Store(true)
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
			removeNote(p.note, p.pid)
			p.of.delete(p.pod.Metadata.Namespace, p.pod.Metadata.Name)
			p.of.mu.Lock()
			defer p.of.mu.Unlock()
			delete(p.of.live, p)
		})
	})
}

// delete deletes a pod.
func (r *Runtime) delete(namespace, name string) {
	r.repeat("a pod is not deleted", name, func(ctx context.Context) error { return r.cfg.Cluster.DeletePod(ctx, namespace, name, 0) })
}

// createLate is how long the API server may still work on a creation that was broken off.
const createLate = 5 * time.Second

// deleteLate deletes a pod whose creation was not answered.
func (r *Runtime) deleteLate(namespace, name string) {
	r.delete(namespace, name)
	select {
	case <-time.After(createLate):
	case <-r.open.Done():
	}
	r.delete(namespace, name)
}

// repeat asks the cluster until it succeeds or the Runtime gives up.
func (r *Runtime) repeat(failed, pod string, ask func(ctx context.Context) error) {
	for {
		ctx, cancel := context.WithTimeout(r.remove, endTimeout)
		err := ask(ctx)
		cancel()
		if err == nil {
			return
		}
		r.cfg.Log.Warn(failed, "pod", pod, "error", err)
		select {
		case <-time.After(removePause):
		case <-r.remove.Done():
			return
		}
	}
}
