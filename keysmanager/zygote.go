package keysmanager

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/sandbox"
	"github.com/stagecoach-serving/stagecoach/wire"
)

// zygoteKey says which replicas may share a zygote. Namespaces never do: all children of a zygote have its address layout.
type zygoteKey struct {
	namespace string
	digest    string // of the image
	model     string
	process   string
}

// zygote is the manager's side of a zygote process.
type zygote struct {
	key    zygoteKey
	cmd    *exec.Cmd
	conn   *net.UnixConn // SOCK_SEQPACKET
	output *sandbox.Output
	begun  time.Time
	load   time.Duration
	bytes  int64 // proportional set size once loaded

	mu       sync.Mutex
	nextID   uint32
	pending  map[uint32]*forkOrder
	children map[uint32]*process // by pid
	died     string              // why; empty: it lives

	gone chan struct{} // closed when the process has ended and its children are reported
}

// forkOrder is an order on its way.
type forkOrder struct {
	child *process
	reply chan forkReply
}

type forkReply struct {
	took time.Duration
	err  error
}

// startZygote starts a zygote process and waits until it has loaded.
func startZygote(ctx context.Context, sp *sandbox.Spawner, cmd sandbox.Command, key zygoteKey, sink func(stream, line string)) (*zygote, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("zygote's socket: %w", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "zygote")
	defer theirs.Close()
	conn, err := unixConn(fds[0])
	if err != nil {
		return nil, err
	}
	z := &zygote{key: key, conn: conn, pending: map[uint32]*forkOrder{}, children: map[uint32]*process{}, gone: make(chan struct{})}
	if z.output, err = sandbox.NewOutput(sink); err != nil {
		_ = conn.Close()
		return nil, err
	}
	cmd.Env[wire.EnvZygoteFD] = "3"
	cmd.Files, cmd.Stdout, cmd.Stderr = []*os.File{theirs}, z.output.Stdout, z.output.Stderr
	begin := time.Now()
	z.cmd, err = sp.Start(cmd)
	z.output.Started()
	if err != nil {
		_ = conn.Close()
		z.output.Wait()
		return nil, err
	}
	err = z.awaitReady(ctx)
	if err != nil {
		_ = z.cmd.Process.Kill()
		_ = z.cmd.Wait() // killed
		_ = conn.Close()
		z.output.Wait()
		if last := z.output.LastError(); last != "" {
			err = fmt.Errorf("%w: %s", err, last)
		}
		return nil, err
	}
	z.begun, z.load = begin, time.Since(begin)
	z.bytes = pss(z.cmd.Process.Pid)
	go z.read() // ends with the process; gone says so
	return z, nil
}

func (z *zygote) awaitReady(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { _ = z.conn.SetReadDeadline(time.Now()) })
	defer stop()
	o, err := z.receive(make([]byte, maxOrder))
	switch {
	case err != nil && ctx.Err() != nil:
		return fmt.Errorf("zygote did not load its parameters in time: %w", ctx.Err())
	case err != nil:
		return errors.New("zygote ended before it had loaded its parameters")
	case o.Kind == wire.ZygoteError:
		return fmt.Errorf("zygote: %s", o.Text)
	case o.Kind != wire.ZygoteReady:
		return fmt.Errorf("zygote's first message is %c, want %c", o.Kind, wire.ZygoteReady)
	}
	if !stop() {
		return ctx.Err()
	}
	return z.conn.SetReadDeadline(time.Time{})
}

// maxOrder is the largest message on a zygote's socket in bytes.
const maxOrder = 64 << 10

func (z *zygote) receive(buf []byte) (wire.Order, error) {
	n, err := z.conn.Read(buf)
	if err != nil {
		return wire.Order{}, err
	}
	return wire.DecodeOrder(buf[:n])
}

// read handles the zygote's messages until it ends, and then reports the children that ended with it.
func (z *zygote) read() {
	defer close(z.gone)
	buf := make([]byte, maxOrder)
	var fault error
	for {
		o, err := z.receive(buf)
		if err != nil {
			fault = err
			break
		}
		z.handle(o)
	}
	_ = z.cmd.Process.Kill() // it has ended, or speaks what we do not understand
	_ = z.conn.Close()
	_ = z.cmd.Wait() // the state says how it ended
	cause := "its zygote ended: " + describeState(z.cmd.ProcessState)
	if errors.Is(fault, wire.ErrVersion) {
		cause = "its zygote was ended: " + fault.Error()
	}
	z.mu.Lock()
	z.died = cause
	children, pending := z.children, z.pending
	z.children, z.pending = nil, nil
	z.mu.Unlock()
	for _, f := range pending {
		f.reply <- forkReply{err: errors.New(cause)}
	}
	for _, p := range children {
		p.end(cause)
	}
	z.output.Wait()
}

