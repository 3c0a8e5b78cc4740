// Package entry is the way of a process into a container. Descriptors, arguments and the
// environment cannot pass through containerd, so a container's first program is a small one of ours
// that gets them by a unix socket. That program, [Main], starts the wanted program, hands on its
// signals, reaps what it leaves, and ends when it ends or when the other side has gone. In place of
// one program, it can start several: see [Conn.Room].
package entry

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Paths in a container.
const (
	Program = "/dev/stagecoach/init" // our first program
	Folder  = "/dev/stagecoach/run"  // has the socket, until the program has connected to it
	Socket  = "socket"               // the name of the socket there
)

// Limits of a message.
const (
	maxMessage = 160 << 10 // bytes of a Wanted
	maxSaid    = 16 << 10  // bytes of an answer
	maxFiles   = 253       // descriptors; the kernel's limit
)

// Wanted says which program runs.
type Wanted struct {
	Program string // absolute; empty: it is looked for in the environment's PATH
	Argv    []string
	Env     []string
	Dir     string
	// Open says which of the program's descriptors are open. The descriptors beside the message are
	// these, in order.
	Open []bool
}

// header begins the message of a Wanted. Its strings follow, each after a zero byte: JSON would
// change bytes that are no UTF-8.
type header struct {
	Args int    `json:"args"` // number of arguments
	Open []bool `json:"open"`
	Room bool   `json:"room,omitempty"` // there is no program: see Conn.Room
}

const zero = "\x00"

func (w Wanted) encode() ([]byte, error) {
	b, err := json.Marshal(header{Args: len(w.Argv), Open: w.Open})
	if err != nil {
		return nil, err
	}
	all := slices.Concat([]string{w.Program, w.Dir}, w.Argv, w.Env)
	for _, s := range all {
		if strings.Contains(s, zero) {
			return nil, fmt.Errorf("%.40q has a zero byte, want arguments and environment without", s)
		}
	}
	return append(b, zero+strings.Join(all, zero)...), nil
}

func decode(b []byte) (w Wanted, err error) {
	all := strings.Split(string(b), zero)
	var h header
	if err := json.Unmarshal([]byte(all[0]), &h); err != nil {
		return w, err
	}
	if h.Room {
		return w, errRoom
	}
	if h.Args < 0 || len(all) < 3+h.Args {
		return w, fmt.Errorf("a message of %d strings, want %d arguments among them", len(all), h.Args)
	}
	return Wanted{Program: all[1], Dir: all[2], Argv: all[3 : 3+h.Args], Env: all[3+h.Args:], Open: h.Open}, nil
}

// said is a message of the first program.
type said struct {
	Fault string `json:"fault,omitempty"` // why the program does not run
	PID   int    `json:"pid,omitempty"`   // of the program, in the container's namespace
	// Status is how the program has ended, once Ended is set.
	Ended  bool   `json:"ended,omitempty"`
	Status uint32 `json:"status,omitempty"`
}

// Conn is the connection of a Runtime to the first program of a container. When it is closed, all
// processes of the container end.
type Conn struct{ conn *net.UnixConn }

// Begin has the program started, with these descriptors; nil stands for a closed one. It returns
// the program's number in the container's namespace. The process is not reaped before Go.
func (c *Conn) Begin(w Wanted, files []*os.File, until time.Time) (pid int, err error) {
	if err := c.conn.SetDeadline(until); err != nil {
		return 0, err
	}
	var fds []int
	for _, f := range files {
		w.Open = append(w.Open, f != nil)
		if f == nil {
			continue
		}
		raw, err := f.SyscallConn() // Fd would make the file a blocking one
		if err != nil {
			return 0, err
		}
		// Programs expect blocking descriptors; os/exec does the same. The caller keeps the files open
		// meanwhile.
		var failed error
		if err := raw.Control(func(fd uintptr) {
			fds, failed = append(fds, int(fd)), unix.SetNonblock(int(fd), false)
		}); err != nil || failed != nil {
			return 0, errors.Join(err, failed)
		}
	}
	b, err := w.encode()
	if err != nil {
		return 0, err
	}
	if len(b) > maxMessage || len(fds) > maxFiles {
		return 0, fmt.Errorf("arguments and environment of %d bytes and %d descriptors, want at most %d and %d", len(b), len(fds), maxMessage, maxFiles)
	}
	if _, _, err := c.conn.WriteMsgUnix(b, unix.UnixRights(fds...), nil); err != nil {
		return 0, fmt.Errorf("its first program: %w", err)
	}
	s, err := c.hear()
	switch {
	case err != nil:
		return 0, err
	case s.Fault != "":
		return 0, errors.New(s.Fault)
	case s.PID <= 0:
		return 0, errors.New("its first program has started nothing and does not say why")
	}
	return s.PID, nil
}

