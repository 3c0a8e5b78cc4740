package entry

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// errRoom is the result of a message that asks for a room.
var errRoom = errors.New("the first program keeps a room")

// Room makes the first program start programs later, each on a connection of [Conn.Open], not
// the one program of Begin. The container ends when c is closed.
func (c *Conn) Room(until time.Time) error {
	b, err := json.Marshal(header{Room: true})
	if err != nil {
		return err
	}
	if err := c.conn.SetDeadline(until); err != nil {
		return err
	}
	if _, err := c.conn.Write(b); err != nil {
		return fmt.Errorf("its first program: %w", err)
	}
	s, err := c.hear()
	if err == nil && s.Fault != "" {
		err = errors.New(s.Fault)
	}
	if err != nil {
		return err
	}
	return c.conn.SetDeadline(time.Time{})
}

// Open returns a connection on which one more program begins, after Room. Several of them may run
// at the same time. When the connection is closed, the process group of the program is killed.
func (c *Conn) Open() (*Conn, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("connection to its first program: %w", err)
	}
	defer unix.Close(fds[1])
	ours, err := connOf(fds[0])
	if err != nil {
		return nil, err
	}
	if _, _, err := c.conn.WriteMsgUnix([]byte("{}"), unix.UnixRights(fds[1]), nil); err != nil {
		_ = ours.Close()
		return nil, fmt.Errorf("its first program: %w", err)
	}
	return &Conn{ours}, nil
}

// Ended waits until the container of a room has ended.
func (c *Conn) Ended() { _, _ = c.conn.Read(make([]byte, 1)) } // nothing is sent

// connOf returns the connection of a socket, and closes the descriptor.
func connOf(fd int) (*net.UnixConn, error) {
	f := os.NewFile(uintptr(fd), "socket")
	defer f.Close() // FileConn has duplicated it
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	if u, ok := c.(*net.UnixConn); ok {
		return u, nil
	}
	return nil, errors.Join(fmt.Errorf("a connection of type %T, want a unix socket", c), c.Close())
}

// room has the programs that a first program has started.
type room struct {
	known chan struct{} // gets an element when a Runtime knows one more program

	mu       sync.Mutex
	programs map[int]*member // by number
}

// member is a program of a room.
type member struct {
	conn  *net.UnixConn
	known bool // the Runtime knows its process, which may be reaped from now on
}

func newRoom() *room {
	return &room{known: make(chan struct{}, 1), programs: map[int]*member{}}
}

// run starts programs until the Runtime closes the connection, and then ends this process and all
// others of the container.
func (r *room) run(conn *net.UnixConn, signals <-chan os.Signal) int {
	tell(conn, said{})
	go func() { // ends with this process
		for {
			one, err := r.accept(conn)
			if err != nil {
				os.Exit(killed)
			}
			go r.serve(one)
		}
	}()
	for {
		select {
		case <-signals: // most often SIGCHLD
		case <-r.known:
		}
		r.reap()
	}
}

// accept waits for the next connection of a program.
func (r *room) accept(conn *net.UnixConn) (*net.UnixConn, error) {
	buf, oob := make([]byte, 16), make([]byte, unix.CmsgSpace(4))
	n, oobn, _, _, err := conn.ReadMsgUnix(buf, oob)
	if err == nil && n == 0 {
		err = errors.New("the Runtime has gone")
	}
	if err != nil {
		return nil, err
	}
	fds, err := files(oob[:oobn])
	if err == nil && len(fds) != 1 {
		err = fmt.Errorf("%d descriptors, want 1", len(fds))
	}
	if err != nil {
		closeAll(fds)
		return nil, err
	}
	return connOf(fds[0])
}

// serve starts the program of a connection, and kills it if the connection is closed.
func (r *room) serve(conn *net.UnixConn) {
	w, fds, err := receive(conn)
	var pid int
	var m *member
	if err == nil {
		pid, m, err = r.start(w, fds, conn)
		closeAll(fds)
	}
	if err != nil {
		tell(conn, said{Fault: err.Error()})
		_ = conn.Close()
		return
	}
	tell(conn, said{PID: pid})
	buf := make([]byte, maxSaid)
	_, failed := conn.Read(buf)
	r.mu.Lock()
	m.known = true
	r.mu.Unlock()
	select {
	case r.known <- struct{}{}:
	default:
	}
	if failed == nil {
		_, _ = conn.Read(buf) // nothing is sent: it returns when the Runtime or reap has closed it
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.programs[pid] == m { // else it was reaped
		_ = unix.Kill(-pid, unix.SIGKILL)
	}
}

// start starts a program.
func (r *room) start(w Wanted, fds []int, conn *net.UnixConn) (pid int, m *member, err error) {
	r.mu.Lock() // so that reap knows each of them
	defer r.mu.Unlock()
	if pid, err = start(w, fds); err != nil {
		return 0, nil, err
	}
	m = &member{conn: conn}
	r.programs[pid] = m
	return pid, m, nil
}

// reap reaps programs that have ended, and what they have left. It waits for a program that the
// Runtime does not know yet.
func (r *room) reap() {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := true
	for pid, m := range r.programs {
		if m.known {
			r.reapOne(pid)
		} else {
			all = false
		}
	}
	for all && r.reapOne(-1) {
	}
}

// reapOne reaps a process that has ended; -1: any. If it is a program, the others of its process
// group are killed, and the Runtime hears of its end.
func (r *room) reapOne(which int) bool {
	var status unix.WaitStatus
	pid, err := unix.Wait4(which, &status, unix.WNOHANG, nil)
	for errors.Is(err, unix.EINTR) {
		pid, err = unix.Wait4(which, &status, unix.WNOHANG, nil)
	}
	if err != nil || pid <= 0 {
		return false
	}
	if m := r.programs[pid]; m != nil {
		delete(r.programs, pid)
		_ = unix.Kill(-pid, unix.SIGKILL) // numbers of groups are not given again so soon
		tell(m.conn, said{Ended: true, Status: uint32(status)})
		_ = m.conn.Close()
	}
	return true
}
