package node

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// Wants returns the kinds of streams that [ServeStream] serves.
func Wants() []string { return []string{wantSocket, wantLines} }

// ServeStream has a daemon serve a stream of a control plane, whose first line was read. It
// returns when the stream has ended; the caller closes it then.
func ServeStream(s *Server, first json.RawMessage, c net.Conn) {
	_ = c.SetDeadline(time.Now().Add(socketTimeout))
	reply := socketReply{V: Version, Node: s.cfg.Me.ID}
	req, err := decodeRequest(first)
	if err == nil {
		err = admit(s, req.Epoch)
	}
	var h *handing
	switch {
	case err != nil:
	case req.Want == wantLines:
		s.serveLines(c, reply, req.After)
		return
	case req.Want == wantSocket:
		h, err = hand(s, req)
	default:
		err = fmt.Errorf("want: %q, want %s or %s", req.Want, wantSocket, wantLines)
	}
	if err != nil {
		reply.refuse(c, err)
		s.cfg.Log.Warn("stream of the tunnel refused", "error", err)
		return
	}
	err = json.NewEncoder(c).Encode(reply)
	if err == nil {
		err = c.SetDeadline(time.Time{})
	}
	if err != nil {
		h.failed(err)
		return
	}
	h.overStream(c)
}

// relay passes frames between a replica and a stream until either ends, and then ends the other.
// items keeps large outputs of the function; nil: they pass, too.
func relay(of running, near wire.Socket, c net.Conn, items Items, log *slog.Logger) {
	far := wire.OverStream(c)
	end := func(direction string, err error) {
		_ = far.Close() // what was sent arrives
		_ = near.Close()
		if err != nil {
			log.Debug("relay has ended", "replica", of.replica, "direction", direction, "error", err)
		}
	}
	toNear, toFar := wire.NewOutlet(near), wire.NewOutlet(far)
	var in, out wire.Edit
	if items != nil {
		carry := newCarry(items, of, toNear, toFar, log)
		defer carry.close()
		in, out = carry.toReplica, carry.fromReplica
	}
	var both sync.WaitGroup
	both.Go(func() { end("to the replica", wire.Relay(toNear, far, in)) })
	both.Go(func() { end("from the replica", wire.Relay(toFar, near, out)) })
	both.Wait()
}
