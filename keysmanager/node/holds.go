package node

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/request/wire"
)

const (
	// overtakenTime is how long a control plane that was overtaken gets the answers of its calls. Its
	// callers wait no longer either (package flow).
	overtakenTime = 2 * time.Second
	// orphanTime is how long a call may run on after its control plane has gone. Then its replica
	// is stopped, because the call keeps it from other work.
	orphanTime = 30 * time.Second
)

// holds has the replicas whose sockets stay in this process, so that the next control plane can
// take them over. Its methods are safe for concurrent use.
type holds struct {
	cfg wire.SwitchConfig
	log *slog.Logger
	end func(replica string) // stops a replica
	// gateway is called with the gateway of a control plane that claims a replica, while mu is held.
	// It may be nil.
	gateway func(at string)

	mu     sync.Mutex
	closed bool
	all    map[string]*held // by replica
	epoch  uint64           // of the control plane that has claimed a replica last
	group  sync.WaitGroup   // goroutines that wait for the end of a replica
}

// held is a replica with its socket, and with what the control plane has said in its claim.
type held struct {
	*wire.Switch

	function string
	turn     sync.Mutex // held while a control plane becomes the owner; taken before holds.mu

	// The fields below are guarded by holds.mu.
	epoch    uint64 // of the owner
	revision uint64
	home     string
}

func newHolds(keep time.Duration, log *slog.Logger, end, gateway func(string)) *holds {
	return &holds{
		cfg: wire.SwitchConfig{Keep: keep, Overtaken: overtakenTime, Patience: orphanTime},
		log: log, end: end, gateway: gateway, all: map[string]*held{},
	}
}

// on reports whether replicas can outlive control planes.
func (h *holds) on() bool { return h.cfg.Keep > 0 }

// add keeps the socket of a replica that a control plane claims.
func (h *holds) add(k *kept, req socketRequest) (*held, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, errors.Join(errors.New("the daemon ends"), k.conn.Close())
	}
	r := &held{Switch: wire.NewSwitch(k.conn, h.cfg), function: k.function, epoch: req.Epoch, revision: req.Revision, home: req.Home}
	h.all[k.replica] = r
	h.group.Go(func() { h.follow(k.replica, r) })
	return r, nil
}

// find returns a replica that a control plane wants to take over.
func (h *holds) find(req socketRequest) (*held, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	r := h.all[req.Replica]
	if r == nil {
		return nil, fmt.Errorf("replica %q cannot be taken over: it has ended, or its socket is not kept here", req.Replica)
	}
	return r, nil
}

// own records the claim of a replica's next owner. It fails if the present owner has a higher
// epoch.
func (h *holds) own(r *held, req socketRequest) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if req.Epoch < r.epoch {
		return fmt.Errorf("%w: the epoch of this one is %d, and the replica's owner has epoch %d", ErrOldEpoch, req.Epoch, r.epoch)
	}
	r.epoch, r.revision, r.home = req.Epoch, req.Revision, req.Home
	h.tellGateway(req)
	return nil
}

// tellGateway tells the gateway of a request that claims a replica, unless a control plane with a
// higher epoch has claimed a replica before. The caller holds h.mu.
func (h *holds) tellGateway(req socketRequest) {
	if req.Keep && h.gateway != nil && req.Epoch >= h.epoch {
		h.epoch = req.Epoch
		h.gateway(req.Gateway)
	}
}

// overtaken reports whether the owner of a replica has a higher epoch.
func (h *holds) overtaken(r *held, epoch uint64) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return epoch < r.epoch
}

// follow forgets a replica when its socket is closed, and stops it unless it has ended by itself.
func (h *holds) follow(replica string, r *held) {
	<-r.Done()
	h.mu.Lock()
	delete(h.all, replica)
	closed := h.closed
	h.mu.Unlock()
	err := r.Err()
	r.Close()
	if err != nil && !closed {
		h.log.Warn("a replica is stopped", "replica", replica, "cause", err)
		h.end(replica)
	}
}

// describe adds to an announcement which replicas can be taken over.
func (h *holds) describe(replicas []Replica) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range replicas {
		if r := h.all[replicas[i].Name]; r != nil {
			replicas[i].Kept, replicas[i].Revision, replicas[i].Home = true, r.revision, r.home
		}
	}
}

