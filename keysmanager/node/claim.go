package node

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// dialSocket sends a request to a daemon. It returns the connection after the answer, and what the
// daemon has sent besides.
func dialSocket(ctx context.Context, path string, req socketRequest) (c *net.UnixConn, r *bufio.Reader, fd int, err error) {
	short, done, err := shorten(path)
	if err != nil {
		return nil, nil, -1, err
	}
	defer done()
	ctx, cancel := context.WithTimeout(ctx, socketTimeout)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", short)
	if err != nil {
		return nil, nil, -1, fmt.Errorf("node's socket %s: %w", path, err)
	}
	c = conn.(*net.UnixConn) //nolint:forcetypeassert // dialled as unix
	defer context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Now()) })()
	rights := &rightsReader{c: c, fd: -1}
	r = bufio.NewReaderSize(rights, readBytes)
	if err = ask(c, r, req); err != nil {
		rights.drop()
		_ = c.Close()
		return nil, nil, -1, fmt.Errorf("node's socket %s: %w", path, err)
	}
	return c, r, rights.fd, nil
}

func ask(c *net.UnixConn, r *bufio.Reader, req socketRequest) error {
	if err := knownPeer(c); err != nil {
		return err
	}
	req.V = Version
	if err := json.NewEncoder(c).Encode(req); err != nil {
		return err
	}
	line, err := readLine(r)
	if err != nil {
		return err
	}
	return readReply(line)
}

// readBytes is the size of a connection's buffer. It is small, because each node has a connection.
const readBytes = 4 << 10

var errLongLine = errors.New("a line of more")

// readLine returns the next line with its end. The next call may overwrite the result.
func readLine(r *bufio.Reader) ([]byte, error) {
	line, err := r.ReadSlice('\n')
	if !errors.Is(err, bufio.ErrBufferFull) {
		return line, err
	}
	long := append([]byte{}, line...)
	for errors.Is(err, bufio.ErrBufferFull) && len(long) <= maxLineBytes {
		line, err = r.ReadSlice('\n')
		long = append(long, line...)
	}
	if len(long) > maxLineBytes {
		return nil, fmt.Errorf("%w than %d bytes", errLongLine, maxLineBytes)
	}
	return long, err
}

func readReply(line []byte) error {
	var reply socketReply
	if err := open(line, &reply); err != nil {
		return fmt.Errorf("answer: %w", err)
	}
	if reply.Error != "" {
		return errors.New(reply.Error)
	}
	return nil
}

// rightsReader reads from a socket and keeps the first descriptor that it receives.
type rightsReader struct {
	c  *net.UnixConn
	fd int
}

// Read implements io.Reader.
func (r *rightsReader) Read(b []byte) (int, error) {
	oob := make([]byte, unix.CmsgSpace(4*8))
	n, oobn, _, _, err := r.c.ReadMsgUnix(b, oob)
	if err != nil {
		return max(n, 0), err
	}
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil {
		return n, err
	}
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			return n, err
		}
		for _, fd := range fds {
			if r.fd >= 0 {
				_ = unix.Close(fd)
				continue
			}
			r.fd = fd
		}
	}
	return n, nil
}

func (r *rightsReader) drop() {
	if r.fd >= 0 {
		_ = unix.Close(r.fd)
	}
}

// claim takes the stage socket of a replica that an order has started.
func claim(ctx context.Context, path string, o Order) (wire.Socket, error) {
	c, _, fd, err := dialSocket(ctx, path, socketRequest{Want: wantSocket, Replica: o.Replica, Order: o.ID, Epoch: o.Epoch})
	if err != nil {
		return nil, err
	}
	_ = c.Close()
	if fd < 0 {
		return nil, fmt.Errorf("node's socket %s: no descriptor came with the answer", path)
	}
	f := os.NewFile(uintptr(fd), "stage")
	defer f.Close() // the socket has its own descriptor
	stage, err := wire.OpenSocket(f)
	if err != nil {
		return nil, fmt.Errorf("stage socket: %w", err)
	}
	return stage, nil
}
