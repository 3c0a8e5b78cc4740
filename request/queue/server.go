package queue

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
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
// listens, other processes with its token can connect too; see [Connect].
type Server struct {
	ns       *server.Server
	password string // password of in-process connections; empty if there are no others
	dir      string // folder of the streams
	log      *slog.Logger
	disk     *Disk
	unwatch  func() // stops the goroutine that watches the disk, and waits for it
}

// ServerConfig configures a Server.
type ServerConfig struct {
	Dir string // folder of the streams
	// How often written data is synced to disk; 0: every two minutes; negative: with each write.
	Sync time.Duration
	Log  *slog.Logger

	// Listen is the host:port for nodes that have the Token. Port 0 means any port; empty means not
	// to listen. Nodes may use the subjects of nodes, and nothing else.
	Listen, Token string
}

// listen sets up the server to listen for nodes only. It returns the password of the user that may
// do everything.
func (c ServerConfig) listen(o *server.Options) (password string, err error) {
	host, port, err := net.SplitHostPort(c.Listen)
	if err != nil {
		return "", err
	}
	if c.Token == "" {
		return "", errors.New("no token, want one: without it, any client could join")
	}
	if o.Port, err = strconv.Atoi(port); err != nil {
		return "", fmt.Errorf("port %q, want a number", port)
	}
	if o.Port == 0 {
		o.Port = server.RANDOM_PORT
	}
	// tried first, because the server does not report the cause.
	l, err := net.Listen("tcp", c.Listen)
	if err != nil {
		return "", err
	}
	_ = l.Close()
	o.Host, o.DontListen = host, false
	password = rand.Text()
	nodes := &server.SubjectPermission{Allow: []string{NodeSubjects + ".>"}}
	o.Users = []*server.User{
		{Username: insideUser, Password: password},
		{Username: nodeUser, Password: c.Token, Permissions: &server.Permissions{Publish: nodes, Subscribe: nodes}},
	}
	return password, nil
}

// insideUser is the user of in-process connections if the server listens.
const insideUser = "up"

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
	password := ""
	var err error
	if c.Listen != "" {
		if password, err = c.listen(options); err != nil {
			return nil, fmt.Errorf("nats server on %q: %w", c.Listen, err)
		}
	}
	ns, err := server.NewServer(options)
	if err != nil {
		return nil, fmt.Errorf("nats server with store %s: %w", c.Dir, err)
	}
	ns.Start()
	const limit = 30 * time.Second // a large journal takes time to read
	if !ns.ReadyForConnections(limit) {
		ns.Shutdown()
		return nil, fmt.Errorf("nats server with store %s: not ready after %v; is another process using the folder?", c.Dir, limit)
	}
	s := &Server{ns: ns, password: password, dir: c.Dir, log: c.Log}
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
	nc, err := nats.Connect("", nats.InProcessServer(s.ns), nats.UserInfo(insideUser, s.password), nats.Name(name), nats.MaxReconnects(-1),
		nats.ErrorHandler(func(_ *nats.Conn, sub *nats.Subscription, err error) {
			subject := ""
			if sub != nil {
				subject = sub.Subject
			}
			s.log.Error("nats", "connection", name, "subject", subject, "error", err)
		}))
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
