package tunnel

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
)

// session is an open connection with a peer.
type session struct {
	t      *Tunnel
	peer   identity.Name
	run    string // of the peer's process
	id     string
	dialed bool // by this process
	// of the peer, as it was verified
	certificate *x509.Certificate
	since       time.Time
	conn        *joined
	mux         *yamux.Session
	ctx         context.Context // ends with the session
	cancel      context.CancelFunc
	open        atomic.Int64 // streams

	mu   sync.Mutex
	over bool
	work sync.WaitGroup // handlers, and streams that close
}

// muxLog passes on the log of the multiplexer. It has lines for streams that end in unusual ways,
// so they are for debugging only.
type muxLog struct{ log *slog.Logger }

func (l muxLog) Print(v ...any) { l.log.Debug("tunnel", "text", fmt.Sprint(v...)) }
func (l muxLog) Printf(format string, v ...any) {
	l.log.Debug("tunnel", "text", fmt.Sprintf(format, v...))
}
func (l muxLog) Println(v ...any) { l.log.Debug("tunnel", "text", fmt.Sprint(v...)) }

// begin makes a session of a connection whose sides have said hello, and serves the peer's streams
// until it ends.
func (t *Tunnel) begin(c *secured, name identity.Name, h hello, dialed bool) {
	s := &session{t: t, peer: name, run: h.Run, id: h.ID, dialed: dialed, since: time.Now(), certificate: c.ConnectionState().PeerCertificates[0], conn: &joined{secured: c}}
	cfg := &yamux.Config{
		AcceptBacklog: 256, EnableKeepAlive: true, KeepAliveInterval: t.cfg.keepAlive, ConnectionWriteTimeout: t.cfg.silence,
		MaxStreamWindowSize: t.cfg.window, StreamOpenTimeout: time.Minute, StreamCloseTimeout: time.Hour, Logger: muxLog{t.cfg.Log},
	}
	mux := yamux.Server
	if dialed {
		mux = yamux.Client
	}
	var err error
	s.mux, err = mux(s.conn, cfg)
	if err != nil {
		panic(err) // the configuration is wrong
	}
	s.ctx, s.cancel = context.WithCancel(t.ctx)
	started := t.background(s.serve)
	if !started {
		s.close()
		s.cancel()
	}
	if !dialed {
		t.settle(name, orNil(s, started))
		return
	}
	t.mu.Lock()
	p := t.peers.of(name)
	p.dialing, p.backoff, p.again = false, 0, time.Time{}
	old := p.session
	if started && !s.ended() {
		p.session = s
	}
	p.change()
	t.mu.Unlock()
	if old != nil {
		old.close()
	}
}

func orNil(s *session, ok bool) *session {
	if !ok {
		return nil
	}
	return s
}

func (s *session) ended() bool { return s.mux.IsClosed() }

func (s *session) close() { _ = s.mux.Close() }

// serve accepts the peer's streams until the connection ends.
func (s *session) serve() {
	log := s.t.cfg.Log.With("peer", s.peer.String(), "address", s.mux.RemoteAddr().String())
	log.Info("tunnel is open")
	for {
		y, err := s.mux.AcceptStream()
		if err != nil {
			break
		}
		if !s.spawn(func() { s.serveStream(newStream(s, y)) }) {
			_ = y.Close()
		}
	}
	s.close()
	s.cancel()
	s.mu.Lock()
	s.over = true
	s.mu.Unlock()
	s.t.mu.Lock()
	p := s.t.peers.of(s.peer)
	if p.session == s {
		p.session, p.lost = nil, s.id
		p.change()
	}
	s.t.mu.Unlock()
	s.work.Wait()
	log.Info("tunnel is closed")
}

// spawn runs f in a goroutine that the session waits for. It reports whether the session is open.
func (s *session) spawn(f func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over {
		return false
	}
	s.work.Go(f)
	return true
}

// serveStream reads a stream's first line and has its handler serve it.
func (s *session) serveStream(c *stream) {
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(s.t.cfg.firstLine))
	if n := s.open.Load(); n > int64(s.t.cfg.streams) {
		_ = Refuse(c, fmt.Errorf("%d streams are open, want at most %d", n, s.t.cfg.streams))
		return
	}
	line, err := c.line()
	var r Request
	if err == nil {
		err = decode(line, &r)
	}
	var h Handler
	if err == nil {
		h, err = s.t.handler(r.Want)
	}
	if err == nil {
		err = c.SetDeadline(time.Time{})
	}
	if err != nil {
		_ = Refuse(c, err)
		s.t.cfg.Log.Debug("stream of the tunnel refused", "peer", s.peer.String(), "error", err)
		return
	}
	h(s.ctx, s.peer, json.RawMessage(line), c)
}

// answer is the line with which a handler answers a first line.
type answer struct {
	V     int    `json:"v"`
	Error string `json:"error,omitempty"`
}

// Accept answers the first line of a stream.
func Accept(c net.Conn) error { return writeLine(c, answer{V: Version}) }

// Refuse answers the first line of a stream with an error. The caller returns from its handler.
func Refuse(c net.Conn, err error) error {
	return writeLine(c, answer{V: Version, Error: err.Error()})
}

// Open opens a stream to a process with a first line, which has the fields of a [Request]. It
// returns the stream when the peer has accepted it, or a [RefusedError]. If there is no connection
// with the process, Open dials addr, unless that is empty.
func (t *Tunnel) Open(ctx context.Context, to identity.Name, addr string, first any) (net.Conn, error) {
	line, err := json.Marshal(first)
	if err != nil {
		return nil, err
	}
	for again := true; ; again = false {
		s, err := t.connected(ctx, to, addr)
		if err != nil {
			return nil, err
		}
		c, err := s.openStream(ctx, append(line, '\n'))
		var refused *RefusedError
		switch {
		case err == nil:
			return c, nil
		case again && ctx.Err() == nil && s.ended() && !errors.As(err, &refused):
			continue // the connection had ended already
		}
		return nil, err
	}
}

// openStream opens a stream and waits for the answer.
func (s *session) openStream(ctx context.Context, first []byte) (net.Conn, error) {
	if n := s.open.Load(); n >= int64(s.t.cfg.streams) {
		return nil, fmt.Errorf("tunnel to %v: %d streams are open, want at most %d", s.peer, n, s.t.cfg.streams)
	}
	y, err := s.mux.OpenStream()
	if err != nil {
		return nil, fmt.Errorf("tunnel to %v: %w", s.peer, err)
	}
	c := newStream(s, y)
	_ = c.SetDeadline(time.Now().Add(s.t.cfg.firstLine))
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	_, err = c.Write(first)
	var a answer
	if err == nil {
		var line []byte
		if line, err = c.line(); err == nil {
			err = decode(line, &a)
		}
	}
	if !stop() {
		err = errors.Join(context.Cause(ctx), err)
	}
	switch {
	case err == nil && a.Error != "":
		err = &RefusedError{s.peer, a.Error}
	case err == nil:
		if err = c.SetDeadline(time.Time{}); err == nil {
			return c, nil
		}
		fallthrough
	default:
		err = fmt.Errorf("tunnel to %v: %w", s.peer, err)
	}
	_ = c.Close()
	return nil, err
}
