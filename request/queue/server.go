package queue

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// MaxMessage is the largest message in bytes that the embedded server takes.
const MaxMessage = 8 << 20

// pendingBytes bounds the bytes that wait for one slow reader, in the server and in the client.
// Further messages are dropped, so the bound is far above what admission lets in.
const pendingBytes = 512 << 20

// Server is an embedded nats-server with JetStream. Connections are made in process. If the server
// listens, other processes whose users its keys have signed can connect too; see [Connect].
type Server struct {
	ns      *server.Server
	keys    *Keys  // nil: there are only in-process connections, which need no user
	dir     string // folder of the streams
	log     *slog.Logger
	disk    *Disk
	unwatch func() // stops the goroutine that watches the disk, and waits for it
}

// ServerConfig configures a Server.
type ServerConfig struct {
	Dir string // folder of the streams
	// How often written data is synced to disk; 0: every two minutes; negative: with each write.
	Sync time.Duration
	Log  *slog.Logger

	// Listen is the host:port for users that the Keys have signed. Port 0 means any port; empty means
	// not to listen. Keys and TLS are needed only to listen; without TLS, connections are not
	// encrypted. Revoked has users whose tokens are refused: see [Server.Revoke].
	Listen  string
	Keys    *Keys
	TLS     *tls.Config
	Revoked map[string]time.Time
}

// handshakeTimeout bounds the time that a connection has for TLS, and then to say who it is.
const handshakeTimeout = 10 * time.Second

// listen sets up the server to listen for users that the keys have signed.
func (c ServerConfig) listen(o *server.Options) error {
	host, port, err := net.SplitHostPort(c.Listen)
	if err != nil {
		return err
	}
	if c.Keys == nil {
		return errors.New("no keys, want them: without keys, any client could join")
	}
	if o.Port, err = strconv.Atoi(port); err != nil {
		return fmt.Errorf("port %q, want a number", port)
	}
	if o.Port == 0 {
		o.Port = server.RANDOM_PORT
	}
	// tried first, because the server does not report the cause.
	l, err := net.Listen("tcp", c.Listen)
	if err != nil {
		return err
	}
	_ = l.Close()
	o.Host, o.DontListen = host, false
	if c.TLS != nil {
		o.TLS, o.TLSConfig, o.TLSTimeout = true, c.TLS, handshakeTimeout.Seconds()
	}
	o.AuthTimeout = handshakeTimeout.Seconds()
	return c.Keys.trust(o, c.Revoked)
}

// StartServer starts a server.
func StartServer(c ServerConfig) (*Server, error) {
	options := &server.Options{
		ServerName: "stagecoach",
		DontListen: true,
		JetStream:  true,
		StoreDir:   c.Dir,
		// The default is a share of the free space, and the server does not start if its streams
		// may be larger in sum. Writers check the disk themselves.
		JetStreamMaxStore: math.MaxInt64,
		MaxPayload:        MaxMessage,
		MaxPending:        pendingBytes,
		SyncInterval:      max(c.Sync, 0),
		SyncAlways:        c.Sync < 0,
		NoSigs:            true,
		NoLog:             true,
	}
	account := globalAccount
	if c.Listen != "" {
		if err := c.listen(options); err != nil {
			return nil, fmt.Errorf("nats server on %q: %w", c.Listen, err)
		}
		account = c.Keys.streams
	}
	if err := moveStreams(filepath.Join(c.Dir, server.JetStreamStoreDir), account); err != nil {
		return nil, fmt.Errorf("nats server with store %s: %w", c.Dir, err)
	}
	ns, err := server.NewServer(options)
	if err != nil {
		return nil, fmt.Errorf("nats server with store %s: %w", c.Dir, err)
	}
	ns.SetLoggerV2(&clientLog{log: c.Log, said: map[string]time.Time{}}, false, false, false)
	ns.Start()
	const limit = 30 * time.Second // a large journal takes time to read
	if !ns.ReadyForConnections(limit) {
		ns.Shutdown()
		return nil, fmt.Errorf("nats server with store %s: not ready after %v; is another process using the folder?", c.Dir, limit)
	}
	s := &Server{ns: ns, dir: c.Dir, log: c.Log}
	if c.Listen != "" {
		s.keys = c.Keys
		if _, err := ns.LookupAccount(account); err != nil { // it opens the account's streams
			ns.Shutdown()
			return nil, fmt.Errorf("nats server with store %s: account %s: %w", c.Dir, account, err)
		}
	}
	s.disk = newDisk(s, c.Dir, c.Log)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { s.disk.watch(ctx) })
	s.unwatch = func() { cancel(); wg.Wait() }
	return s, nil
}

