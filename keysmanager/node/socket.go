package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Requests on a daemon's unix socket. Each request is one line of JSON. The answer is one line,
// with a descriptor beside it or more lines after it.
const (
	wantSocket = "socket" // the stage socket of Replica, as Order has started it, or to adopt it
	wantLines  = "lines"  // all lines after After; the previous client is cut off
	wantImages = "images" // HTTP requests to its image server
)

type socketRequest struct {
	V       int    `json:"v"`
	Want    string `json:"want"`
	Replica string `json:"replica,omitempty"`
	Order   string `json:"order,omitempty"`
	Epoch   uint64 `json:"epoch,omitempty"` // as of an order
	// Another control plane may take the replica over, so its socket stays in the daemon.
	Keep bool `json:"keep,omitempty"`
	// The replica runs already; Order is empty.
	Adopt   bool   `json:"adopt,omitempty"`
	Gateway string `json:"gateway,omitempty"` // of its functions, as in a Spec
	// What the node announces of the replica for the next control plane.
	Revision uint64 `json:"revision,omitempty"`
	Home     string `json:"home,omitempty"`
	After    uint64 `json:"after,omitempty"` // number of the latest line that the client has
}

type socketReply struct {
	V     int    `json:"v"`
	Node  string `json:"node,omitempty"` // the daemon's id
	Error string `json:"error,omitempty"`
}

// refuse answers a request with an error.
func (r socketReply) refuse(c net.Conn, err error) {
	r.Error = err.Error()
	_ = json.NewEncoder(c).Encode(r) // the client may be gone
}

const (
	maxRequest   = 4 << 10   // bytes
	maxLineBytes = 256 << 10 // of a line in JSON
	// For a request, an answer or a write. It is long because a busy machine takes seconds.
	socketTimeout = 30 * time.Second
	maxConns      = 1024                  // at a time; more wait
	acceptAgain   = 50 * time.Millisecond // after an error
)

// socket is a unix socket that is served.
type socket struct {
	path  string
	l     *net.UnixListener
	loops sync.WaitGroup

	mu     sync.Mutex
	closed bool
	conns  map[*net.UnixConn]bool
}

// listen opens a socket at path for processes of this user, or root. Connections wait until serve
// is called.
func listen(path string) (*socket, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("node's socket: %w", err)
	}
	dir := filepath.Dir(path)
	if err = os.MkdirAll(dir, 0o700); err == nil {
		err = os.Chmod(dir, 0o700)
	}
	if err == nil {
		if err = os.Remove(path); errors.Is(err, os.ErrNotExist) {
			err = nil
		}
	}
	if err != nil {
		return nil, fmt.Errorf("node's socket: %w", err)
	}
	short, done, err := shorten(path)
	if err != nil {
		return nil, fmt.Errorf("node's socket: %w", err)
	}
	defer done()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: short, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("node's socket: %w", err)
	}
	l.SetUnlinkOnClose(false) // the name may not be valid any more
	if err := os.Chmod(path, 0o600); err != nil {
		_ = l.Close()
		return nil, fmt.Errorf("node's socket: %w", err)
	}
	return &socket{path: path, l: l, conns: map[*net.UnixConn]bool{}}, nil
}

// serve has each connection served by a goroutine of its own, until close.
func (s *socket) serve(each func(*net.UnixConn)) { s.loops.Go(func() { s.accept(each) }) }

func (s *socket) accept(each func(*net.UnixConn)) {
	room := make(chan struct{}, maxConns)
	for {
		room <- struct{}{}
		c, err := s.l.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // no descriptor is free, perhaps
			<-room
			time.Sleep(acceptAgain)
			continue
		}
		s.mu.Lock()
		if s.closed {
			s.mu.Unlock()
			_ = c.Close()
			return
		}
		s.conns[c] = true
		s.mu.Unlock()
		s.loops.Go(func() {
			each(c)
			_ = c.Close()
			s.mu.Lock()
			delete(s.conns, c)
			s.mu.Unlock()
			<-room
		})
	}
}

func (s *socket) close() {
	s.mu.Lock()
	s.closed = true
	for c := range s.conns {
		_ = c.Close()
	}
	s.mu.Unlock()
	_ = s.l.Close()
	s.loops.Wait()
	_ = os.Remove(s.path)
}

// shorten returns a short form of path for a socket, which is valid until done is called.
func shorten(path string) (short string, done func(), err error) {
	const most = 100 // sun_path has 108
	if len(path) <= most {
		return path, func() {}, nil
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return "", nil, err
	}
	return fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path)), func() { _ = dir.Close() }, nil
}

// knownPeer returns an error unless the process at the other end belongs to this user or root.
func knownPeer(c *net.UnixConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	var failed error
	if err := raw.Control(func(fd uintptr) { cred, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return err
	}
	if failed != nil {
		return fmt.Errorf("peer's credentials: %w", failed)
	}
	return known(*cred, uint32(os.Geteuid()))
}

// known returns an error unless a process belongs to the user uid or to root.
func known(cred unix.Ucred, uid uint32) error {
	if cred.Uid != uid && cred.Uid != 0 {
		return fmt.Errorf("process %d of user %d, want one of user %d, or root: run up and the KeysManagers as the same user", cred.Pid, cred.Uid, uid)
	}
	return nil
}
