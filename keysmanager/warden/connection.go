package warden

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// Bounds of the requests of a manager that run at the same time. Further requests wait on the
// socket, and further starts in the manager, because the socket has to pass their cancellations. A
// start may wait for containerd, and the others must not wait for that.
const (
	maxRequests = 64
	maxStarts   = 512
)

// connection is the connection to the manager.
type connection struct {
	store *store
	wire  *wire
	group sync.WaitGroup
	// slots and starts have an element per request, or per start, that runs.
	slots, starts chan struct{}

	attached atomic.Bool

	mu      sync.Mutex
	cancels map[uint64]context.CancelCauseFunc // of the starts that run
}

// say sends a message. It waits as long as the manager does not read, and fails when the manager
// has gone.
func (c *connection) say(m message) error {
	c.wire.sending.Lock()
	defer c.wire.sending.Unlock()
	return c.sayLocked(m)
}

func (c *connection) sayLocked(m message) error {
	for {
		if err := c.wire.sendLocked(m); !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
	}
}

// run handles requests. It returns when the manager has gone and its requests are done. Starts that
// the manager does not wait for any more are ended.
func (c *connection) run() {
	ctx, end := context.WithCancelCause(context.Background())
	for {
		m, err := c.wire.receive()
		if err != nil {
			break // the manager has gone, or sent an invalid message
		}
		if m.Op == opCancel {
			c.cancel(m)
			continue
		}
		slots, ctx, done := c.slots, ctx, func() {}
		if m.Op == opStart {
			slots = c.starts
			ctx, done = c.begin(ctx, m.ID)
		}
		slots <- struct{}{}
		c.group.Go(func() {
			defer func() { <-slots }()
			defer done()
			defer m.close()
			c.handle(ctx, m)
		})
	}
	_ = c.wire.conn.Close()
	end(errGone)
	c.group.Wait()
}

// errGone is why starts end whose manager is not there any more.
var errGone = errors.New("its manager has gone")

// begin returns the context of a start. The caller calls done after the start.
func (c *connection) begin(parent context.Context, id uint64) (ctx context.Context, done func()) {
	ctx, cancel := context.WithCancelCause(parent)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cancels[id] = cancel
	return ctx, func() {
		cancel(nil)
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.cancels, id)
	}
}

// cancel ends a start, if it still runs. Its answer says so.
func (c *connection) cancel(m message) {
	m.close()
	c.mu.Lock()
	defer c.mu.Unlock()
	if cancel := c.cancels[m.Of]; cancel != nil {
		cancel(fault{text: m.Error})
	}
}

// handle carries out a request and sends the answer.
func (c *connection) handle(ctx context.Context, m message) {
	if m.Op == opAttach {
		c.attach(m)
		return
	}
	a := message{Op: opAnswer, ID: m.ID}
	files, err := m.kept()
	if err == nil {
		a.PID, err = c.do(ctx, m, files)
	}
	if err != nil {
		a.fail(err)
	}
	_ = c.say(a) // if this fails, the next manager gets it
}

func (c *connection) do(ctx context.Context, m message, keep []*os.File) (pid int, err error) {
	switch m.Op {
	case opRelease:
		defer c.attached.Store(false)
		return 0, c.store.release()
	case opStart:
		command, err := m.command()
		if err != nil {
			return 0, fmt.Errorf("warden: process %q: %w", m.Name, err)
		}
		if err := blocking(m.files[:len(m.files)-m.Keep]); err != nil {
			return 0, fmt.Errorf("warden: process %q: %w", m.Name, err)
		}
		return c.store.start(ctx, Process{Name: m.Name, Meta: m.Meta, Command: command, Keep: keep, Idle: m.Idle})
	case opSignal:
		return 0, c.store.signal(m.Name, syscall.Signal(m.Signal))
	case opPut:
		return 0, c.store.put(m.Name, m.Meta, keep)
	case opDrop:
		return 0, c.store.drop(m.Name)
	}
	return 0, fmt.Errorf("warden: request %q is unknown; the manager runs another release", m.Op)
}

// blocking makes received descriptors blocking, as programs expect. A descriptor keeps its mode on
// its way over a socket. os/exec does the same for files that this process opened.
func blocking(files []*os.File) error {
	for _, f := range files {
		raw, err := f.SyscallConn()
		if err != nil {
			return err
		}
		var failed error
		if err := raw.Control(func(fd uintptr) { failed = unix.SetNonblock(int(fd), false) }); err != nil {
			return err
		}
		if failed != nil {
			return failed
		}
	}
	return nil
}

// attach sends all entries. Exits follow: nothing else is sent meanwhile.
func (c *connection) attach(m message) {
	a := message{Op: opAnswer, ID: m.ID}
	// An onExit that runs now would wait for this goroutine, and this goroutine for it.
	if !c.attached.CompareAndSwap(false, true) {
		a.fail(errManaged)
		_ = c.say(a) // as above
		return
	}
	c.wire.sending.Lock()
	defer c.wire.sending.Unlock()
	all, err := c.store.attach(func(e Exit) {
		_ = c.say(message{Op: opExit, Name: e.Name, PID: e.PID, Status: uint32(e.Status)}) // as above
	})
	defer closeAll(all)
	for _, k := range all {
		if err == nil {
			err = c.sayLocked(message{
				Op: opKept, ID: m.ID, Name: k.Name, Meta: k.Meta, PID: k.PID, Ended: k.Ended, Status: uint32(k.Status), Lost: k.Lost, files: k.Files,
			})
		}
	}
	if err != nil {
		a.fail(err)
	}
	if err := c.sayLocked(a); err != nil {
		_ = c.wire.conn.Close() // the manager knows only some of the entries
	}
}
