package warden

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Launcher says where a warden's socket is and how a warden is started.
type Launcher struct {
	// Socket is the path of the socket. Its folder is created if it is missing. The folder must be
	// closed to other users.
	Socket string
	// Command is a program that calls Serve with the listening socket, which is its descriptor
	// [ListenFD].
	Command []string
	Log     string // file that receives its standard error; empty: this process's standard error
	// Runs is the Server.Runs that the warden must have. A warden of an earlier daemon may have
	// another one.
	Runs string
}

// ListenFD is the descriptor of the listening socket in a program that is started as a warden.
const ListenFD = 3

// Launch connects to the warden of a socket, and starts a warden if there is none. If the warden
// ends, its processes end, too. The Client then reports them with ErrLost, and its next Start
// starts another warden.
func Launch(ctx context.Context, l Launcher) (*Client, error) {
	r, err := l.reach(ctx)
	if err != nil {
		return nil, fmt.Errorf("warden %s: %w", l.Socket, err)
	}
	return &Client{&relaunched{launcher: l, now: r}}, nil
}

func connect(ctx context.Context, socket string) (*remote, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unixpacket", socket)
	if err != nil {
		return nil, err
	}
	conn, ok := c.(*net.UnixConn)
	if !ok {
		return nil, fmt.Errorf("connection of type %T, want a unix socket", c)
	}
	deadline := time.Now().Add(answerTimeout)
	if t, ok := ctx.Deadline(); ok {
		deadline = t
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	peer, err := credentials(conn)
	if err == nil && int(peer.Uid) != os.Geteuid() && peer.Uid != 0 {
		err = fmt.Errorf("it is of user %d, want %d", peer.Uid, os.Geteuid())
	}
	var r *remote
	if err == nil {
		r, err = greet(conn, deadline)
	}
	if err != nil {
		_ = conn.Close()
		return nil, errors.Join(err, ctx.Err())
	}
	return r, nil
}

// absent reports whether an error of connect means that there is no warden, or one that is ending.
func absent(err error) bool {
	return errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ECONNRESET) ||
		errors.Is(err, unix.EPIPE) || errors.Is(err, io.EOF) || errors.Is(err, ErrClosed)
}

// retry is the time between two attempts to connect while another process may start the warden.
const retry = 20 * time.Millisecond

// reach connects to the warden, and starts one if there is none.
func (l Launcher) reach(ctx context.Context) (*remote, error) {
	if len(l.Socket) > maxSocket {
		return nil, fmt.Errorf("a path of %d bytes, want at most %d: choose a shorter folder", len(l.Socket), maxSocket)
	}
	if err := private(filepath.Dir(l.Socket)); err != nil {
		return nil, err
	}
	for {
		r, err := connect(ctx, l.Socket)
		if err == nil || !absent(err) {
			return l.check(r, err)
		}
		if r, err = l.start(ctx); err == nil || !absent(err) && !errors.Is(err, unix.EWOULDBLOCK) {
			return l.check(r, err)
		}
		select {
		case <-time.After(retry): // another process starts it, or it has ended meanwhile
		case <-ctx.Done():
			return nil, errors.Join(err, ctx.Err())
		}
	}
}

// check disconnects from a warden whose processes run in something else than is wanted.
func (l Launcher) check(r *remote, err error) (*remote, error) {
	if err != nil || r.runs == l.Runs {
		return r, err
	}
	r.close()
	return nil, fmt.Errorf("it runs processes in %s, want %s: end the node's processes first (kill %d), or start as before",
		cmp.Or(r.runs, "no containers"), cmp.Or(l.Runs, "no containers"), r.pid)
}

// maxSocket is the maximum length of a socket's path, in bytes.
const maxSocket = len(unix.RawSockaddrUnix{}.Path) - 1

