package node

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"
)

// unixAddress begins the address of an [ImageSource] on the same machine.
const unixAddress = "unix:"

// ServeImages opens a unix socket at path for processes of this user or root, and calls each with
// every connection that wants images. It returns the address for an [ImageSource]. stop closes the
// socket, ends the context of the calls and waits for them.
func ServeImages(path string, log *slog.Logger, each func(ctx context.Context, c net.Conn)) (address string, stop func(), err error) {
	l, err := listen(path)
	if err != nil {
		return "", nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	l.serve(func(c *net.UnixConn) {
		if err := answerImages(c); err != nil {
			log.Warn("request on the socket for images refused", "error", err)
			return
		}
		each(ctx, c)
	})
	return unixAddress + l.path, sync.OnceFunc(func() { cancel(); l.close() }), nil
}

// answerImages reads the request of a connection, and answers it.
func answerImages(c *net.UnixConn) error {
	_ = c.SetDeadline(time.Now().Add(socketTimeout))
	err := knownPeer(c)
	if err == nil {
		var req socketRequest
		if req, err = readRequest(c); err == nil && req.Want != wantImages {
			err = fmt.Errorf("want: %q, want %s", req.Want, wantImages)
		}
	}
	reply := socketReply{V: Version}
	if err != nil {
		reply.refuse(c, err)
		return err
	}
	if err := json.NewEncoder(c).Encode(reply); err != nil {
		return err
	}
	return c.SetDeadline(time.Time{})
}

// DialImages opens a connection to a process of this machine that serves images.
func DialImages(ctx context.Context, s ImageSource) (net.Conn, error) {
	path, ok := strings.CutPrefix(s.Address, unixAddress)
	if !ok {
		return nil, fmt.Errorf("address %q, want %sPATH", s.Address, unixAddress)
	}
	c, _, _, err := dialSocket(ctx, path, socketRequest{Want: wantImages})
	if err != nil {
		return nil, err
	}
	return c, c.SetDeadline(time.Time{})
}

// Local reports whether a source is on the machine of the node that the order is for.
func (s ImageSource) Local() bool { return strings.HasPrefix(s.Address, unixAddress) }

// ImageSource returns where a node serves its images to processes of the same machine.
func (inv *Inventory) ImageSource() ImageSource {
	return ImageSource{Node: inv.Name, Address: unixAddress + inv.Socket}
}
