package warden

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Server is what [Serve] is told.
type Server struct {
	Listener *net.UnixListener // of SOCK_SEQPACKET; closed by Serve
	// Linger is for how long there may be no manager before idle processes are ended, and the warden with the last process.
	Linger time.Duration
	Log    *slog.Logger
}

// Serve is a warden in a process of its own. It returns nil when nothing is left for it to do, and when ctx ends, with all that
// it has started.
func Serve(ctx context.Context, cfg Server) error {
	s := &server{cfg: cfg, store: newStore(), turned: make(chan struct{}, 1), since: time.Now()}
	s.group.Go(s.accept)
	s.attend(ctx)
	_ = cfg.Listener.Close() // accept ends
	s.mu.Lock()
	if s.closing = true; s.manager != nil {
		_ = s.manager.conn.Close()
	}
	s.mu.Unlock()
	s.group.Wait()
	s.store.close()
	return nil
}

// server is a warden with a socket.
type server struct {
	cfg    Server
	store  *store
	group  sync.WaitGroup // acceptor and connections
	turned chan struct{}  // has one element when a manager has come or gone since it was read

	mu      sync.Mutex
	closing bool
	had     bool          // a manager
	manager *wire         // nil: none
	pid     int           // of it
	since   time.Time     // there has been no manager
	left    chan struct{} // closed when the manager has gone
}

// look is how often a warden without a manager looks whether anything is left for it to do.
const look = time.Second

// attend returns when nothing is left to do.
func (s *server) attend(ctx context.Context) {
	for {
		var again <-chan time.Time
		if wait, over := s.alone(); over {
			return
		} else if wait > 0 {
			again = time.After(wait)
		}
		select {
		case <-ctx.Done():
			return
		case <-s.turned:
		case <-s.store.changed:
		case <-again:
		}
	}
}

// alone does what is to be done while there is no manager, and says when to look again, 0: when something has happened. When
// nothing is left to do, no manager is taken any more.
func (s *server) alone() (wait time.Duration, over bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.manager != nil {
		return 0, false
	}
	running, entries := s.store.count()
	waited := time.Since(s.since)
	switch {
	case running == 0 && (waited >= s.cfg.Linger || entries == 0 && s.had):
		s.closing = true
		return 0, true
	case waited < s.cfg.Linger:
		return s.cfg.Linger - waited, false
	}
	for _, name := range s.store.endIdle() {
		s.cfg.Log.Info("idle process ended: no manager has come", "name", name, "waited", waited.Round(time.Second))
	}
	return look, false
}

func (s *server) turn() {
	select {
	case s.turned <- struct{}{}:
	default:
	}
}

func (s *server) accept() {
	for {
		conn, err := s.cfg.Listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			s.cfg.Log.Warn("connection not taken", "error", err)
			time.Sleep(look) // out of descriptors
			continue
		}
		s.group.Go(func() {
			defer conn.Close()
			if err := s.serve(conn); err != nil {
				s.cfg.Log.Warn("manager refused", "error", err)
			}
		})
	}
}

// helloTimeout bounds how long a connection may take to say who it is, and how long one waits for a manager that has gone.
const helloTimeout = 10 * time.Second

// serve is one connection. Its error is why it was refused.
func (s *server) serve(conn *net.UnixConn) error {
	peer, err := credentials(conn)
	if err != nil {
		return err
	}
	w := newWire(conn)
	if err := s.enter(w, peer); err != nil {
		m := message{Op: opAnswer, PID: os.Getpid()}
		m.fail(err)
		return errors.Join(err, w.send(m))
	}
	c := &connection{store: s.store, wire: w, slots: make(chan struct{}, maxRequests)}
	c.run()
	_ = s.store.release()
	s.mu.Lock()
	s.manager, s.since = nil, time.Now()
	close(s.left)
	s.mu.Unlock()
	s.turn()
	s.cfg.Log.Info("manager has gone", "pid", peer.Pid)
	return nil
}