// private creates a folder that is closed to other users, or checks that a folder is.
func private(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	info, err := os.Stat(dir)
	if err != nil {
		return err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !info.IsDir() || info.Mode().Perm()&0o077 != 0 || ok && int(stat.Uid) != os.Geteuid() {
		return fmt.Errorf("folder %s is %v of user %d, want one of user %d that is closed to others (chmod 700)", dir, info.Mode(), stat.Uid, os.Geteuid())
	}
	return nil
}

// start starts a warden and connects to it. The error is EWOULDBLOCK if another process is starting
// the warden.
func (l Launcher) start(ctx context.Context) (*remote, error) {
	lock, err := os.OpenFile(l.Socket+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	defer lock.Close() // also unlocks it
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, err
	}
	if r, err := connect(ctx, l.Socket); err == nil || !absent(err) {
		return r, err
	}
	// The socket may be left by a warden that has ended.
	if err := os.Remove(l.Socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	listener, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: l.Socket, Net: "unixpacket"})
	if err != nil {
		return nil, err
	}
	listener.SetUnlinkOnClose(false)
	defer listener.Close()
	if err := os.Chmod(l.Socket, 0o600); err != nil {
		return nil, err
	}
	f, err := listener.File()
	if err != nil {
		return nil, err
	}
	defer f.Close()
	p, err := l.run(f)
	if err != nil {
		return nil, err
	}
	// From here on, only the warden has the listener, so connections that it has not accepted end with
	// it.
	_ = listener.Close()
	_ = f.Close()
	r, err := connect(ctx, l.Socket)
	if absent(err) {
		_ = p.Kill() // fails if it has ended
		state, _ := p.Wait()
		return nil, fmt.Errorf("%s was started and does not answer: %s, %s", l.Command[0], state, l.where())
	}
	return r, errors.Join(err, p.Release()) // its connection says when it ends
}

func (l Launcher) where() string {
	if l.Log == "" {
		return "see its standard error"
	}
	return "see " + l.Log
}

// run starts the program of the warden.
func (l Launcher) run(listener *os.File) (*os.Process, error) {
	// On older kernels, the warden inherits this process's inherited descriptors.
	_ = unix.CloseRange(3, math.MaxInt32, unix.CLOSE_RANGE_CLOEXEC)
	cmd := exec.Command(l.Command[0], l.Command[1:]...)
	cmd.ExtraFiles, cmd.Stderr = []*os.File{listener}, os.Stderr
	// Signals from a terminal must not reach the warden.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if l.Log != "" {
		f, err := os.OpenFile(l.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		cmd.Stderr = f
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return cmd.Process, nil
}

// relaunched is the connection to the current warden of a socket.
type relaunched struct {
	launcher Launcher

	mu     sync.Mutex
	now    *remote
	onExit func(Exit)
	closed bool
}

// current returns the current warden. If that has ended and want is true, current starts another
// one.
func (c *relaunched) current(want bool) (*remote, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case <-c.now.done: // all its ends have been reported
	default:
		return c.now, nil
	}
	if c.closed || !want {
		return c.now, nil // calls to it return why it ended
	}
	ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
	defer cancel()
	r, err := c.launcher.reach(ctx)
	if err != nil {
		return nil, fmt.Errorf("start another warden at %s: %w", c.launcher.Socket, err)
	}
	kept, err := r.attach(c.onExit)
	closeAll(kept) // empty, because the warden is new
	if err != nil {
		r.close()
		return nil, fmt.Errorf("start another warden at %s: %w", c.launcher.Socket, err)
	}
	c.now = r
	return r, nil
}

func (c *relaunched) attach(onExit func(Exit)) ([]Kept, error) {
	r, _ := c.current(false)
	kept, err := r.attach(onExit)
	if err == nil {
		c.mu.Lock()
		c.onExit = onExit
		c.mu.Unlock()
	}
	return kept, err
}

func (c *relaunched) release() error {
	r, _ := c.current(false)
	err := r.release()
	if errors.Is(err, ErrLost) {
		return nil
	}
	return err
}

func (c *relaunched) start(ctx context.Context, p Process) (int, error) {
	r, err := c.current(true)
	if err != nil {
		return 0, err
	}
	return r.start(ctx, p)
}

func (c *relaunched) signal(name string, s syscall.Signal) error {
	r, _ := c.current(false)
	return r.signal(name, s)
}

func (c *relaunched) put(name string, meta []byte, files []*os.File) error {
	r, _ := c.current(false)
	return r.put(name, meta, files)
}

func (c *relaunched) drop(name string) error {
	r, _ := c.current(false)
	return r.drop(name)
}

func (c *relaunched) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	c.now.close()
}