// close closes the sockets of all replicas, which end then.
func (h *holds) close() {
	h.mu.Lock()
	h.closed = true
	var all []*held
	for _, r := range h.all {
		all = append(all, r)
	}
	h.mu.Unlock()
	for _, r := range all {
		r.Close()
	}
	h.group.Wait()
}

// handing is the hand-over of a stage socket to a control plane.
type handing struct {
	running

	s     *Server
	req   socketRequest
	first bool        // the control plane has started the replica itself
	conn  wire.Socket // the replica's own socket; nil: it is kept in hold
	hold  *held
}

// hand returns the stage socket that a request asks for.
func hand(s *Server, req socketRequest) (*handing, error) {
	if req.Adopt {
		r, err := s.holds.find(req)
		if err != nil {
			return nil, err
		}
		return &handing{running: running{req.Replica, r.function}, s: s, req: req, hold: r}, nil
	}
	k, err := s.takeKept(req.Replica, req.Order)
	if err != nil {
		return nil, err
	}
	h := &handing{running: running{req.Replica, k.function}, s: s, req: req, first: true}
	if req.Keep && s.holds.on() {
		h.hold, err = s.holds.add(k, req)
		return h, err
	}
	h.conn = k.conn
	s.holds.mu.Lock()
	defer s.holds.mu.Unlock()
	s.holds.tellGateway(req)
	return h, nil
}

// connect makes a control plane the owner of the replica, which is kept in hold. If a control plane
// with a higher epoch has become the owner while the request was read, connect closes far.
func (h *handing) connect(far wire.Socket) (gone <-chan struct{}, err error) {
	h.hold.turn.Lock()
	defer h.hold.turn.Unlock()
	if err := h.s.holds.own(h.hold, h.req); err != nil {
		_ = far.Close()
		return nil, err
	}
	return h.hold.Connect(far)
}

// overUnix sends the reply and a descriptor: that of the replica's own socket, or of a socket that
// is connected with the Switch.
func (h *handing) overUnix(c *net.UnixConn, reply socketReply) error {
	if h.hold == nil {
		// The client has it now; otherwise the replica sees that its connection is closed.
		return errors.Join(handOver(c, reply, h.conn), h.conn.Close())
	}
	theirs, ours, err := socketPair()
	if err != nil {
		return err
	}
	if _, err := h.connect(ours); err != nil {
		return errors.Join(err, theirs.Close())
	}
	return errors.Join(handOver(c, reply, theirs), theirs.Close())
}

// overStream connects the replica with a stream until either ends.
func (h *handing) overStream(c net.Conn) {
	items, log := h.s.cfg.Items, h.s.cfg.Log
	if h.hold == nil {
		relay(h.running, h.conn, c, items, log)
		return
	}
	if items == nil {
		gone, err := h.connect(wire.OverStream(c))
		if err != nil {
			log.Warn("a stream is not connected with a replica", "replica", h.replica, "error", err)
			return
		}
		<-gone
		return
	}
	near, ours, err := socketPair()
	if err != nil {
		log.Error("failed to connect a control plane with a replica", "replica", h.replica, "error", err)
		return
	}
	gone, err := h.connect(ours)
	if err != nil {
		log.Warn("a stream is not connected with a replica", "replica", h.replica, "error", err)
		_ = near.Close()
		return
	}
	relay(h.running, near, c, items, log)
	<-gone
}

// failed handles a hand-over that has failed. Nobody else knows a replica that has just started.
func (h *handing) failed(err error) {
	h.s.cfg.Log.Warn("failed to hand over a replica's socket", "replica", h.replica, "stopped", h.first, "error", err)
	if !h.first {
		return
	}
	if h.hold != nil {
		if !h.s.holds.overtaken(h.hold, h.req.Epoch) {
			h.hold.Close()
		}
		return
	}
	_ = h.conn.Close() // it may be closed already
	h.s.end(h.replica)
}

// socketPair returns two connected Sockets.
func socketPair() (a, b wire.Socket, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socketpair: %w", err)
	}
	var ends [2]wire.Socket
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "stage")
		var failed error
		ends[i], failed = wire.OpenSocket(f)
		err = errors.Join(err, failed, f.Close()) // the socket has its own descriptor
	}
	if err != nil {
		for _, s := range ends {
			if s != nil {
				_ = s.Close()
			}
		}
		return nil, nil, err
	}
	return ends[0], ends[1], nil
}