// enter makes a connection the manager's.
func (s *server) enter(w *wire, peer *unix.Ucred) error {
	if err := w.conn.SetReadDeadline(time.Now().Add(helloTimeout)); err != nil {
		return err
	}
	m, err := w.receive()
	if err != nil {
		return err
	}
	m.close()
	switch uid := os.Geteuid(); {
	case int(peer.Uid) != uid && peer.Uid != 0: // only now: what was not read would keep it from reading why
		return fmt.Errorf("process %d is of user %d, want %d", peer.Pid, peer.Uid, uid)
	case m.Version != Version:
		return fmt.Errorf("version %d of process %d is not known, want %d", m.Version, peer.Pid, Version)
	case m.Op != opHello:
		return fmt.Errorf("process %d begins with %q, want %s", peer.Pid, m.Op, opHello)
	}
	if err := w.conn.SetReadDeadline(time.Time{}); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.manager != nil && hungUp(s.manager.conn) { // one that was killed may not have been noticed yet
		left := s.left
		s.mu.Unlock()
		select {
		case <-left:
		case <-time.After(answerTimeout): // for what it has asked for last
		}
		s.mu.Lock()
	}
	switch {
	case s.closing:
		return errClosing
	case s.manager != nil:
		return fmt.Errorf("process %d is the manager already, want one at a time: stop it first", s.pid)
	}
	if err := w.send(message{Op: opAnswer, PID: os.Getpid()}); err != nil {
		return err
	}
	s.manager, s.pid, s.had, s.left = w, int(peer.Pid), true, make(chan struct{})
	s.turn()
	return nil
}

// errClosing says that a warden ends this moment: there can be another.
var errClosing = fmt.Errorf("it ends this moment: %w", ErrClosed)

// credentials says who is on the other side.
func credentials(conn *net.UnixConn) (*unix.Ucred, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	var peer *unix.Ucred
	var failed error
	if err := raw.Control(func(fd uintptr) { peer, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return nil, err
	}
	return peer, failed
}

// hungUp tells whether the other side has gone.
func hungUp(conn *net.UnixConn) bool {
	raw, err := conn.SyscallConn()
	if err != nil {
		return true
	}
	gone := true
	_ = raw.Control(func(fd uintptr) { // fails when the connection is closed
		polled := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		n, err := unix.Poll(polled, 0)
		gone = err == nil && n > 0 && polled[0].Revents&(unix.POLLRDHUP|unix.POLLHUP) != 0
	})
	return gone
}

// maxRequests is how many requests of a manager are carried out at a time. More wait on the socket.
const maxRequests = 64

// connection is the manager's.
type connection struct {
	store *store
	wire  *wire
	slots chan struct{}
	group sync.WaitGroup

	attached atomic.Bool
}

// say sends a message, however long the manager does not read. It fails when that has gone.
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

// run returns when the manager has gone and all that it asked for is done.
func (c *connection) run() {
	for {
		m, err := c.wire.receive()
		if err != nil {
			break // it has gone, or speaks what we do not understand
		}
		c.slots <- struct{}{}
		c.group.Go(func() {
			defer func() { <-c.slots }()
			defer m.close()
			c.obey(m)
		})
	}
	_ = c.wire.conn.Close()
	c.group.Wait()
}

// obey carries out a request and answers.
func (c *connection) obey(m message) {
	if m.Op == opAttach {
		c.attach(m)
		return
	}
	a := message{Op: opAnswer, ID: m.ID}
	files, err := m.kept()
	if err == nil {
		a.PID, err = c.do(m, files)
	}
	if err != nil {
		a.fail(err)
	}
	_ = c.say(a) // else the next manager is told
}

func (c *connection) do(m message, keep []*os.File) (pid int, err error) {
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
		return c.store.start(Process{Name: m.Name, Meta: m.Meta, Command: command, Keep: keep, Idle: m.Idle})
	case opSignal:
		return 0, c.store.signal(m.Name, syscall.Signal(m.Signal))
	case opPut:
		return 0, c.store.put(m.Name, m.Meta, keep)
	case opDrop:
		return 0, c.store.drop(m.Name)
	}
	return 0, fmt.Errorf("warden: request %q is not known", m.Op)
}

// blocking makes descriptors wait as programs expect it of them. What came over a socket stays as it was sent; os/exec does
// this for files that were opened here.
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

// attach answers with all that is kept. Exits come behind it: nothing else is sent meanwhile.
func (c *connection) attach(m message) {
	a := message{Op: opAnswer, ID: m.ID}
	if !c.attached.CompareAndSwap(false, true) { // an exit that is just being told would wait for us, and we for it
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
		_ = c.wire.conn.Close() // it knows half of what is kept
	}
}
