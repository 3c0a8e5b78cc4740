// Package guest starts a program through the first program of a container (package entry), from a
// sandbox.Command.
package guest

import (
	"context"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/container/entry"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// Guest is a program in a container.
type Guest struct {
	pid   int
	pidfd *os.File
}

// Begin starts the program of a command through the first program at the other end of conn, the
// process init of this machine. o says what the program gets. If ctx ends first, Begin fails, and
// conn is closed.
func Begin(ctx context.Context, conn *entry.Conn, c sandbox.Command, o sandbox.Outline, init int, until time.Time) (*Guest, error) {
	keep := context.AfterFunc(ctx, conn.Close)
	defer keep()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer null.Close()
	files := []*os.File{c.Stdin, c.Stdout, c.Stderr}
	for i := range files {
		if files[i] == nil {
			files[i] = null
		} else if c.Chroot != "" {
			ownPipe(files[i], o.UID, o.GID)
		}
	}
	files = append(files, c.Files...)
	wanted := entry.Wanted{Program: o.Program, Argv: o.Argv, Env: o.Env, Dir: o.Dir}
	if c.Held {
		wanted = wanted.Held(len(files) - 1)
	}
	inside, err := conn.Begin(wanted, files, until)
	if err != nil {
		return nil, err
	}
	pid, err := sandbox.PIDsOf(init).Outside(inside)
	if err != nil {
		return nil, fmt.Errorf("process %d of the container: %w", inside, err)
	}
	// The process is not reaped yet, so the number is its own.
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, fmt.Errorf("process %d: %w", pid, err)
	}
	g := &Guest{pid, os.NewFile(uintptr(fd), "pidfd")}
	err = conn.Go()
	if err == nil && !keep() { // the connection is closed, or about to be
		err = context.Cause(ctx)
	}
	if err != nil {
		g.Close()
		return nil, err
	}
	return g, nil
}

// PID returns the number of the program on this machine. It stays the same after its end.
func (g *Guest) PID() int { return g.pid }

// Signal signals the program.
func (g *Guest) Signal(s syscall.Signal) error { return Signal(g.pidfd, s) }

// Close closes the descriptor of the program.
func (g *Guest) Close() { _ = g.pidfd.Close() } // nothing was written

// Signal signals the process of a pidfd. A closed one stands for a process that has ended.
func Signal(pidfd *os.File, s syscall.Signal) error {
	raw, err := pidfd.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	if raw.Control(func(fd uintptr) { failed = unix.PidfdSendSignal(int(fd), s, nil, 0) }) != nil {
		return os.ErrProcessDone
	}
	return failed
}

// ownPipe makes a user the owner of a pipe, so that the user's program can open it again as
// /dev/stdout. Other files stay as they are.
func ownPipe(f *os.File, uid, gid int) {
	raw, err := f.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) { // if it fails, only that opening fails
		var st unix.Stat_t
		if unix.Fstat(int(fd), &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFIFO {
			_ = unix.Fchown(int(fd), uid, gid)
		}
	})
}
