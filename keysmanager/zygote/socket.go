package zygote

import (
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// MaxOrder is the largest message on a zygote's socket, in bytes.
const MaxOrder = 64 << 10

// sendTimeout bounds how long a zygote that does not read can block its daemon.
const sendTimeout = 5 * time.Second

// Bounds of the zygote's messages: a zygote may send this number of answers per fork order, and
// this number of unasked messages in addition, such as answers to orders of an earlier daemon. A
// zygote that sends more is ended, because it would keep the daemon busy.
const (
	answers = 2 // that a child is there, and that it has ended
	unasked = 4096
)

// control is the daemon's end of a zygote's control socket.
type control struct {
	conn *net.UnixConn // SOCK_SEQPACKET; nil: memory in place of a zygote has none
	owed atomic.Int64  // messages that the zygote may still send
}

// send sends a message, and a copy of file unless file is nil.
func (c *control) send(o wire.Order, file *os.File) error {
	var rights []byte
	if file != nil {
		rights = unix.UnixRights(int(file.Fd()))
	}
	_ = c.conn.SetWriteDeadline(time.Now().Add(sendTimeout)) // fails as the write does
	if _, _, err := c.conn.WriteMsgUnix(wire.AppendOrder(nil, o), rights, nil); err != nil {
		return fmt.Errorf("order to zygote: %w", err)
	}
	return nil
}

// chatty counts a message, and reports whether the zygote has sent more than it was asked for.
func (c *control) chatty() bool { return c.owed.Add(-1) < -unasked }

// receive reads one message.
func receive(conn *net.UnixConn, buf []byte) (wire.Order, error) {
	n, err := conn.Read(buf)
	if err != nil {
		return wire.Order{}, err
	}
	return wire.DecodeOrder(buf[:n])
}

// Socketpair creates a pair of sockets of a kind, such as unix.SOCK_STREAM: the daemon's end and
// the process's end. The caller closes both.
func Socketpair(kind int) (ours *net.UnixConn, theirs *os.File, err error) {
	file, theirs, err := pair(kind)
	if err != nil {
		return nil, nil, err
	}
	defer file.Close() // the connection has its own copy
	if ours, err = unixConn(file); err != nil {
		_ = theirs.Close()
		return nil, nil, err
	}
	return ours, theirs, nil
}

// pair creates the two ends of a socket of a kind. The files are in blocking mode, so that passing
// them on does not change the mode of connections made of them.
func pair(kind int) (ours, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socket: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "our end"), os.NewFile(uintptr(fds[1]), "process's end"), nil
}

// unixConn returns a connection with its own descriptor for the same socket.
func unixConn(f *os.File) (*net.UnixConn, error) {
	c, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	conn, ok := c.(*net.UnixConn)
	if !ok {
		_ = c.Close()
		return nil, fmt.Errorf("socket: got a %T, want a unix socket", c)
	}
	return conn, nil
}
