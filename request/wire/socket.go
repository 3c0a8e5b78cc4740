package wire

import (
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// Socket is a replica's stage socket: a connection that also carries open files. A Socket between
// two processes of one machine is a unix socket, see [NewSocket].
type Socket interface {
	net.Conn
	// SendFiles writes b, which must not be empty, with files at its first byte. It returns how many
	// bytes were written. The receiver gets its own descriptors; the caller still closes the files.
	SendFiles(b []byte, files []*os.File) (int, error)
	// ReceiveFiles reads up to len(b) bytes and the files that came with them. The caller closes
	// the files, even after an error. At the end of the connection, it returns 0 bytes and no
	// error. Only one goroutine at a time may call it.
	ReceiveFiles(b []byte) (n int, files []*os.File, err error)
}

// unixSocket is a [Socket] over a unix stream socket.
type unixSocket struct {
	*net.UnixConn
	oob []byte // room for control messages; nil until the first ReceiveFiles
}

// NewSocket returns a Socket over c, which it owns from now on.
func NewSocket(c *net.UnixConn) Socket { return &unixSocket{UnixConn: c} }

// OpenSocket returns a Socket over the unix socket that f refers to. The Socket has its own
// descriptor, and the caller still closes f.
func OpenSocket(f *os.File) (Socket, error) {
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		_ = c.Close() // nothing was sent
		return nil, fmt.Errorf("got a %T, want a unix socket", c)
	}
	return NewSocket(u), nil
}

// SendFiles implements [Socket].
func (s *unixSocket) SendFiles(b []byte, files []*os.File) (int, error) {
	fds := make([]int, len(files))
	for i, file := range files {
		fds[i] = int(file.Fd())
	}
	n, _, err := s.WriteMsgUnix(b, unix.UnixRights(fds...), nil)
	return n, err
}

// ReceiveFiles implements [Socket] with one recvmsg call.
func (s *unixSocket) ReceiveFiles(b []byte) (n int, files []*os.File, err error) {
	if s.oob == nil {
		s.oob = make([]byte, unix.CmsgSpace(4*MaxFiles))
	}
	n, oobn, flags, _, err := s.ReadMsgUnix(b, s.oob)
	if oobn > 0 {
		var bad error
		if files, bad = filesIn(s.oob[:oobn]); bad != nil && err == nil {
			err = bad
		}
	}
	if err == nil && flags&unix.MSG_CTRUNC != 0 {
		err = fmt.Errorf("more than %d descriptors at a time", MaxFiles)
	}
	return n, files, err
}

// filesIn returns the files in control messages. Go's net package has set close-on-exec on them.
func filesIn(oob []byte) (files []*os.File, err error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("control message: %w", err)
	}
	for _, m := range msgs {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			return files, fmt.Errorf("control message: %w", err)
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "received"))
		}
	}
	return files, nil
}
