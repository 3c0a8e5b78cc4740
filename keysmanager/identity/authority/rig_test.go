package authority_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity/authority"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// limit bounds waits. They normally need a fraction of it.
const limit = time.Minute

// clock is set by a test. Its zero value is the machine's time; add moves it away from that.
type clock struct {
	mu  sync.Mutex
	add time.Duration
}

func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Now().Add(c.add)
}

func (c *clock) forward(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.add += d
}

// buffer is a log that can be read while it is written.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// memory is a bus without NATS: Send calls the listeners.
type memory struct {
	mu        sync.Mutex
	listeners []*listener
	alter     func(data []byte) []byte // of answers; nil: they stay as they are
}

type listener struct {
	about, kind string
	f           func(about, reply string, data []byte)
}

func (m *memory) Listen(about, kind string, f func(about, reply string, data []byte)) (func(), error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	l := &listener{about, kind, f}
	m.listeners = append(m.listeners, l)
	return func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.listeners = slices.DeleteFunc(m.listeners, func(other *listener) bool { return other == l })
	}, nil
}

func (m *memory) Send(about, kind, reply string, data []byte) error {
	m.mu.Lock()
	if m.alter != nil && strings.HasPrefix(kind, identity.KindAnswer) {
		data = m.alter(data)
	}
	all := slices.Clone(m.listeners)
	m.mu.Unlock()
	for _, l := range all {
		if l.kind == kind && (l.about == "" || l.about == about) {
			l.f(about, reply, data)
		}
	}
	return nil
}

func (*memory) Flush() error { return nil }

// rig is an authority that serves on buses in memory.
type rig struct {
	t            *testing.T
	dir          string
	clock        *clock
	keys         *queue.Keys
	log          *buffer
	nodes, joins *memory
	*authority.Authority
}

// lifetime is the lifetime of certificates in tests.
const lifetime = 24 * time.Hour

func newRig(t *testing.T) *rig {
	t.Helper()
	keys, err := queue.NewKeys()
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, dir: t.TempDir(), clock: &clock{}, keys: keys, log: &buffer{}}
	r.open()
	return r
}

// open opens the authority, again, on its folder.
func (r *rig) open() {
	r.t.Helper()
	r.nodes, r.joins = &memory{}, &memory{}
	var err error
	r.Authority, err = authority.Open(authority.Config{
		Dir: r.dir, Name: "up", Lifetime: lifetime, Now: r.clock.now, Users: r.keys, Log: slog.New(slog.NewTextHandler(r.log, nil)),
	})
	if err != nil {
		r.t.Fatal(err)
	}
	if _, err := r.Serve(r.nodes, r.joins, nil); err != nil {
		r.t.Fatal(err)
	}
}

// token makes a join token.
func (r *rig) token(req authority.TokenRequest) identity.Token {
	r.t.Helper()
	t, _, err := r.NewToken(req)
	if err != nil {
		r.t.Fatal(err)
	}
	return t
}

// daemon is a node's side.
type daemon struct {
	*identity.Member
	dir   string
	clock *clock
	log   *buffer
}

func newDaemon(t *testing.T, name, dir string, c *clock) *daemon {
	t.Helper()
	d := &daemon{dir: dir, clock: c, log: &buffer{}}
	var err error
	d.Member, err = identity.OpenMember(identity.MemberConfig{Dir: dir, Name: name, Now: c.now, NewUser: queue.NewUser, Log: slog.New(slog.NewTextHandler(d.log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// joined returns a daemon that has joined.
func (r *rig) joined(name string) *daemon {
	r.t.Helper()
	d := newDaemon(r.t, name, r.t.TempDir(), r.clock)
	if err := d.Join(bounded(r.t), r.joins, r.token(authority.TokenRequest{})); err != nil {
		r.t.Fatal(err)
	}
	return d
}

func bounded(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	return ctx
}

// serial returns the serial number of a source's current certificate.
func serial(t *testing.T, s identity.Source) string {
	t.Helper()
	c, err := s.Client(s.Me()).GetClientCertificate(nil)
	if err != nil {
		t.Fatal(err)
	}
	return identity.SerialOf(c.Leaf)
}

// handshake connects a client with a server, and returns the error of each side.
func handshake(t *testing.T, client, server *tls.Config) (clientErr, serverErr error) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	done := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			defer c.Close()
			s := tls.Server(c, server)
			if err = s.Handshake(); err == nil {
				_, err = s.Write([]byte("."))
			}
		}
		done <- err
	}()
	c, err := tls.Dial("tcp", l.Addr().String(), client)
	if err == nil {
		// With TLS 1.3, a client learns of a refusal when it reads.
		_, err = io.ReadFull(c, make([]byte, 1))
		_ = c.Close()
	}
	return err, <-done
}