// Disk returns the disk of the server's streams.
func (s *Server) Disk() *Disk { return s.disk }

// writeError returns the write error that a stream keeps, or nil if all streams take writes.
func (s *Server) writeError() error {
	if !s.ns.JetStreamEnabled() {
		return errors.New("JetStream has stopped")
	}
	failed, _ := s.health()
	return failed
}

// health returns the write error that a stream keeps, and an error if a stream on the disk is not
// open.
func (s *Server) health() (failed, missing error) {
	for _, e := range s.ns.Healthz(&server.HealthzOptions{Details: true}).Errors {
		switch {
		case strings.Contains(e.Error, "write error"):
			failed = serverError{errors.New(e.Error)}
		case e.Type == server.HealthzErrorStream:
			missing = errors.New(e.Error)
		}
	}
	return failed, missing
}

// reopen closes the streams and opens them again from the disk. Connections stay open. If only
// missing is an error, the other streams take writes.
func (s *Server) reopen() (failed, missing error) {
	if err := s.ns.ShutdownJetStream(); err != nil {
		return fmt.Errorf("close the streams: %w", serverError{err}), nil
	}
	if err := s.ns.EnableJetStream(&server.JetStreamConfig{StoreDir: s.dir, MaxStore: math.MaxInt64}); err != nil {
		return fmt.Errorf("open the streams: %w", serverError{err}), nil
	}
	if failed, missing = s.health(); failed != nil {
		failed = fmt.Errorf("open the streams: %w", failed)
	}
	return failed, missing
}

// URL returns the address on which the server listens, or "" if it does not listen.
func (s *Server) URL() string {
	if a := s.ns.Addr(); a != nil {
		return "nats://" + a.String()
	}
	return ""
}

// Connect opens a new connection. Components with much traffic should have their own.
func (s *Server) Connect(name string) (*nats.Conn, error) {
	options := []nats.Option{
		nats.InProcessServer(s.ns), nats.Name(name), nats.MaxReconnects(-1),
		nats.ErrorHandler(func(_ *nats.Conn, sub *nats.Subscription, err error) {
			subject := ""
			if sub != nil {
				subject = sub.Subject
			}
			s.log.Error("nats", "connection", name, "subject", subject, "error", err)
		}),
	}
	if s.keys != nil {
		options = append(options, s.keys.Control().options()...)
	}
	nc, err := nats.Connect("", options...)
	if err != nil {
		return nil, fmt.Errorf("connect %s to the embedded nats server: %w", name, err)
	}
	return nc, nil
}

// Close stops the server. Close its connections first.
func (s *Server) Close() {
	s.unwatch()
	s.ns.Shutdown()
	s.ns.WaitForShutdown()
}

// ErrNotFound means that a key has no value.
var ErrNotFound = errors.New("queue: not found")

// Messages returns how many messages the server has received from all connections since it started.
func (s *Server) Messages() (uint64, error) {
	v, err := s.ns.Varz(nil)
	if err != nil {
		return 0, fmt.Errorf("nats server: %w", err)
	}
	return uint64(v.InMsgs), nil
}