func (z *zygote) handle(o wire.Order) {
	z.mu.Lock()
	switch o.Kind {
	case wire.ChildForked:
		f := z.pending[o.ID]
		delete(z.pending, o.ID)
		if f == nil {
			break // its order was given up; dispose of it
		}
		f.child.pid = int(o.PID)
		z.children[o.PID] = f.child
		z.mu.Unlock()
		f.reply <- forkReply{took: time.Duration(o.Nanos)}
		return
	case wire.ZygoteError:
		f := z.pending[o.ID]
		delete(z.pending, o.ID)
		z.mu.Unlock()
		if f != nil {
			f.reply <- forkReply{err: fmt.Errorf("zygote refused to fork: %s", o.Text)}
		}
		return
	case wire.ChildExited:
		p := z.children[o.PID]
		delete(z.children, o.PID)
		z.mu.Unlock()
		if p != nil {
			p.end(describeStatus(unix.WaitStatus(o.Status)))
		}
		return
	}
	z.mu.Unlock()
}

// fork orders a child and waits until it is there. The files are its stage socket, stdout and stderr; they stay the
// caller's to close.
func (z *zygote) fork(ctx context.Context, child *process, threads int, env map[string]string, files [3]*os.File) (time.Duration, error) {
	o := wire.Order{Kind: wire.OrderFork, Version: wire.OrderVersion, Threads: uint16(threads)}
	for k, v := range env {
		o.Env = append(o.Env, k+"="+v)
	}
	f := &forkOrder{child: child, reply: make(chan forkReply, 1)}
	z.mu.Lock()
	if z.pending == nil {
		defer z.mu.Unlock()
		return 0, errors.New(z.died)
	}
	z.nextID++
	o.ID = z.nextID
	z.pending[o.ID] = f
	z.mu.Unlock()
	rights := unix.UnixRights(int(files[0].Fd()), int(files[1].Fd()), int(files[2].Fd()))
	if _, _, err := z.conn.WriteMsgUnix(wire.AppendOrder(nil, o), rights, nil); err != nil {
		z.mu.Lock()
		delete(z.pending, o.ID)
		z.mu.Unlock()
		return 0, fmt.Errorf("fork order: %w", err)
	}
	select {
	case r := <-f.reply:
		return r.took, r.err
	case <-ctx.Done():
		// The child may come yet. Its stage socket is closed by us, which ends it.
		z.mu.Lock()
		delete(z.pending, o.ID)
		z.mu.Unlock()
		return 0, fmt.Errorf("fork order not answered: %w", ctx.Err())
	}
}

// signal sends a child a signal, unless it has been reaped.
func (z *zygote) signal(pid int, s syscall.Signal) {
	o := wire.Order{Kind: wire.OrderKill, Version: wire.OrderVersion, Signal: uint16(s), PID: uint32(pid)}
	_, _ = z.conn.Write(wire.AppendOrder(nil, o)) // fails when the zygote is gone, and its children with it
}

// stop ends the zygote and its children and waits.
func (z *zygote) stop() {
	_ = z.conn.CloseWrite()
	_ = z.cmd.Process.Kill() // reaped by read alone, so the pid is still ours
	<-z.gone
}

func (z *zygote) replicas() int {
	z.mu.Lock()
	defer z.mu.Unlock()
	return len(z.children) + len(z.pending)
}

func (z *zygote) alive() bool {
	select {
	case <-z.gone:
		return false
	default:
		z.mu.Lock()
		defer z.mu.Unlock()
		return z.died == ""
	}
}

// unixConn takes a descriptor over as a unix socket.
func unixConn(fd int) (*net.UnixConn, error) {
	f := os.NewFile(uintptr(fd), "socket")
	c, err := net.FileConn(f)
	_ = f.Close() // FileConn has its own
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	return c.(*net.UnixConn), nil //nolint:forcetypeassert // made by socketpair(AF_UNIX)
}

func describeStatus(s unix.WaitStatus) string {
	switch {
	case s.Signaled():
		return "killed by " + unix.SignalName(s.Signal())
	case s.ExitStatus() == 0:
		return "exited"
	}
	return "exit status " + strconv.Itoa(s.ExitStatus())
}

func describeState(s *os.ProcessState) string {
	if s == nil {
		return "unknown"
	}
	return describeStatus(unix.WaitStatus(s.Sys().(syscall.WaitStatus))) //nolint:forcetypeassert // on unix
}
