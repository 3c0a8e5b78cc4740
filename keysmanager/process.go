package keysmanager

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/sandbox"
	"github.com/stagecoach-serving/stagecoach/warden"
	"github.com/stagecoach-serving/stagecoach/wire"
)

// process is a replica's process: a zygote's child, or one of our own.
type process struct {
	replica, function string
	pid               int
	path              string
	device            string           // as Order has it
	reserved          map[string]int64 // bytes by device, see devices.go
	phases            []Phase
	told              func(Phase) // as Order.Phase; nil: nobody
	started           time.Time
	output            *sandbox.Output
	running           bool // its Start has returned; guarded by the manager's mutex

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

// end says once why the process has ended. It waits a moment for what the process had still to say.
func (p *process) end(cause string) {
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
			p.owner.exited(p, because(p.group.cause(cause), p.output))
		})
	})
}

// because adds the last line on stderr to the cause of an end that was not a wanted one.
func because(cause string, o *sandbox.Output) string {
	if last := o.LastError(); last != "" && cause != exitedWell {
		return cause + ": " + last
	}
	return cause
}

func (p *process) signal(s syscall.Signal) {
	if p.zygote != nil {
		p.zygote.signal(p.pid, s)
		return
	}
	_ = p.owner.warden.Signal(p.entry, s) // fails when the warden is gone, and the process with it
}

// signal sends a child a signal, unless it has been reaped: by itself, because a zygote may be slow to hear, or even held up by
// what it has to tell. Only where that is not possible the zygote is asked to.
func (z *zygote) signal(pid int, s syscall.Signal) {
	if err := signalChild(z.pid, pid, s); err == nil || errors.Is(err, unix.ESRCH) {
		return
	}
	o := wire.Order{Kind: wire.OrderKill, Version: wire.OrderVersion, Signal: uint16(s), PID: uint32(pid)}
	_ = z.send(wire.AppendOrder(nil, o), nil) // fails when the zygote is gone, and its children with it
}

// signalChild signals a process if that is its parent; otherwise it has ended, and its number is somebody else's.
func signalChild(parent, pid int, s syscall.Signal) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	switch parentOf(pid) { // asked only now: if it is, the descriptor is of this child, or of one that has ended
	case parent:
		return unix.PidfdSendSignal(fd, s, nil, 0)
	case 0:
		return unix.EPERM // it has ended just now, or /proc hides it
	}
	return unix.ESRCH
}

// disown ends a child that nobody wants. It does not wait: what reads from a zygote must never wait for it.
func (z *zygote) disown(pid uint32) {
	z.owner.ends.Go(func() { z.signal(int(pid), syscall.SIGKILL) })
}

// admit moves a child, which waits at its gate, to its cgroups, and lets it go on. The files by which one enters them are no
// zygote's: whoever has them can move any process of the machine there. A child whose end was told meanwhile is reported as any.
func (z *zygote) admit(p *process, groups []*os.File, gate io.Writer) error {
	parent := parentOf(p.pid)
	lies := parent != z.pid && (parent != 0 || p.pid == 1)
	err := error(nil)
	switch {
	case lies && hasEnded(z.pid): // then what it leaves has another parent, and is told to have ended with it
		return nil
	case lies:
		err = fmt.Errorf("zygote was ended: it says that process %d is its child, whose parent is %d", p.pid, parent)
	case parent == 0:
		err = fmt.Errorf("process %d ended before it was let go on", p.pid)
	default:
		err = letGoOn(p.pid, groups, gate)
	}
	if err == nil {
		return nil
	}
	z.mu.Lock()
	_, awaited := z.children[uint32(p.pid)]
	delete(z.children, uint32(p.pid)) // none of ours
	z.mu.Unlock()
	switch {
	case !awaited:
		return nil
	case lies:
		z.kill()
	default:
		z.disown(uint32(p.pid))
	}
	return err
}

// letGoOn moves a process to cgroups and opens its gate. One that has ended needs neither.
func letGoOn(pid int, groups []*os.File, gate io.Writer) error {
	for _, g := range groups {
		if _, err := g.WriteString(strconv.Itoa(pid)); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("cgroup of process %d: %w", pid, err)
		}
	}
	_, _ = gate.Write([]byte{1}) // fails when it has ended
	return nil
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

// exitedWell is the cause of an end with status 0.
const exitedWell = "exited"

func describe(e warden.Exit) string {
	switch s := e.Status; {
	case e.Err != nil:
		return e.Err.Error()
	case s.Signaled():
		return "killed by " + unix.SignalName(s.Signal())
	case s.ExitStatus() == 0:
		return exitedWell
	default:
		return "exit status " + strconv.Itoa(s.ExitStatus())
	}
}
