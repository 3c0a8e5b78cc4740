package container

import (
	"context"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/container/entry"
	"github.com/stagecoach-serving/stagecoach/keysmanager/container/guest"
)

// process is a container and the program in it. Its fields but status are set before start returns
// it.
type process struct {
	of        *Runtime
	id        string
	folder    *folder              // nil: none yet
	container containerd.Container // nil: none yet
	task      containerd.Task      // nil: none yet
	init      int                  // number of the container's first process; 0: none yet
	initEnd   *os.File             // is readable once that has ended; nil: none yet
	conn      *entry.Conn          // nil: none yet
	guest     *guest.Guest         // the program; nil: none yet
	ended     chan struct{}        // closed when it has ended; then status is set. nil: it never ran
	status    unix.WaitStatus

	calls *sync.WaitGroup // to containerd, for the start
	// unsure says that containerd may still do what a call has asked for. It is read after calls.
	unsure bool

	once sync.Once // of Forget
}

// call calls containerd for a start. If ctx ends first, call returns and the call goes on, because
// one that is broken off may have an effect at any later time. settle waits for it.
func (p *process) call(ctx context.Context, do func(ctx context.Context) error) error {
	answer := make(chan error, 1)
	p.calls.Go(func() {
		ctx, cancel := context.WithTimeout(p.of.remove, p.of.patience)
		defer cancel()
		err := do(ctx)
		p.unsure = p.unsure || err != nil && (errdefs.IsCanceled(err) || errdefs.IsDeadlineExceeded(err) || errdefs.IsUnavailable(err))
		answer <- err
	})
	select {
	case err := <-answer:
		if err != nil {
			return fmt.Errorf("containerd: %w", err)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("containerd does not answer: %w", context.Cause(ctx))
	}
}

// PID implements sandbox.Process.
func (p *process) PID() int { return p.guest.PID() }

// Signal implements sandbox.Process.
func (p *process) Signal(s syscall.Signal) error { return p.guest.Signal(s) }

// watch notes the first process of the container.
func (p *process) watch(pid int) error {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return fmt.Errorf("first process %d of container %s: %w", pid, p.id, err)
	}
	p.init, p.initEnd = pid, os.NewFile(uintptr(fd), "pidfd")
	return nil
}

// awaitInit waits until the first process has ended, and all others of the container with it.
func (p *process) awaitInit(until time.Time) error {
	if err := p.initEnd.SetReadDeadline(until); err != nil {
		return err
	}
	return p.readInit()
}

// readInit waits until the first process has ended, or until the deadline of initEnd.
func (p *process) readInit() error {
	raw, err := p.initEnd.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Read(func(fd uintptr) bool {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return err == nil && n > 0
	})
}

// killInit kills the first process, if it has not ended.
func (p *process) killInit() { _ = guest.Signal(p.initEnd, unix.SIGKILL) }

// whenInitEnds calls f when the first process ends. stop undoes that, and waits for f.
func (p *process) whenInitEnds(f func()) (stop func()) {
	done := make(chan struct{})
	_ = p.initEnd.SetReadDeadline(time.Time{}) // fails as the read does
	go func() {                                // stop waits for it
		defer close(done)
		if p.readInit() == nil {
			f()
		}
	}()
	return func() {
		_ = p.initEnd.SetReadDeadline(time.Unix(1, 0))
		<-done
	}
}

// initEnded returns an error that says how the first process has ended, if it has.
func (p *process) initEnded(ctx context.Context) error {
	if ctx.Err() != nil || p.awaitInit(time.Now().Add(10*time.Millisecond)) != nil {
		return nil
	}
	return fmt.Errorf("its first program has ended: %w", errStatus(p.asked(ctx)))
}

type errStatus unix.WaitStatus

func (e errStatus) Error() string {
	s := unix.WaitStatus(e)
	if s.Signaled() {
		return "killed by " + unix.SignalName(s.Signal())
	}
	return fmt.Sprintf("exit status %d", s.ExitStatus())
}

// Wait implements sandbox.Process.
func (p *process) Wait() unix.WaitStatus {
	<-p.ended
	return p.status
}

// awaitEnd waits until the container has ended, and returns how its program has.
func (p *process) awaitEnd() unix.WaitStatus {
	status, err := p.conn.Status()
	if err != nil {
		p.conn.Close()
	}
	// The program has ended, so its container ends at once. The kernel kills what is left there.
	if late := p.awaitInit(time.Now().Add(settleTime)); late != nil {
		p.of.cfg.Log.Warn("container does not end with its program; it is killed", "container", p.id, "error", late)
		p.killInit()
		_ = p.awaitInit(time.Now().Add(endTimeout))
	}
	if err == nil {
		return status
	}
	return p.asked(p.of.remove)
}

