package keysmanager

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// zygoteKey says which replicas may share a zygote. Namespaces never do: all children of a zygote have its address layout.
type zygoteKey struct {
	namespace string
	digest    string // of the image
	model     string
	process   string
	form      form

	engineName  string // as engine has it
	environment string // that a zygote knows of, as engine.seen has it

	secrets string // folder that its replicas read, or of a worker, the set of secrets that all its functions name; empty: none

	generation uint64 // of the parameters: how often they have been invalidated

	network string // which its processes are in, as Manager.networkOf has it

	worker, device string // of a worker: its name, and its device; empty: the CPU
}

// zygote is the manager's side of a zygote process, or, in its place, of memory that replicas map.
type zygote struct {
	key      zygoteKey
	owner    *Manager
	entry    string // of the warden
	pid      int
	group    *enclosure // nil: none
	ended    <-chan warden.Exit
	conn     *net.UnixConn // SOCK_SEQPACKET
	output   *sandbox.Output
	loaded   time.Time     // when it was
	load     time.Duration // how long that took
	function string        // that it was loaded for
	bytes    int64         // proportional set size once loaded
	shared   int64         // of a worker: bytes that are resident in it, and others' part of what it shares

	prepacked bool         // its weights are mapped from a file
	memory    []*os.File   // graph and weights, sealed; nil: it is a process
	once      sync.Once    // of the end of memory
	admitting sync.Mutex   // held while it gets another folder to read
	owed      atomic.Int64 // messages that it may still send

	mu       sync.Mutex
	nextID   uint32
	pending  map[uint32]*forkOrder
	waiting  map[uint32]*child   // at their gates, by pid; nil: it has ended, or is left
	berths   map[string]*berth   // for those that nobody has ordered yet, by the device that they wait on; empty: none
	limits   GroupLimits         // of the next spare's cgroup: those of the latest replica
	children map[uint32]*process // by pid; of memory, who maps it
	lie      error               // for which it was ended; nil: none
	died     error               // why; nil: it lives
	listed   chan struct{}       // closed when an adopted one has said which children it has; nil: it has, or is not
	unlisted map[uint32]bool     // children of an adopted one that it has not yet said to live

	gone     chan struct{} // closed when the process has ended and its children are reported
	replaced bool          // its parameters have been invalidated; guarded by the manager's mutex
}

// startZygote starts a zygote process for the function of a spec and waits until it has loaded.
func (m *Manager) startZygote(ctx context.Context, cmd sandbox.Command, key zygoteKey, spec Spec, began func(pid int)) (*zygote, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("zygote's socket: %w", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "zygote")
	defer theirs.Close()
	ours := os.NewFile(uintptr(fds[0]), "zygote's manager")
	defer ours.Close()
	z := m.newZygote(key, newEntry("zygote"), spec.Function)
	z.limits = spec.limits()
	if z.conn, err = unixConn(ours); err != nil {
		return nil, err
	}
	if z.output, err = sandbox.NewOutput(m.zygoteOutput(key, spec.Function)); err != nil {
		_ = z.conn.Close()
		return nil, err
	}
	var groups []*os.File
	if z.group, groups, err = m.enclose(z.entry, spec.Function, m.zygoteLimits()); err != nil {
		_ = z.conn.Close()
		z.output.Started()
		z.output.Abandon()
		return nil, err
	}
	defer closeFiles(groups)
	cmd.Groups = groups
	cmd.Env[wire.EnvZygoteFD] = "3"
	cmd.Files, cmd.Stdout, cmd.Stderr = []*os.File{theirs}, z.output.Stdout, z.output.Stderr
	begin := time.Now()
	z.ended = m.await(z.entry)
	z.pid, err = m.begin(spec, itself, warden.Process{
		Name: z.entry, Meta: z.meta(), Command: cmd, Keep: append([]*os.File{ours}, z.output.Readers()...), Idle: true,
	})
	z.output.Started()
	_ = theirs.Close() // so that the zygote's end is heard
	if err != nil {
		m.forgo(z.entry)
		_ = z.conn.Close()
		z.output.Abandon()
		m.disclose(z.group)
		return nil, err
	}
	began(z.pid)
	if err = z.awaitReady(ctx); err != nil {
		err = z.failed(err)
		m.removeHalfPacked(cmd.Env[wire.EnvPrepacked], z.pid)
		return nil, err
	}
	z.loaded, z.load = time.Now(), time.Since(begin)
	m.settle(z.entry)
	z.bytes, _ = sandbox.PSS(z.pid) // of one that has ended: 0
	z.measureShared()
	if err := m.warden.Put(z.entry, z.meta()); err != nil {
		m.cfg.Log.Warn("zygote would not be adopted by another daemon", "function", spec.Function, "error", err)
	}
	go z.read() // ends with the process, or with Detach; gone says so
	return z, nil
}

