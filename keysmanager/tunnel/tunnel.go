package tunnel

import (
	"context"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
)

// Version is the version of the first lines of connections and streams.
const Version = 1

// Request is the first line of a stream. Callers of [Tunnel.Open] embed it and add fields.
type Request struct {
	V    int    `json:"v"`
	Want string `json:"want"`
}

// Handler serves a stream that a peer has opened. It answers the first line with [Accept] or
// [Refuse]. When it returns, c is closed. ctx ends with the connection to the peer.
type Handler func(ctx context.Context, peer identity.Name, first json.RawMessage, c net.Conn)

// Config configures a Tunnel.
type Config struct {
	Source   identity.Source
	Log      *slog.Logger
	Handlers map[string]Handler // by Request.Want
	Until    Until              // nil: connections outlive certificates
	tuning
}

// tuning has settings that only tests change.
type tuning struct {
	window    uint32        // 0: streamWindow
	keepAlive time.Duration // 0: keepAliveEvery
	silence   time.Duration // 0: mostSilence
	greeting  time.Duration // 0: greetingTime
	firstLine time.Duration // 0: firstLineTime
	linger    time.Duration // 0: lingerTime
	streams   int           // 0: maxStreams
	backoff   time.Duration // 0: firstBackoff
	expiry    time.Duration // 0: expiryEvery
}

// Bounds of a Tunnel.
const (
	maxConns      = 4096             // connections with peers
	maxGreetings  = 64               // connections whose peer is not known yet
	maxStreams    = 8192             // of a connection
	maxFirst      = 64 << 10         // bytes of a first line
	greetingTime  = 10 * time.Second // for a dial, and for a handshake
	firstLineTime = 30 * time.Second // for a first line and its answer; a busy machine takes seconds
	lingerTime    = 10 * time.Second // for what a peer has written to a stream that is closed here
	lingers       = 30               // such times for the peer to read what was sent, and close it
	// A peer that reads or answers nothing for this long is gone.
	mostSilence    = 15 * time.Second
	keepAliveEvery = 5 * time.Second // between two checks that the peer answers
	// Bytes that a stream may carry before the receiver reads them.
	streamWindow = 4 << 20
	firstBackoff = 100 * time.Millisecond // after a failed dial
	mostBackoff  = 5 * time.Second
	acceptPause  = 50 * time.Millisecond // after a failed accept
	expiryEvery  = 10 * time.Second      // between two checks of certificates' ends
)

// Errors that callers may want to tell apart.
var (
	ErrNotConnected = errors.New("tunnel: no connection")
	ErrClosed       = errors.New("tunnel: closed")
)

// RefusedError is the answer of a peer that refuses a stream.
type RefusedError struct {
	Peer identity.Name
	Text string
}

// Error returns the peer's text after its name.
func (e *RefusedError) Error() string { return fmt.Sprintf("%v: %s", e.Peer, e.Text) }

// Refused tells packages that do not import this one that the peer was reached.
func (e *RefusedError) Refused() bool { return true }

// Tunnel has a process's connections with others of its cluster. Its methods are safe for
// concurrent use.
type Tunnel struct {
	cfg   Config
	run   string // of this process, so that a peer knows it from its predecessor
	ctx   context.Context
	end   context.CancelFunc
	group sync.WaitGroup
	hands chan struct{} // bounds connections whose peer is not known yet

	sent, received atomic.Uint64 // bytes

	mu        sync.Mutex
	closed    bool
	handlers  map[string]Handler
	listeners []net.Listener
	greeting  map[net.Conn]struct{}
	peers     peers
	said      map[string]bool // faults of strangers that were logged
}

// New returns a Tunnel without connections. The caller closes it.
func New(cfg Config) *Tunnel {
	cfg.tuning = cfg.withDefaults()
	t := &Tunnel{
		cfg: cfg, run: rand.Text(), hands: make(chan struct{}, maxGreetings), handlers: map[string]Handler{},
		greeting: map[net.Conn]struct{}{}, peers: peers{}, said: map[string]bool{},
	}
	maps.Copy(t.handlers, cfg.Handlers)
	t.ctx, t.end = context.WithCancel(context.Background())
	if cfg.Until != nil {
		t.group.Go(func() { cutExpired(t) })
	}
	return t
}

