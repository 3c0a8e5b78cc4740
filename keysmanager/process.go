package keysmanager

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// process is a replica's process: a zygote's child, or one of our own.
type process struct {
	replica, function string
	pid               int
	task              int // by which its zygote knows it: its pid, or in a worker its thread's id
	path              string
	device            string           // as Order has it
	reserved          map[string]int64 // bytes by device, see devices.go
	phases            []Phase
	told              func(Phase) // as Order.Phase; nil: nobody
	started           time.Time
	output            *sandbox.Output
	running           bool        // its Start has returned; guarded by the manager's mutex
	signaled          atomic.Bool // the Manager has signaled it

	group  *enclosure // nil: none
	entry  string     // of the warden
	zygote *zygote    // its parent; nil: the warden
	mapped *zygote    // whose memory it maps; nil: none
	asking *asking    // by its Start

	once   sync.Once
	placed chan struct{} // closed when its Start is done with it
	gone   chan struct{} // closed when it has ended and was reported
	owner  *Manager
}

// What is done about lines that an ended process has left: its end is reported after a moment, also if something still holds
// its output, and after a while nobody listens any more.
const (
	linesMoment = 100 * time.Millisecond
	linesWhile  = 2 * time.Second
)

// end reports once how the process has ended. It first waits a moment for the process's last
// output.
func (p *process) end(e ending) {
	p.once.Do(func() {
		finished := make(chan struct{})
		p.owner.ends.Go(func() { <-p.placed; p.output.Finish(linesWhile); close(finished) })
		p.owner.ends.Go(func() {
			defer close(p.gone)
			<-p.placed
			select {
			case <-finished:
			case <-time.After(linesMoment):
			}
			switch {
			case p.signaled.Load():
				e.end = task.EndShared
			case e.end == task.EndUnclear && p.group.passedItsLimit():
				e.end = task.EndItself
			}
			p.owner.exited(p, p.group.explain(e).saying(p.output))
		})
	})
}

func (p *process) signal(s syscall.Signal) {
	p.signaled.Store(true)
	if p.zygote != nil {
		p.zygote.signal(p.task, s)
		return
	}
	_ = p.owner.warden.Signal(p.entry, s) // fails when the warden is gone, and the process with it
}

// awaitEnd waits until p has ended after SIGKILL and was reported.
func (p *process) awaitEnd(most time.Duration) error {
	select {
	case <-p.gone:
		return nil
	case <-p.owner.detached:
		return ErrClosed
	case <-time.After(most):
		return fmt.Errorf("replica %q: process %d is still there %v after SIGKILL", p.replica, p.pid, most)
	}
}

// hasEnded tells whether a process has ended, reaped or not.
func hasEnded(pid int) bool {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return errors.Is(err, unix.ESRCH)
	}
	defer unix.Close(fd)
	n, _ := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0) // fails: it is not known to have
	return n > 0
}
