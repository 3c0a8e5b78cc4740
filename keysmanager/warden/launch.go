package warden

import (
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

// Launcher says where a warden is and how one is started.
type Launcher struct {
	Socket string // its path; its folder is made when it is missing, and must be closed to others
	// Command is a program that calls Serve with the listening socket, its descriptor 3: [ListenFD].
	Command []string
	Log     string // file that its standard error is appended to; empty: ours
}

// ListenFD is the descriptor on which a program that is started as a warden finds its socket.
const ListenFD = 3

// Launch returns the way to the warden of a socket, which is started if it is not there. When it ends, which ends what it has
// started, all that is told with ErrLost, and the next Start starts another.
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
		return nil, fmt.Errorf("a %T, want a unix socket", c)
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

// absent tells whether an error of connect means that there is no warden, or one that ends this moment.
func absent(err error) bool {
	return errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ECONNRESET) ||
		errors.Is(err, unix.EPIPE) || errors.Is(err, io.EOF) || errors.Is(err, ErrClosed)
}

// retry is how often what somebody else does is looked at again.
const retry = 20 * time.Millisecond

// reach connects, and starts a warden when there is none.
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
			return r, err
		}
		if r, err = l.start(ctx); err == nil || !absent(err) && !errors.Is(err, unix.EWOULDBLOCK) {
			return r, err
		}
		select {
		case <-time.After(retry): // somebody else starts it, or it has ended meanwhile
		case <-ctx.Done():
			return nil, errors.Join(err, ctx.Err())
		}
	}
}

// maxSocket is the longest path of a socket in bytes.
const maxSocket = len(unix.RawSockaddrUnix{}.Path) - 1

// private makes a folder that is closed to others, or checks that it is.
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

// start starts a warden and connects to it. When another does so this moment, the error is EWOULDBLOCK.
func (l Launcher) start(ctx context.Context) (*remote, error) {
	lock, err := os.OpenFile(l.Socket+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	defer lock.Close() // and so unlocked
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, err
	}
	if r, err := connect(ctx, l.Socket); err == nil || !absent(err) {
		return r, err
	}
	if err := os.Remove(l.Socket); err != nil && !errors.Is(err, os.ErrNotExist) { // of one that has ended
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
	_ = listener.Close() // now the warden alone has it: when it ends, so does a connection that it has not taken
	_ = f.Close()
	r, err := connect(ctx, l.Socket)
	if absent(err) {
		_ = p.Kill() // fails when it has ended
		state, _ := p.Wait()
		return nil, fmt.Errorf("%s was started and does not answer: %s, %s", l.Command[0], state, l.where())
	}
	return r, errors.Join(err, p.Release()) // else its connection says when it has ended
}

func (l Launcher) where() string {
	if l.Log == "" {
		return "see its standard error"
	}
	return "see " + l.Log
}

// run starts the program.
func (l Launcher) run(listener *os.File) (*os.Process, error) {
	_ = unix.CloseRange(3, math.MaxInt32, unix.CLOSE_RANGE_CLOEXEC) // older kernels: what we were started with stays open in it
	cmd := exec.Command(l.Command[0], l.Command[1:]...)
	cmd.ExtraFiles, cmd.Stderr = []*os.File{listener}, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // signals from a terminal are for us alone
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

// relaunched is the way to the warden of a socket, whichever it is at the time.
type relaunched struct {
	launcher Launcher

	mu     sync.Mutex
	now    *remote
	onExit func(Exit)
	closed bool
}

// current returns the present warden; when that has ended, and want says so, a fresh one.
func (c *relaunched) current(want bool) (*remote, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case <-c.now.done: // and all its ends were told
	default:
		return c.now, nil
	}
	if c.closed || !want {
		return c.now, nil // which says why not
	}
	ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
	defer cancel()
	r, err := c.launcher.reach(ctx)
	if err != nil {
		return nil, fmt.Errorf("warden %s: the next one: %w", c.launcher.Socket, err)
	}
	kept, err := r.attach(c.onExit)
	closeAll(kept) // nothing: it is new
	if err != nil {
		r.close()
		return nil, fmt.Errorf("warden %s: the next one: %w", c.launcher.Socket, err)
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

func (c *relaunched) start(p Process) (int, error) {
	r, err := c.current(true)
	if err != nil {
		return 0, err
	}
	return r.start(p)
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