// failed ends a zygote that does not load, and says why.
func (z *zygote) failed(err error) error {
	z.kill()
	status := <-z.ended
	_ = z.conn.Close()
	z.output.Finish(linesMoment)
	z.owner.drop(z.entry)
	if errors.Is(err, errNotLoaded) {
		err = fmt.Errorf("%w: %w", err, z.group.explain(endingOf(status)))
	}
	z.owner.disclose(z.group)
	if last := z.output.LastError(); last != "" && !errors.As(err, new(said)) && !errors.As(err, new(impossible)) {
		err = fmt.Errorf("%w: %w", err, printed(last))
	}
	return err
}

func (m *Manager) newZygote(key zygoteKey, entry, function string) *zygote {
	return &zygote{
		key: key, owner: m, entry: entry, function: function,
		berths: map[string]*berth{}, pending: map[uint32]*forkOrder{}, waiting: map[uint32]*child{}, children: map[uint32]*process{}, gone: make(chan struct{}),
	}
}

// zygoteOutput takes what the zygote of a function prints.
func (m *Manager) zygoteOutput(key zygoteKey, function string) func(stream, line string) {
	return func(stream, line string) { m.cfg.Output(function, key.what(), stream, line) }
}

// kill ends the process. It fails when the warden is gone, and the zygote with it.
func (z *zygote) kill() {
	if z.memory != nil {
		z.free(false)
		return
	}
	_ = z.owner.warden.Signal(z.entry, syscall.SIGKILL)
}

// errNotLoaded says that a zygote ended early. Its status says why: it was set before the socket closed.
var errNotLoaded = errors.New("zygote ended before it had loaded its parameters")

// said is why a zygote does not load, in its own words.
type said struct{ who, text string }

func (e said) Error() string { return e.who + ": " + e.text }

// Unwrap returns the words.
func (e said) Unwrap() error { return printed(e.text) }

func (z *zygote) awaitReady(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { _ = z.conn.SetReadDeadline(time.Now()) })
	defer stop()
	o, err := z.receive(make([]byte, maxOrder))
	switch {
	case err != nil && ctx.Err() != nil:
		return fmt.Errorf("%s was ended: %w", z.key.what(), context.Cause(ctx))
	case errors.Is(err, wire.ErrVersion):
		return fmt.Errorf("%s: %w; build its image again", z.key.what(), err)
	case err != nil:
		return errNotLoaded
	case o.Kind == wire.ZygoteError && o.Unforkable:
		return impossible{o.Text}
	case o.Kind == wire.ZygoteError:
		return said{z.key.what(), o.Text}
	case o.Kind != wire.ZygoteReady:
		return fmt.Errorf("zygote's first message is %c, want %c", o.Kind, wire.ZygoteReady)
	}
	if !stop() {
		return ctx.Err()
	}
	z.prepacked = o.Prepacked
	return z.conn.SetReadDeadline(time.Time{})
}

// maxOrder is the largest message on a zygote's socket in bytes.
const maxOrder = 64 << 10

func (z *zygote) receive(buf []byte) (wire.Order, error) {
	return receiveFrom(z.conn, buf)
}

// read handles the zygote's messages until it ends, and then reports the children that ended with it, or until it is left to
// the warden.
func (z *zygote) read() {
	defer close(z.gone)
	buf := make([]byte, maxOrder)
	var fault error
	for {
		o, err := z.receive(buf)
		if z.owed.Add(-1) < -unasked && err == nil {
			err = errors.New("it says more than it was asked")
		}
		if err != nil {
			fault = err
			break
		}
		z.handle(o)
	}
	if z.leftBehind() {
		return
	}
	z.kill() // it has ended, or speaks what we do not understand
	_ = z.conn.Close()
	status := <-z.ended
	z.output.Finish(linesMoment)
	how := task.EndShared
	if z.works() {
		how = task.EndUnclear // what a replica does ends its whole worker
	}
	e := z.group.explain(endingOf(status)).of("its "+z.key.what(), how).saying(z.output)
	z.owner.disclose(z.group)
	z.mu.Lock()
	if op := (*net.OpError)(nil); z.lie != nil {
		e = ending{cause: "its " + z.key.what() + " was ended: " + z.lie.Error(), end: task.EndShared}
	} else if !errors.As(fault, &op) && !errors.Is(fault, io.EOF) {
		e = ending{cause: "its " + z.key.what() + " was ended: " + fault.Error(), end: how}
	}
	z.died = e
	children, pending, spares := z.children, z.pending, z.unberthed()
	z.children, z.pending, z.waiting = nil, nil, nil
	z.mu.Unlock()
	for _, f := range pending {
		f.reply <- e
	}
	for _, p := range children {
		p.end(e)
	}
	for _, c := range spares {
		z.owner.dispose(c)
	}
	z.owner.drop(z.entry)
}

