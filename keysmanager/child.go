package keysmanager

import (
	"context"
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

	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// child is a process that a zygote has forked and that waits at its gate to be told which replica it is. It is in its cgroup.
//
// A zygote has one that is spare, ahead of need: to enter a cgroup takes longer than to fork and to become a replica together
// (docs/adr/0029). It may have others that are parked, each on a device (docs/adr/0033).
type child struct {
	pid   int           // in a worker its thread's id
	gate  *net.UnixConn // SOCK_SEQPACKET; closed, the child ends by itself
	group *enclosure    // nil: none
}

// berth is where a zygote's spare child waits.
type berth struct {
	child  *child // nil: none
	coming bool   // one is on its way: it is not there, or not yet parked
	failed failures
}

// failures are those to park a child, or to keep it, in a row.
type failures struct {
	count int
	retry time.Time // not before
}

func (f *failures) add() {
	f.count++
	f.retry = time.Now().Add(backoff(f.count))
}

// The most that a spare child may take to be there, and one that makes itself ready on a device.
const (
	spareTimeout = 10 * time.Second
	parkTimeout  = time.Minute
)

// provide has a zygote have a spare child soon, parked on a device unless that is empty, if it has none there. m.starts or New must be
// waited for by who closes m.ends, or m.mu be held.
func (m *Manager) provide(z *zygote, device string) {
	z.mu.Lock()
	defer z.mu.Unlock()
	b := z.berths[device]
	if b == nil {
		b = &berth{}
		z.berths[device] = b
	}
	if b.child != nil || b.coming || z.waiting == nil || z.memory != nil || z.works() || time.Now().Before(b.failed.retry) {
		return
	}
	b.coming = true
	limits, most := z.limits, spareTimeout
	if device != "" {
		most = parkTimeout
	}
	m.ends.Go(func() {
		ctx, cancel := context.WithTimeoutCause(m.ctx, most, fmt.Errorf("no spare child after %v", most))
		defer cancel()
		c, err := m.bear(ctx, z, limits, true)
		if err == nil {
			err = z.moor(ctx, c, b, device)
		}
		z.mu.Lock()
		if err != nil || device != "" { // else it may be another by now that is on its way
			b.coming = false
		}
		if err != nil && device != "" {
			b.failed.add()
		}
		z.mu.Unlock()
		if err != nil && m.ctx.Err() == nil {
			m.cfg.Log.Debug("no spare child", "function", z.function, "device", device, "error", err) // the next start has one forked, and says why not
		}
	})
}

// moor has a child wait at a berth, on a device unless that is empty. What does not is dismissed.
func (z *zygote) moor(ctx context.Context, c *child, b *berth, device string) error {
	z.mu.Lock()
	there := z.waiting[uint32(c.pid)] == c
	if there {
		b.child, b.coming = c, device != ""
	}
	z.mu.Unlock()
	err := errChildEnded
	if there {
		if device == "" {
			return nil
		}
		if err = c.park(ctx, device); err == nil {
			return nil
		}
		z.mu.Lock()
		there = z.unberth(c) == c
		z.mu.Unlock()
		if !there { // it was dismissed meanwhile
			return err
		}
	}
	z.dismiss(c)
	return err
}

// unberth takes a child from its berth, with z.mu held, and returns it; nil: it is at none.
func (z *zygote) unberth(c *child) *child {
	for _, b := range z.berths {
		if c != nil && b.child == c {
			b.child = nil
			return c
		}
	}
	return nil
}

// lost is unberth of a child that has ended by itself: one that was parked is not tried again at once; with z.mu held.
func (z *zygote) lost(c *child) *child {
	for device, b := range z.berths {
		if c != nil && b.child == c && device != "" {
			b.failed.add()
		}
	}
	return z.unberth(c)
}

// unberthed takes all children from their berths, with z.mu held.
func (z *zygote) unberthed() (all []*child) {
	for _, b := range z.berths {
		if b.child != nil {
			all = append(all, b.child)
			b.child = nil
		}
	}
	return all
}

// claim returns a zygote's spare child that waits on a device, or on none, if it has one with these limits, which is no spare any more.
// One with others is dismissed. m.starts must be waited for by who closes m.ends.
func (z *zygote) claim(limits GroupLimits, device string) *child {
	var c *child
	z.mu.Lock()
	z.limits = limits
	if b := z.berths[device]; b != nil && !b.coming {
		c, b.child, b.failed = b.child, nil, failures{}
	}
	z.mu.Unlock()
	if c == nil || c.group == nil || c.group.limits == limits {
		return c
	}
	z.owner.ends.Go(func() { z.dismiss(c) }) // whom the start need not wait for
	return nil
}

// bear has a zygote fork a child, which waits at its gate, in a cgroup with these limits.
func (m *Manager) bear(ctx context.Context, z *zygote, limits GroupLimits, spare bool) (c *child, err error) {
	c = &child{}
	var theirs *os.File
	if c.gate, theirs, err = socketpair(unix.SOCK_SEQPACKET); err != nil {
		return nil, err
	}
	defer theirs.Close()
	var groups []*os.File
	if !z.works() { // whose threads are in its own
		c.group, groups, err = m.enclose(newEntry("child"), z.function, limits)
	}
	if err == nil {
		defer closeFiles(groups)
		if err = z.fork(ctx, c, theirs, spare); err == nil && !z.works() {
			err = z.admit(c, groups)
		}
	}
	if err != nil {
		z.dismiss(c)
		return nil, err
	}
	return c, nil
}

// forkOrder is an order on its way.
type forkOrder struct {
	child *child
	spare bool
	reply chan error // has room for the one that comes when the order leaves pending by the other side's doing
}

// fork orders a child and waits until it is there, at its gate, whose other end stays the caller's to close. When ctx ends first,
// a child that comes later is killed.
func (z *zygote) fork(ctx context.Context, c *child, gate *os.File, spare bool) error {
	o := wire.Order{Kind: wire.OrderFork, Version: wire.OrderVersion}
	f := &forkOrder{child: c, spare: spare, reply: make(chan error, 1)}
	z.mu.Lock()
	if z.pending == nil {
		defer z.mu.Unlock()
		return z.died
	}
	z.nextID++
	o.ID = z.nextID
	z.pending[o.ID] = f
	z.mu.Unlock()
	z.owed.Add(answers)
	failed := z.send(wire.AppendOrder(nil, o), unix.UnixRights(int(gate.Fd())))
	if failed == nil || errors.Is(failed, unix.EPIPE) || errors.Is(failed, unix.ECONNRESET) || errors.Is(failed, net.ErrClosed) {
		// Sent, or the zygote has ended: then read answers why.
		select {
		case err := <-f.reply:
			return err
		case <-ctx.Done():
			failed = fmt.Errorf("fork order not answered: %w", context.Cause(ctx))
		}
	}
	z.mu.Lock()
	waits := z.take(o.ID) != nil
	z.mu.Unlock()
	if !waits { // the answer came meanwhile
		return <-f.reply
	}
	return failed
}

// dismiss ends a child that is to be no replica.
func (z *zygote) dismiss(c *child) {
	z.mu.Lock()
	waits := z.waiting[uint32(c.pid)] == c
	if waits {
		delete(z.waiting, uint32(c.pid))
	}
	z.mu.Unlock()
	if waits {
		z.disown(uint32(c.pid))
	}
	z.owner.dispose(c)
}

// dispose gives back what is held of a child that has ended or will.
func (m *Manager) dispose(c *child) {
	_ = c.gate.Close() // nothing is on its way
	m.disclose(c.group)
}

// spares are a zygote's children without a replica, as they are counted.
func (z *zygote) spares() (all []copied) {
	z.mu.Lock()
	defer z.mu.Unlock()
	for pid := range z.waiting {
		if z.works() {
			break // its threads are counted with it
		}
		all = append(all, copied{int(pid), -1})
	}
	return all
}

// errChildEnded says that a child ended at its gate.
var errChildEnded = errors.New("its process ended before it was told which replica it is")

// begin tells a child that it is p. One that has just ended has been begun, too: its end is p's.
func (z *zygote) begin(c *child, p *process, message []byte, files []*os.File) error {
	z.mu.Lock()
	switch {
	case z.died != nil:
		defer z.mu.Unlock()
		return z.died
	case z.lie != nil:
		defer z.mu.Unlock()
		return errLied{z.lie}
	case z.waiting[uint32(c.pid)] != c:
		z.mu.Unlock()
		return errChildEnded
	}
	delete(z.waiting, uint32(c.pid))
	p.pid, p.task, p.group = c.pid, c.pid, c.group
	if z.works() {
		p.pid = z.pid
	}
	z.children[uint32(c.pid)] = p
	z.mu.Unlock()
	fds := make([]int, len(files))
	for i, f := range files {
		fds[i] = int(f.Fd())
	}
	_ = c.gate.SetWriteDeadline(time.Now().Add(sendTimeout)) // fails as the write does
	_, _, err := c.gate.WriteMsgUnix(message, unix.UnixRights(fds...), nil)
	_ = c.gate.Close() // it has been said
	if err == nil || errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
		return nil
	}
	z.mu.Lock()
	awaited := z.children[uint32(c.pid)] == p
	if awaited {
		delete(z.children, uint32(c.pid))
	}
	z.mu.Unlock()
	if !awaited { // its end has been told meanwhile
		return nil
	}
	z.disown(uint32(c.pid))
	return fmt.Errorf("process %d could not be told which replica it is: %w", c.pid, err)
}

