package keysmanager

import (
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// process is a replica's process: a zygote's child, or one of our own.
type process struct {
	replica, function string
	pid               int
	// id by which its zygote knows it: its pid in the zygote's namespace, or the id of its thread in a
	// worker
	task   int
	path   string
	milli  int    // as in node.Order.CPUMilli
	device string // as in node.Order
	held   *resources.Reservation
	timing
	output   *sandbox.Output
	running  bool        // its Start has returned; guarded by the store's mutex
	signaled atomic.Bool // the Manager has signaled it

	entry  string         // of the warden
	zygote *zygote.Zygote // its parent; nil: the warden
	mapped *zygote.Zygote // the zygote whose memory it maps; nil: none
	asking *asking        // by its Start

	once   sync.Once
	placed chan struct{} // closed when its Start has finished with it
	gone   chan struct{} // closed when it has ended and was reported
	owner  *Manager
}

// linesWhile bounds how long the daemon reads the output of a process that has ended, because
// programs that it started may still print. The end is reported earlier, at most
// resources.LinesMoment after it.
const linesWhile = 2 * time.Second

// Take takes over the cgroup of the child that becomes p; see zygote.Replica.
func (p *process) Take(child *resources.Reservation) { p.held.Take(child, p.milli) }

// Began records which process p is; see zygote.Replica.
func (p *process) Began(pid, id int) { p.pid, p.task = pid, id }

// Abandon stops reading the output of p: p is left to the warden.
func (p *process) Abandon() { p.output.Abandon() }

// End reports once how the process has ended. It first waits a moment for the process's last
// output.
func (p *process) End(e resources.Ending) {
	p.once.Do(func() {
		finished := make(chan struct{})
		p.owner.ends.Go(func() { <-p.placed; p.output.Finish(linesWhile); close(finished) })
		p.owner.ends.Go(func() {
			defer close(p.gone)
			<-p.placed
			select {
			case <-finished:
			case <-time.After(resources.LinesMoment):
			}
			switch {
			case p.signaled.Load():
				e.End = task.EndShared
			case e.End == task.EndUnclear && p.held.Group().PassedItsLimit():
				e.End = task.EndItself
			}
			p.owner.exited(p, p.held.Group().Explain(e).Saying(p.output))
		})
	})
}

func (p *process) signal(s syscall.Signal) {
	p.signaled.Store(true)
	if p.zygote != nil {
		p.zygote.Family.Signal(p.task, s)
		return
	}
	_ = p.owner.warden.Signal(p.entry, s) // fails if the warden is gone; then the process is gone, too
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

// reportEnd waits for the end of a process of the warden's own and reports it, unless the process
// is left to the warden.
func (p *process) reportEnd(ended <-chan warden.Exit) {
	select {
	case e := <-ended:
		p.End(resources.EndingOf(e))
	case <-p.owner.detached:
		p.output.Abandon()
	}
}