// retryPause is the pause between two questions to a containerd that does not answer.
const retryPause = 200 * time.Millisecond

// asked returns how the first process has ended, as containerd knows it. If containerd does not
// say so in time, or before ctx ends, SIGKILL is assumed.
func (p *process) asked(ctx context.Context) unix.WaitStatus {
	limited, cancel := context.WithTimeout(ctx, endTimeout)
	defer cancel()
	for {
		s, err := p.task.Status(limited)
		if err == nil && s.Status == containerd.Stopped {
			return waitStatus(s.ExitStatus)
		}
		if errdefs.IsNotFound(err) {
			return unix.WaitStatus(unix.SIGKILL)
		}
		select {
		case <-time.After(retryPause): // containerd may come back
		case <-limited.Done():
			if ctx.Err() != nil {
				return unix.WaitStatus(unix.SIGKILL)
			}
			p.of.cfg.Log.Warn("containerd does not say how a container has ended; SIGKILL is assumed", "container", p.id, "waited", endTimeout, "error", err)
			return unix.WaitStatus(unix.SIGKILL)
		}
	}
}

// maxSignal is the highest number of a signal.
const maxSignal = 64

// waitStatus converts an exit status of containerd: 128 and a signal's number mean the signal.
func waitStatus(exit uint32) unix.WaitStatus {
	if exit > 128 && exit <= 128+maxSignal {
		return unix.WaitStatus(exit - 128)
	}
	return unix.WaitStatus(exit << 8)
}

// Forget implements sandbox.Process. It kills the container if it still runs, and removes it in the
// background.
func (p *process) Forget() {
	p.once.Do(func() {
		p.of.removes.Go(func() {
			p.end()
			p.settle()
			p.removeOrKeep()
		})
	})
}

// settle waits until containerd makes nothing of the container any more.
func (p *process) settle() {
	p.calls.Wait()
	if p.unsure {
		p.of.awaitLate()
	}
}

// removeOrKeep removes the container. If that fails, the container is kept for a later retry.
func (p *process) removeOrKeep() {
	err := p.remove()
	if err != nil {
		p.of.cfg.Log.Warn("container is not removed; a later start, the end of a watchdog or the node's next start tries it again", "container", p.id, "error", err)
	}
	p.of.forget(p, err)
}

// end ends the container, and closes its descriptors.
func (p *process) end() {
	if p.conn != nil {
		p.conn.Close()
	}
	if p.ended != nil {
		<-p.ended
	}
	if p.initEnd != nil {
		p.killInit()
		_ = p.awaitInit(time.Now().Add(settleTime))
		_ = p.initEnd.Close()
	}
	if p.guest != nil {
		p.guest.Close()
	}
}

// remove removes the container from containerd, and what it has left on this machine.
func (p *process) remove() error {
	err := enter(p.of.remove, p.of.removing, removeTimeout)
	if err != nil {
		return fmt.Errorf("containerd works on %d other removals: %w", cap(p.of.removing), err)
	}
	defer func() { <-p.of.removing }()
	ctx, cancel := context.WithTimeout(p.of.remove, removeTimeout)
	defer cancel()
	for {
		if p.folder == nil { // containerd was not asked for anything
			return nil
		}
		if err = p.of.removeAll(ctx, p.id); err == nil {
			return nil
		}
		select {
		case <-time.After(retryPause): // containerd may come back
		case <-ctx.Done():
			return err
		}
	}
}

// removeAll removes a container from containerd, and then what is left of it on this machine. The
// folder goes last: without it, nobody would know of the rest.
func (r *Runtime) removeAll(ctx context.Context, id string) error {
	if err := r.removeContainer(ctx, id); err != nil {
		return err
	}
	if err := r.shims.remove(ctx, id); err != nil {
		return err
	}
	return removeLeft(id)
}

// removeContainer ends and removes a container, if it exists.
func (r *Runtime) removeContainer(ctx context.Context, id string) error {
	c, err := r.client.LoadContainer(ctx, id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	task, err := c.Task(ctx, nil)
	switch {
	case errdefs.IsNotFound(err):
	case err != nil:
		return err
	default:
		if _, err := task.Delete(ctx, containerd.WithProcessKill); err != nil && !errdefs.IsNotFound(err) {
			return err
		}
	}
	if err := c.Delete(ctx); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	return nil
}