// Go tells the first program that the number of the process is known.
func (c *Conn) Go() error {
	if _, err := c.conn.Write([]byte("{}")); err != nil {
		return fmt.Errorf("its first program: %w", err)
	}
	return c.conn.SetDeadline(time.Time{})
}

// Status waits until the program has ended, and returns how. The error says that the first program
// has ended without telling.
func (c *Conn) Status() (unix.WaitStatus, error) {
	s, err := c.hear()
	if err == nil && !s.Ended {
		err = errors.New("its first program says something else than how its program has ended")
	}
	return unix.WaitStatus(s.Status), err
}

// Close ends the container's processes.
func (c *Conn) Close() { _ = c.conn.Close() } // nothing is on its way

func (c *Conn) hear() (said, error) {
	buf := make([]byte, maxSaid)
	n, err := c.conn.Read(buf)
	if err == nil && n == 0 {
		err = errors.New("it has ended early")
	}
	if err != nil {
		return said{}, fmt.Errorf("its first program: %w", err)
	}
	var s said
	if err := json.Unmarshal(buf[:n], &s); err != nil {
		return said{}, fmt.Errorf("its first program: %w", err)
	}
	return s, nil
}

// Listener waits for a container's first program.
type Listener struct{ l *net.UnixListener }

// Listen opens the socket at a path on this machine. Only this user and root can connect. The
// caller closes it.
func Listen(path string, uid, gid int) (Listener, error) {
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		return Listener{}, err
	}
	if err := errors.Join(os.Chmod(path, 0o600), os.Chown(path, uid, gid)); err != nil {
		return Listener{}, errors.Join(err, l.Close())
	}
	return Listener{l}, nil
}

// Accept waits for the first program, whose number on this machine is pid. Other processes are
// refused. The socket is removed when Accept returns.
func (l Listener) Accept(pid int, until time.Time) (*Conn, error) {
	conn, _, err := l.AcceptFrom(func(of int) bool { return of == pid }, until)
	return conn, err
}

// AcceptFrom is Accept for a first program whose number on this machine is not known yet. wanted
// reports whether a process is the one. AcceptFrom returns its number.
func (l Listener) AcceptFrom(wanted func(pid int) bool, until time.Time) (_ *Conn, pid int, err error) {
	defer l.Close()
	if err := l.l.SetDeadline(until); err != nil {
		return nil, 0, err
	}
	for {
		c, err := l.l.AcceptUnix()
		if err != nil {
			return nil, 0, err
		}
		if who, err := peer(c); err == nil && wanted(int(who.Pid)) {
			return &Conn{c}, int(who.Pid), nil
		}
		_ = c.Close()
	}
}

// Close closes and removes the socket. A second call does nothing.
func (l Listener) Close() { _ = l.l.Close() }

// peer returns the process at the other end and its user, as they were when it connected.
func peer(c *net.UnixConn) (who *unix.Ucred, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	closed := raw.Control(func(fd uintptr) { who, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	return who, errors.Join(closed, err)
}

// files returns the descriptors of control messages.
func files(oob []byte) ([]int, error) {
	all, err := syscall.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	var out []int
	for _, m := range all {
		fds, err := syscall.ParseUnixRights(&m)
		if err != nil {
			return nil, err
		}
		out = append(out, fds...)
	}
	return out, nil
}
