package warden

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// Server is the configuration of [Serve].
type Server struct {
	Listener *net.UnixListener // of type SOCK_SEQPACKET; Serve closes it
	Runtime  sandbox.Runtime   // starts the processes; Serve closes it
	// Runs names the Runtime. A manager that wants another one is told so; see Launcher.Runs.
	Runs string
	// Linger is how long a warden without a manager waits before it ends idle processes. It ends
	// itself after its last process.
	Linger time.Duration
	Log    *slog.Logger
}

// Serve runs a warden in this process. It returns nil when the warden has nothing left to do. It
// also returns when ctx ends, after it has ended all processes.
func Serve(ctx context.Context, cfg Server) error {
	s := &server{cfg: cfg, store: newStore(cfg.Runtime), turned: make(chan struct{}, 1), since: time.Now()}
	s.group.Go(s.accept)
	s.attend(ctx)
	_ = cfg.Listener.Close() // makes accept return
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
	group  sync.WaitGroup // the acceptor and the connections
	turned chan struct{}  // has one element if a manager has come or gone since the last read

	mu      sync.Mutex
	closing bool
	had     bool          // there has been a manager
	manager *wire         // nil: none
	pid     int           // pid of the manager
	since   time.Time     // when the last manager left
	left    chan struct{} // closed when the manager has left
}

// look is how often a warden without a manager checks whether it has anything left to do.
const look = time.Second

// attend returns when the warden has nothing left to do.
func (s *server) attend(ctx context.Context) {
	for {
		var again <-chan time.Time
		if wait, over := s.withoutManager(); over {
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

// withoutManager does the work of a warden without a manager. wait is the time to the next check,
// or 0 if no check is needed before the next event. If over is true, nothing is left to do, and the
// warden accepts no manager any more.
func (s *server) withoutManager() (wait time.Duration, over bool) {
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
			s.cfg.Log.Warn("connection not accepted", "error", err)
			time.Sleep(look) // there may be no free descriptors
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

// helloTimeout bounds how long a connection may take to say hello, and how long a new manager waits
// until the last one has left.
const helloTimeout = 10 * time.Second

// serve handles one connection. It returns an error if it refuses the connection.
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
	c := &connection{
		store: s.store, wire: w, slots: make(chan struct{}, maxRequests), starts: make(chan struct{}, maxStarts), cancels: map[uint64]context.CancelCauseFunc{},
	}
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

// enter makes a connection the manager's connection.
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
	// Refuse only now: an unread message would keep the process from reading the reason.
	case int(peer.Uid) != uid && peer.Uid != 0:
		return fmt.Errorf("process %d runs as user %d, want user %d", peer.Pid, peer.Uid, uid)
	case m.Version != Version:
		return fmt.Errorf("version %d of process %d is unknown, want %d", m.Version, peer.Pid, Version)
	case m.Op != opHello:
		return fmt.Errorf("process %d sends %q first, want %s", peer.Pid, m.Op, opHello)
	}
	if err := w.conn.SetReadDeadline(time.Time{}); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	// The warden may not have noticed yet that the last manager was killed.
	if s.manager != nil && hungUp(s.manager.conn) {
		left := s.left
		s.mu.Unlock()
		select {
		case <-left:
		case <-time.After(answerTimeout): // for the last requests of the old manager
		}
		s.mu.Lock()
	}
	switch {
	case s.closing:
		return errClosing
	case s.manager != nil:
		return fmt.Errorf("process %d is the manager already, want one at a time: stop it first", s.pid)
	}
	if err := w.send(message{Op: opAnswer, PID: os.Getpid(), Runs: s.cfg.Runs}); err != nil {
		return err
	}
	s.manager, s.pid, s.had, s.left = w, int(peer.Pid), true, make(chan struct{})
	s.turn()
	return nil
}

// errClosing means that a warden is ending; the caller can start another.
var errClosing = fmt.Errorf("the warden is ending: %w", ErrClosed)

// credentials returns the user, group and pid of the other side.
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

// hungUp reports whether the other side has closed the connection.
func hungUp(conn *net.UnixConn) bool {
	raw, err := conn.SyscallConn()
	if err != nil {
		return true
	}
	gone := true
	_ = raw.Control(func(fd uintptr) { // fails if the connection is closed
		polled := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		n, err := unix.Poll(polled, 0)
		gone = err == nil && n > 0 && polled[0].Revents&(unix.POLLRDHUP|unix.POLLHUP) != 0
	})
	return gone
}
