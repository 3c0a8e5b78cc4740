package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// Worker is the KeysManager that a [Server] serves.
type Worker interface {
	// Start starts a replica. If ctx ends first, the replica is stopped. progress is called for
	// each phase that has ended.
	Start(ctx context.Context, o Order, progress func(Phase)) (Started, error)
	// Do carries out an order of any other kind. It returns how many bytes of memory were loaded or
	// evicted.
	Do(ctx context.Context, o Order) (int64, error)
	// Inventory returns what the node has. The server adds its identity.
	Inventory() Inventory
}

// Started is a replica's process. Conn is the control plane's end of the stage socket; the
// receiver closes it.
type Started struct {
	PID int
	// Start path: fork, forkheap, parked, resident, map, cold or process, as in the constants of
	// package keysmanager.
	Path   string
	Phases []Phase // in order
	Conn   wire.Socket
}

// ServerConfig configures a Server.
type ServerConfig struct {
	Me     Identity // see Identify
	Bus    Bus
	Worker Worker
	Codes  Codes  // of the Worker's errors
	Socket string // path of the unix socket; its folder is created, for this user only
	// host:port where a tunnel serves [ServeStream]; empty: nowhere.
	Address string
	// Processes of this machine use the tunnel, too: the socket is not announced.
	Remote bool
	// Serves images on a connection, until the connection or ctx ends; nil: none are served.
	Images func(ctx context.Context, c net.Conn)
	Items  Items // nil: large outputs go to the control plane
	Log    *slog.Logger

	// File that keeps the highest epoch of control planes; empty: a restart forgets it.
	Epoch string

	Announce  time.Duration // between announcements when nothing changes; 0: a second
	Unclaimed time.Duration // how long a started replica's socket waits to be claimed; 0: a minute
	// How long replicas may outlive the control plane that has claimed them, if it says that another
	// one may take them over. 0: they end with it.
	Keep time.Duration
	// Claimed is called before a control plane gets a replica that may outlive it. Functions of this
	// machine reach it at the address; empty: it is on another machine. nil: nothing is called.
	Claimed func(gateway string)
}

// Bounds of what a Server keeps.
const (
	answersKept = 4096
	eventsKept  = 4096
	maxRunning  = 4096                   // orders under way
	coalesce    = 100 * time.Millisecond // between announcements at least
)

// Errors of Run that callers may want to tell apart.
var (
	ErrTaken   = errors.New("node: another daemon has this name")
	ErrRefused = errors.New("node: refused by the control plane")
)

// Server is the daemon's side of the protocol. Its methods are safe for concurrent use.
type Server struct {
	cfg    ServerConfig
	socket *socket
	out    outbox

	changed chan struct{}
	failed  chan error

	ctx    context.Context // of orders
	cancel context.CancelCauseFunc
	work   sync.WaitGroup // orders and what follows from them

	mu       sync.Mutex
	closed   bool
	leaving  bool
	patient  bool
	follower net.Conn                       // that gets lines; nil: none
	running  map[string]*task               // by the order's id
	answers  *simplelru.LRU[string, Answer] // of orders that have ended, by id
	kept     map[string]*kept               // by replica: sockets that nobody has claimed yet
	events   []Event                        // the latest, in order
	number   uint64                         // of the latest
	fence    fence
	holds    *holds // has its own mutex
}

// task is an order under way.
type task struct {
	cancel  context.CancelCauseFunc
	epoch   uint64
	givenUp bool
	reply   string
}

// kept is a started replica's socket that waits for who ordered it.
type kept struct {
	order, replica, function string
	epoch                    uint64
	conn                     wire.Socket
	timer                    *time.Timer
}

// NewServer opens the unix socket. Run makes the node known.
func NewServer(cfg ServerConfig) (*Server, error) {
	if err := isName("node", cfg.Me.Name); err != nil {
		return nil, fmt.Errorf("node: %w", err)
	}
	if cfg.Announce == 0 {
		cfg.Announce = time.Second
	}
	if cfg.Unclaimed == 0 {
		cfg.Unclaimed = time.Minute
	}
	answers, err := simplelru.NewLRU[string, Answer](answersKept, nil)
	if err != nil {
		return nil, err
	}
	s := &Server{
		cfg: cfg, changed: make(chan struct{}, 1), failed: make(chan error, 1),
		running: map[string]*task{}, answers: answers, kept: map[string]*kept{}, out: newOutbox(),
	}
	if s.fence, err = openFence(cfg.Epoch); err != nil {
		return nil, err
	}
	s.holds = newHolds(cfg.Keep, cfg.Log, s.end, cfg.Claimed)
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	if s.socket, err = listen(cfg.Socket); err != nil {
		s.cancel(nil)
		return nil, err
	}
	s.socket.serve(s.serveConn) // which reads s.socket
	return s, nil
}

// Close cancels the running orders, closes the sockets that it has, and returns when nothing of the
// server runs any more. The Worker keeps what the orders have started.
func (s *Server) Close() {
	s.mu.Lock()
	s.closed = true
	waiting := s.kept
	s.kept = map[string]*kept{}
	s.mu.Unlock()
	s.cancel(errors.New("the daemon ends"))
	for _, k := range waiting {
		k.timer.Stop()
		_ = k.conn.Close()
	}
	s.holds.close()
	s.socket.close()
	s.work.Wait()
}

// Changed makes the next announcement come soon.
func (s *Server) Changed() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// Leave announces that the node takes no more replicas, and that its replicas must be drained. If
// patient is set, each one runs until its replacement is ready. Otherwise, it is drained at once.
func (s *Server) Leave(patient bool) {
	s.mu.Lock()
	s.leaving, s.patient = true, patient
	s.mu.Unlock()
	s.Changed()
}

// Line queues a line that a replica or zygote has printed. It does not block. Lines that nobody
// reads in time are dropped and counted.
func (s *Server) Line(l Line) { s.out.add(l) }

// Tell numbers an event and sends it to listeners. Others can ask for it later.
func (s *Server) Tell(e Event) {
	s.mu.Lock()
	s.number++
	e.V, e.ID, e.Number, e.Epoch, e.At = Version, s.cfg.Me.ID, s.number, s.fence.highest, time.Now().UTC()
	if len(s.events) == eventsKept {
		s.events = s.events[:copy(s.events, s.events[1:])]
	}
	s.events = append(s.events, e)
	_ = s.send(kindEvent, e) // in order; the next announcement says that there is one
	s.mu.Unlock()
	s.Changed()
}

// since returns the events after a number.
func (s *Server) since(number uint64) []Event {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, e := range s.events {
		if e.Number > number {
			return append([]Event{}, s.events[i:]...)
		}
	}
	return nil
}

// send encodes and sends a message. The caller may ignore the error, because every message that
// matters is sent again.
func (s *Server) send(kind string, message any) error {
	b, err := json.Marshal(message)
	if err != nil {
		s.cfg.Log.Error("failed to encode a message", "node", s.cfg.Me.Name, "kind", kind, "error", err)
		return err
	}
	return s.cfg.Bus.Send(s.cfg.Me.Name, kind, "", b)
}

// fail ends Run.
func (s *Server) fail(err error) {
	select {
	case s.failed <- err:
	default:
	}
}
