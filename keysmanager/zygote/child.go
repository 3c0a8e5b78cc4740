package zygote

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// child is a process that a zygote has forked and that waits at its gate to be told which replica
// it is. It is in its cgroup.
//
// A zygote has one that is spare, ahead of need: to enter a cgroup takes longer than to fork and to
// become a replica together (docs/adr/0029). It may have others that are parked, each on a device
// (docs/adr/0033).
type child struct {
	id   int           // its pid, or in a worker its thread's id
	gate *net.UnixConn // SOCK_SEQPACKET; closed, the child ends by itself
	held *resources.Reservation
}

// dispose gives back what is held of a child that has ended or will.
func (c *child) dispose() {
	_ = c.gate.Close() // nothing is on its way
	c.held.Release()
}

// dismiss ends a child that is to be no replica.
func (f *Family) dismiss(c *child) {
	f.mu.Lock()
	waits := f.waiting[uint32(c.id)] == c
	if waits {
		delete(f.waiting, uint32(c.id))
	}
	f.mu.Unlock()
	if waits {
		f.killUnwanted(uint32(c.id))
	}
	c.dispose()
}

// begin tells a child that it is a replica. A child that has just ended has begun, too: its end is
// the replica's.
func (f *Family) begin(c *child, o ForkOrder) error {
	id := uint32(c.id)
	f.mu.Lock()
	switch {
	case f.died != nil:
		defer f.mu.Unlock()
		return f.died
	case f.lie != nil:
		defer f.mu.Unlock()
		return ErrLied{f.lie}
	case f.waiting[id] != c:
		f.mu.Unlock()
		return errChildEnded
	}
	delete(f.waiting, id)
	pid := c.id
	if f.of.Works() {
		pid = f.of.PID
	}
	o.Replica.Began(pid, c.id)
	f.replicas[id] = o.Replica
	f.mu.Unlock()
	fds := make([]int, len(o.Files))
	for i, file := range o.Files {
		fds[i] = int(file.Fd())
	}
	_ = c.gate.SetWriteDeadline(time.Now().Add(sendTimeout)) // fails as the write does
	_, _, err := c.gate.WriteMsgUnix(o.Message, unix.UnixRights(fds...), nil)
	_ = c.gate.Close() // it has been said
	if err == nil || errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
		return nil
	}
	f.mu.Lock()
	awaited := f.replicas[id] == o.Replica
	if awaited {
		delete(f.replicas, id)
	}
	f.mu.Unlock()
	if !awaited { // its end has been told meanwhile
		return nil
	}
	f.killUnwanted(id)
	return fmt.Errorf("process %d could not be told which replica it is: %w", c.id, err)
}

// Beginning returns the message that makes a child a replica.
func Beginning(threads int, env map[string]string) ([]byte, error) {
	o := wire.Order{Kind: wire.OrderBegin, Version: wire.OrderVersion, Threads: uint16(threads)}
	for _, k := range slices.Sorted(maps.Keys(env)) {
		o.Env = append(o.Env, k+"="+env[k])
	}
	b := wire.AppendOrder(nil, o)
	if len(b) > MaxOrder {
		return nil, fmt.Errorf("its environment has %d bytes, want at most %d", len(b), MaxOrder)
	}
	return b, nil
}

// admit moves a child, which waits at its gate, to its cgroups. The zygote never gets the files by
// which one enters them: whoever has them can move any process of the machine there.
func (f *Family) admit(c *child, groups []*os.File) error {
	zygote := f.of.PID
	switch parent := resources.ParentOf(c.id); {
	case parent != zygote && (parent != 0 || c.id == 1):
		if hasEnded(zygote) { // then what it leaves has another parent, and is told to have ended with it
			return nil
		}
		return f.of.Lied(fmt.Errorf("it says that process %d is its child, whose parent is %d", c.id, parent))
	case parent == 0:
		return fmt.Errorf("process %d: %w", c.id, errChildEnded)
	}
	for _, g := range groups {
		if _, err := g.WriteString(strconv.Itoa(c.id)); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("cgroup of process %d: %w", c.id, err)
		}
	}
	return nil
}

// hasEnded tells whether a process has ended, reaped or not.
func hasEnded(pid int) bool {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return errors.Is(err, unix.ESRCH)
	}
	defer unix.Close(fd)
	// Fails: it is not known to have.
	n, _ := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
	return n > 0
}

// Signal sends a child a signal, unless it has been reaped. It does so directly, because a zygote
// may be slow to hear, or even held up by what it has to tell. Only if that is not possible, it
// asks the zygote to.
func (f *Family) Signal(id int, s syscall.Signal) {
	if !f.of.Works() {
		if err := signalChild(f.of.PID, id, s); err == nil || errors.Is(err, unix.ESRCH) {
			return
		}
	}
	o := wire.Order{Kind: wire.OrderKill, Version: wire.OrderVersion, Signal: uint16(s), PID: uint32(id)}
	_ = f.of.control.send(o, nil) // fails when the zygote is gone, and its children with it
}

// signalChild signals a process if that is its parent; otherwise it has ended, and its number is
// another process's.
func signalChild(parent, pid int, s syscall.Signal) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	// Asked only now: if it is, the descriptor is of this child, or of one that has ended.
	switch resources.ParentOf(pid) {
	case parent:
		return unix.PidfdSendSignal(fd, s, nil, 0)
	case 0:
		return unix.EPERM // it has ended just now, or /proc hides it
	}
	return unix.ESRCH
}

// killUnwanted ends a child that nobody wants. It does not wait: what reads from a zygote must
// never wait for it.
func (f *Family) killUnwanted(id uint32) {
	f.of.host.Tasks.Go(func() { f.Signal(int(id), syscall.SIGKILL) })
}
