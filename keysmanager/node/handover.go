package node

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// serveConn answers a connection's one request.
func (s *Server) serveConn(c *net.UnixConn) {
	_ = c.SetDeadline(time.Now().Add(socketTimeout))
	reply := socketReply{V: Version, Node: s.cfg.Me.ID}
	fail := func(err error) {
		reply.refuse(c, err)
		s.cfg.Log.Warn("request on the node's socket refused", "error", err)
	}
	if err := knownPeer(c); err != nil {
		fail(err)
		return
	}
	req, err := readRequest(c)
	if err != nil {
		fail(err)
		return
	}
	if req.Want != wantImages { // which other daemons ask for; they have no epoch
		if err := admit(s, req.Epoch); err != nil {
			fail(err)
			return
		}
	}
	switch req.Want {
	case wantSocket:
		h, err := hand(s, req)
		if err != nil {
			fail(err)
			return
		}
		if err := h.overUnix(c, reply); err != nil {
			h.failed(err)
		}
	case wantLines:
		s.serveLines(c, reply, req.After)
	case wantImages:
		if s.cfg.Images == nil {
			fail(errors.New("want: images, but this daemon serves none"))
			return
		}
		if json.NewEncoder(c).Encode(reply) == nil && c.SetDeadline(time.Time{}) == nil {
			s.cfg.Images(s.ctx, c)
		}
	default:
		fail(fmt.Errorf("want: %q, want %s, %s or %s", req.Want, wantSocket, wantLines, wantImages))
	}
}

func readRequest(c *net.UnixConn) (socketRequest, error) {
	line, err := bufio.NewReaderSize(c, maxRequest).ReadSlice('\n')
	if err != nil {
		return socketRequest{}, fmt.Errorf("request of %d bytes: %w, want a line of at most %d", len(line), err, maxRequest)
	}
	return decodeRequest(line)
}

func decodeRequest(line []byte) (socketRequest, error) {
	var req socketRequest
	if err := open(line, &req); err != nil {
		return socketRequest{}, fmt.Errorf("request: %w", err)
	}
	return req, nil
}

// handOver sends a reply with a descriptor of conn beside it.
func handOver(c *net.UnixConn, reply socketReply, conn wire.Socket) error {
	b, err := json.Marshal(reply)
	if err != nil {
		return err
	}
	local, ok := conn.(syscall.Conn)
	if !ok {
		return fmt.Errorf("stage socket is a %T, want one with a descriptor, which another process of this machine can get", conn)
	}
	raw, err := local.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	if err := raw.Control(func(fd uintptr) { _, _, failed = c.WriteMsgUnix(append(b, '\n'), unix.UnixRights(int(fd)), nil) }); err != nil {
		return err
	}
	return failed
}

// serveLines sends all lines after a number, until the other side ends or another client follows.
func (s *Server) serveLines(c net.Conn, reply socketReply, after uint64) {
	if json.NewEncoder(c).Encode(reply) != nil {
		return
	}
	_ = c.SetDeadline(time.Time{})
	s.follow(c)
	ended := make(chan struct{})
	go func() { // it says nothing any more; its end is heard
		defer close(ended)
		_, _ = c.Read(make([]byte, 1))
	}()
	defer func() { _ = c.Close(); <-ended }()
	w := bufio.NewWriterSize(c, 64<<10)
	e := json.NewEncoder(w)
	s.out.wakeReaders() // for the kept lines
	for {
		select {
		case <-ended:
			return
		case <-s.out.wake:
		}
		if !s.follows(c) {
			s.out.wakeReaders() // it was meant for the successor
			return
		}
		lines := s.out.take(after)
		_ = c.SetWriteDeadline(time.Now().Add(socketTimeout))
		var err error
		for _, l := range lines {
			err = errors.Join(err, e.Encode(l))
		}
		if err = errors.Join(err, w.Flush()); err != nil {
			s.out.wakeReaders() // the next follower gets the lines
			return
		}
		if len(lines) > 0 {
			after = lines[len(lines)-1].Number
		}
	}
}

// follow makes c the only connection that gets lines.
func (s *Server) follow(c net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.follower != nil {
		_ = s.follower.Close()
	}
	s.follower = c
}

func (s *Server) follows(c net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.follower == c
}
