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

// child is a process that a zygote has forked. It is in its cgroup, and waits at its gate to be
// told which replica it is.
//
// A zygote has one spare child ahead of need, because entering a cgroup takes longer than to fork
// and to become a replica together (docs/adr/0029). It may have other children that are parked,
// each on a device (docs/adr/0033).
type child struct {
	id   int           // its pid in the zygote's namespace, or in a worker the id of its thread
	pid  int           // its pid on this machine; in a worker its id
	gate *net.UnixConn // SOCK_SEQPACKET; when it is closed, the child ends by itself
	held *resources.Reservation
}

// dispose releases the resources of a child that has ended or will end.
func (c *child) dispose() {
	_ = c.gate.Close() // no message is on its way
	c.held.Release()
}

// dismiss ends a child that will not become a replica.
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

// begin tells a child that it is a replica. It also succeeds if the child has just ended: then that
// end is the replica's.
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
	pid := c.pid
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
	_ = c.gate.Close() // the message is sent
	if err == nil || errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
		return nil
	}
	f.mu.Lock()
	awaited := f.replicas[id] == o.Replica
	if awaited {
		delete(f.replicas, id)
	}
	f.mu.Unlock()
	if !awaited { // its end was reported meanwhile
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

// admit finds the process of a child, which waits at its gate, and moves it to its cgroups. The
// zygote never gets the files of the cgroups, because a process that has them can move any process
// of the machine into these cgroups.
func (f *Family) admit(c *child, groups []*os.File) error {
	pid, err := f.of.pids.Outside(c.id)
	if errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("process %d of its zygote: %w", c.id, errChildEnded)
	}
	if err != nil {
		return fmt.Errorf("process %d of its zygote: %w", c.id, err)
	}
	f.mu.Lock()
	c.pid = pid
	f.mu.Unlock()
	zygote := f.of.PID
	switch parent := resources.ParentOf(c.pid); {
	case parent != zygote && (parent != 0 || c.id == 1):
		// Then its children have another parent, and are reported to have ended with it.
		if hasEnded(zygote) {
			return nil
		}
		return f.of.Lied(fmt.Errorf("it says that process %d is its child, whose parent is %d", c.id, parent))
	case parent == 0:
		return fmt.Errorf("process %d: %w", c.id, errChildEnded)
	}
	for _, g := range groups {
		if _, err := g.WriteString(strconv.Itoa(c.pid)); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("cgroup of process %d: %w", c.id, err)
		}
	}
	return nil
}

// hasEnded reports whether a process has ended, reaped or not.
func hasEnded(pid int) bool {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return errors.Is(err, unix.ESRCH)
	}
	defer unix.Close(fd)
	// Fails: the process is not known to have ended.
	n, _ := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
	return n > 0
}

// Signal sends a child a signal, unless it has been reaped. It does so directly, because a zygote
// may be slow to read, or may be blocked while it sends. If that is not possible, it asks the
// zygote to send the signal.
func (f *Family) Signal(id int, s syscall.Signal) {
	if !f.of.Works() {
		pid, err := f.of.pids.Outside(id)
		if err == nil {
			err = signalChild(f.of.PID, pid, s)
		}
		if err == nil || errors.Is(err, unix.ESRCH) {
			return
		}
	}
	o := wire.Order{Kind: wire.OrderKill, Version: wire.OrderVersion, Signal: uint16(s), PID: uint32(id)}
	_ = f.of.control.send(o, nil) // fails if the zygote is gone; then its children are gone, too
}

// signalChild signals a process if parent is its parent. Otherwise the child has ended, and its
// number belongs to another process.
func signalChild(parent, pid int, s syscall.Signal) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	// Checked only now: if parent is the parent, the descriptor is this child's, or that of a child
	// that has ended.
	switch resources.ParentOf(pid) {
	case parent:
		return unix.PidfdSendSignal(fd, s, nil, 0)
	case 0:
		return unix.EPERM // it has just ended, or /proc hides it
	}
	return unix.ESRCH
}

// killUnwanted kills a child that nobody wants. It does not wait, because the goroutine that reads
// from a zygote must never wait for it.
func (f *Family) killUnwanted(id uint32) {
	f.of.host.Tasks.Go(func() { f.Signal(int(id), syscall.SIGKILL) })
}