// beginning is the message that makes a child a replica.
func beginning(threads int, env map[string]string) ([]byte, error) {
	o := wire.Order{Kind: wire.OrderBegin, Version: wire.OrderVersion, Threads: uint16(threads)}
	for _, k := range slices.Sorted(maps.Keys(env)) {
		o.Env = append(o.Env, k+"="+env[k])
	}
	b := wire.AppendOrder(nil, o)
	if len(b) > maxOrder {
		return nil, fmt.Errorf("its environment has %d bytes, want at most %d", len(b), maxOrder)
	}
	return b, nil
}

// admit moves a child, which waits at its gate, to its cgroups. The files by which one enters them are no zygote's: whoever has
// them can move any process of the machine there.
func (z *zygote) admit(c *child, groups []*os.File) error {
	switch parent := parentOf(c.pid); {
	case parent != z.pid && (parent != 0 || c.pid == 1):
		if hasEnded(z.pid) { // then what it leaves has another parent, and is told to have ended with it
			return nil
		}
		return z.lied(fmt.Errorf("it says that process %d is its child, whose parent is %d", c.pid, parent))
	case parent == 0:
		return fmt.Errorf("process %d: %w", c.pid, errChildEnded)
	}
	for _, g := range groups {
		if _, err := g.WriteString(strconv.Itoa(c.pid)); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("cgroup of process %d: %w", c.pid, err)
		}
	}
	return nil
}

// errLied says that a zygote was ended for a lie.
type errLied struct{ error }

func (e errLied) Error() string { return "zygote was ended: " + e.error.Error() }

// lied ends a zygote for a lie.
func (z *zygote) lied(lie error) error {
	z.mu.Lock()
	z.lie = lie
	z.mu.Unlock()
	z.kill()
	return errLied{lie}
}

// signal sends a child a signal, unless it has been reaped: by itself, because a zygote may be slow to hear, or even held up by
// what it has to tell. Only where that is not possible the zygote is asked to.
func (z *zygote) signal(pid int, s syscall.Signal) {
	if !z.works() {
		if err := signalChild(z.pid, pid, s); err == nil || errors.Is(err, unix.ESRCH) {
			return
		}
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