// leftBehind tells whether the zygote is left to the warden, and then stops to listen to it and its children.
func (z *zygote) leftBehind() bool {
	select {
	case <-z.owner.detached:
	default:
		return false
	}
	_ = z.conn.Close() // nobody reads it any more
	z.output.Abandon()
	z.mu.Lock()
	spares := z.unberthed()
	z.waiting = nil
	for _, p := range z.children {
		p.output.Abandon()
	}
	z.mu.Unlock()
	for _, c := range spares {
		z.owner.dispose(c) // the next daemon has it make others
	}
	return true
}

func (z *zygote) handle(o wire.Order) {
	switch o.Kind {
	case wire.ChildLives, wire.OrderList:
		z.lives(o)
	case wire.ChildForked:
		z.mu.Lock()
		f, twice := z.take(o.ID), z.waiting[o.PID] != nil || z.children[o.PID] != nil
		if f != nil && !twice {
			f.child.pid = int(o.PID)
			z.waiting[o.PID] = f.child
		}
		z.mu.Unlock()
		switch {
		case f == nil: // its order was given up
			z.disown(o.PID)
		case twice:
			f.reply <- z.lied(fmt.Errorf("it says that process %d is its child, and said so before", o.PID))
		default:
			f.reply <- nil
		}
	case wire.ZygoteError:
		z.mu.Lock()
		f := z.take(o.ID)
		z.mu.Unlock()
		if f != nil {
			f.reply <- fmt.Errorf("zygote refused to fork: %w", printed(o.Text))
		}
	case wire.ChildExited:
		z.mu.Lock()
		p, spare := z.children[o.PID], z.lost(z.waiting[o.PID])
		delete(z.children, o.PID)
		delete(z.waiting, o.PID)
		z.mu.Unlock()
		if spare != nil { // the next start has another forked
			z.owner.ends.Go(func() { z.owner.dispose(spare) })
		}
		if p != nil {
			e := warden.Exit{Status: unix.WaitStatus(o.Status)}
			p.end(endingOf(e))
		}
	}
}

// take takes an order that waits for its answer out, with z.mu held; nil: none of this id waits.
func (z *zygote) take(id uint32) *forkOrder {
	f := z.pending[id]
	delete(z.pending, id)
	return f
}

// sendTimeout bounds how long a zygote that does not read can hold up its manager.
const sendTimeout = 5 * time.Second

// A fork order has so many answers at most, and a zygote may say so much more, for what an earlier daemon has ordered. One that says
// more than that is ended: it would keep us busy.
const (
	answers = 2 // that a child is there, and that it has ended
	unasked = 4096
)

func (z *zygote) send(message, rights []byte) error {
	_ = z.conn.SetWriteDeadline(time.Now().Add(sendTimeout)) // fails as the write does
	if _, _, err := z.conn.WriteMsgUnix(message, rights, nil); err != nil {
		return fmt.Errorf("order to zygote: %w", err)
	}
	return nil
}

// stop ends the zygote and its children and waits.
func (z *zygote) stop() {
	z.kill()
	<-z.gone
}

// replicas is how many a zygote has or is about to have; one that is about to be forked as a spare is none.
func (z *zygote) replicas() int {
	z.mu.Lock()
	defer z.mu.Unlock()
	n := len(z.children)
	for _, f := range z.pending {
		if !f.spare {
			n++
		}
	}
	return n
}

func (z *zygote) alive() bool {
	select {
	case <-z.gone:
		return false
	default:
		z.mu.Lock()
		defer z.mu.Unlock()
		return z.died == nil
	}
}