func (c tuning) withDefaults() tuning {
	orDuration := func(d *time.Duration, or time.Duration) {
		if *d == 0 {
			*d = or
		}
	}
	orDuration(&c.keepAlive, keepAliveEvery)
	orDuration(&c.silence, mostSilence)
	orDuration(&c.greeting, greetingTime)
	orDuration(&c.firstLine, firstLineTime)
	orDuration(&c.linger, lingerTime)
	orDuration(&c.backoff, firstBackoff)
	orDuration(&c.expiry, expiryEvery)
	if c.window == 0 {
		c.window = streamWindow
	}
	if c.streams == 0 {
		c.streams = maxStreams
	}
	return c
}

// Handle has h serve the streams of a kind from now on.
func (t *Tunnel) Handle(want string, h Handler) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.handlers[want] = h
}

func (t *Tunnel) handler(want string) (Handler, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := t.handlers[want]
	if h == nil {
		return nil, fmt.Errorf("want: %q, want one of %s", want, strings.Join(slices.Sorted(maps.Keys(t.handlers)), ", "))
	}
	return h, nil
}

// Listen accepts connections of peers on a host and port, until Close. It returns the address with
// the port that was chosen if the given one is 0.
func (t *Tunnel) Listen(addr string) (net.Addr, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("tunnel: %w", err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		_ = l.Close()
		return nil, ErrClosed
	}
	t.listeners = append(t.listeners, l)
	t.group.Go(func() { t.accept(l) })
	return l.Addr(), nil
}

// Close ends all connections. When it returns, no handler runs.
func (t *Tunnel) Close() {
	t.mu.Lock()
	t.closed = true
	for _, l := range t.listeners {
		_ = l.Close()
	}
	for c := range t.greeting {
		_ = c.Close()
	}
	open := t.peers.sessions()
	t.mu.Unlock()
	t.end()
	for _, s := range open {
		s.close()
	}
	t.group.Wait()
}

// Drop ends the connection with a peer, if there is one. Its streams break.
func (t *Tunnel) Drop(peer identity.Name) {
	t.mu.Lock()
	var s *session
	if p := t.peers[peer]; p != nil {
		s = p.session
	}
	t.mu.Unlock()
	if s != nil {
		s.close()
	}
}

// Check ends the connections with peers whose certificates are refused, such as revoked ones.
func (t *Tunnel) Check(certificate func(*x509.Certificate) error) {
	t.mu.Lock()
	open := t.peers.sessions()
	t.mu.Unlock()
	for _, s := range open {
		if err := certificate(s.certificate); err != nil {
			t.cfg.Log.Warn("connection of the tunnel is cut", "peer", s.peer.String(), "error", err)
			s.close()
		}
	}
}

// Connect connects to a process, unless there is a connection with it.
func (t *Tunnel) Connect(ctx context.Context, to identity.Name, addr string) error {
	_, err := t.connected(ctx, to, addr)
	return err
}

// Connected reports whether there is a connection with a process.
func (t *Tunnel) Connected(with identity.Name) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.peers[with]
	return p != nil && p.session != nil && !p.session.ended()
}

// Peers returns the processes of a role that are connected now, the latest first.
func (t *Tunnel) Peers(role identity.Role) []identity.Name {
	t.mu.Lock()
	defer t.mu.Unlock()
	open := slices.DeleteFunc(t.peers.sessions(), func(s *session) bool { return s.peer.Role != role })
	slices.SortFunc(open, func(a, b *session) int { return b.since.Compare(a.since) })
	out := make([]identity.Name, len(open))
	for i, s := range open {
		out[i] = s.peer
	}
	return out
}

// background runs f in a goroutine that Close waits for. It reports whether the Tunnel is open.
func (t *Tunnel) background(f func()) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return false
	}
	t.group.Go(f)
	return true
}
