package tunnel

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity/identitytest"
)

// proxy passes connections on to a listener, and can cut them and mute them.
type proxy struct {
	net.Listener
	to string

	mu    sync.Mutex
	conns []net.Conn
	dials int
	mute  bool // pass on nothing
}

func newProxy(t *testing.T, to string) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{Listener: l, to: to}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", to)
			if err != nil {
				_ = near.Close()
				continue
			}
			p.mu.Lock()
			p.dials++
			p.conns = append(p.conns, near, far)
			p.mu.Unlock()
			all.Go(func() { p.pass(near, far) })
			all.Go(func() { p.pass(far, near) })
		}
	})
	t.Cleanup(func() { _ = l.Close(); p.cut(); all.Wait() })
	return p
}

func (p *proxy) pass(from, to net.Conn) {
	defer to.Close()
	b := make([]byte, 32<<10)
	for {
		n, err := from.Read(b)
		if err != nil {
			return
		}
		p.mu.Lock()
		mute := p.mute
		p.mu.Unlock()
		if mute {
			continue
		}
		if _, err := to.Write(b[:n]); err != nil {
			return
		}
	}
}

func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		_ = c.Close()
	}
	p.conns = nil
}

// ends waits until a stream ends, with an error or io.EOF.
func ends(t *testing.T, what string, c net.Conn) {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(limit))
	if _, err := io.Copy(io.Discard, c); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%s: the stream ends with %v, want a lost connection, not an end that the peer wanted", what, err)
	}
	if _, err := c.Write(make([]byte, 1)); err == nil {
		t.Errorf("%s: the stream takes more", what)
	}
	_ = c.Close()
}

// TestConnectionIsMadeAgain checks that streams end with their connection on both sides, and that
// the next Open makes another one.
func TestConnectionIsMadeAgain(t *testing.T) {
	t.Parallel()
	heard := make(chan struct{}, 1)
	up, n := pair(t, nil)
	n.Handle("ends", func(ctx context.Context, _ identity.Name, _ json.RawMessage, c net.Conn) {
		_ = Accept(c)
		_, _ = io.Copy(io.Discard, c)
		<-ctx.Done()
		heard <- struct{}{}
	})
	p := newProxy(t, n.addr)
	via := &end{Tunnel: n.Tunnel, me: n.me, addr: p.Addr().String()}
	for range 3 {
		c := open(t, up, via, "ends")
		other := open(t, up, via, "echo")
		p.cut()
		ends(t, "a cut connection", c)
		ends(t, "a cut connection", other)
		<-heard
		says(t, open(t, up, via, "echo"), "again")
	}
	if p.dials != 4 {
		t.Errorf("%d connections, want 4", p.dials)
	}
	up.Drop(n.me)
	eventually(t, "the node to see that it was dropped", func() bool { return len(n.Peers(identity.Control)) == 0 })
}

// TestSilentPeerIsGone checks that a connection without a word from the other side ends.
func TestSilentPeerIsGone(t *testing.T) {
	t.Parallel()
	up, n := pair(t, func(c *Config) { c.keepAlive, c.silence = 50*time.Millisecond, 3*time.Second })
	p := newProxy(t, n.addr)
	c := open(t, up, &end{Tunnel: n.Tunnel, me: n.me, addr: p.Addr().String()}, "echo")
	says(t, c, "hello")
	p.mu.Lock()
	p.mute = true
	p.mu.Unlock()
	ends(t, "a silent connection", c)
	eventually(t, "the other side to notice", func() bool { return len(n.Peers(identity.Control)) == 0 })
}

// TestOneConnectionPerPair checks that two processes that dial each other at the same moment end up
// with one connection, and that no stream is lost on the way.
func TestOneConnectionPerPair(t *testing.T) {
	t.Parallel()
	for range 10 {
		up, n := pair(t, nil)
		// Both dial before either is heard.
		up.addr, n.addr = far(t, up.addr, 5*time.Millisecond), far(t, n.addr, 5*time.Millisecond)
		var both sync.WaitGroup
		errs := make(chan error, 16)
		for i := range 16 {
			from, to := up, n
			if i%2 == 0 {
				from, to = n, up
			}
			both.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), limit)
				defer cancel()
				c, err := from.Open(ctx, to.me, to.addr, want("echo"))
				if err == nil {
					_, err = c.Write([]byte("x"))
				}
				if err == nil {
					_, err = io.ReadFull(c, make([]byte, 1))
				}
				if err == nil {
					err = c.Close()
				}
				errs <- err
			})
		}
		both.Wait()
		for range 16 {
			if err := <-errs; err != nil {
				t.Fatal(err)
			}
		}
		one := func(e *end, of identity.Name) *session {
			e.mu.Lock()
			defer e.mu.Unlock()
			return e.peers[of].session
		}
		a, b := one(up, n.me), one(n, up.me)
		if a == nil || b == nil || a.id != b.id || a.dialed == b.dialed {
			t.Fatalf("connections %+v and %+v, want the two ends of one", a, b)
		}
		up.Close()
		n.Close()
	}
}

// TestRestartedPeer checks that a process that was started again, under its name, replaces the
// connection of its earlier run, also if that has not ended.
func TestRestartedPeer(t *testing.T) {
	t.Parallel()
	ca := identitytest.New(t, "c1")
	n := newEnd(t, ca.Source(identity.Node, "n1"), nil)
	source := ca.Source(identity.Control, "up")
	first := newEnd(t, source, nil)
	old := open(t, first, n, "echo")
	second := newEnd(t, source, nil)
	c := open(t, second, n, "echo")
	ends(t, "the earlier run", old)
	says(t, c, "hello")
	says(t, open(t, n, &end{me: source.Me()}, "echo"), "to the new run")
}

// TestDialsBackOff checks that dials of a peer that is away are not made more often than the
// backoff allows, and that a peer that is back is found.
func TestDialsBackOff(t *testing.T) {
	t.Parallel()
	ca := identitytest.New(t, "c1")
	up := newEnd(t, ca.Source(identity.Control, "up"), func(c *Config) { c.backoff = 20 * time.Millisecond })
	n := newEnd(t, ca.Source(identity.Node, "n1"), nil)
	p := newProxy(t, "127.0.0.1:1") // where nobody listens
	begin, failed := time.Now(), 0
	for range 4 {
		if _, err := up.Open(t.Context(), n.me, p.Addr().String(), want("echo")); err == nil {
			t.Fatal("opened")
		}
		failed++
	}
	if took := time.Since(begin); took < (20+40+80)*time.Millisecond {
		t.Errorf("%d dials in %v, want pauses of 20, 40 and 80 ms", failed, took)
	}
	says(t, open(t, up, n, "echo"), "at another address")

	patient := newEnd(t, ca.Source(identity.Control, "patient"), func(c *Config) { c.backoff = mostBackoff })
	if _, err := patient.Open(t.Context(), n.me, p.Addr().String(), want("echo")); err == nil {
		t.Fatal("opened")
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if _, err := patient.Open(ctx, n.me, p.Addr().String(), want("echo")); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("during the pause: %v", err)
	}
}

// TestCloseWaits checks that Close ends what handlers and callers wait for, and waits for handlers.
func TestCloseWaits(t *testing.T) {
	t.Parallel()
	up, n := pair(t, nil)
	ended := false
	n.Handle("slow", func(ctx context.Context, _ identity.Name, _ json.RawMessage, c net.Conn) {
		_ = Accept(c)
		<-ctx.Done()
		time.Sleep(20 * time.Millisecond)
		ended = true
	})
	c := open(t, up, n, "slow")
	n.Close()
	if !ended {
		t.Error("Close has not waited for a handler")
	}
	ends(t, "a closed peer", c)
	if _, err := n.Open(t.Context(), up.me, up.addr, want("echo")); !errors.Is(err, ErrClosed) {
		t.Errorf("Open of a closed tunnel: %v", err)
	}
}

// TestRefusedCertificatesAreCut checks that connections end whose certificates are refused later,
// as revoked ones are, and that others stay.
func TestRefusedCertificatesAreCut(t *testing.T) {
	t.Parallel()
	ca := identitytest.New(t, "c1")
	n := newEnd(t, ca.Source(identity.Node, "n1"), nil)
	up, other := newEnd(t, ca.Source(identity.Control, "up"), nil), newEnd(t, ca.Source(identity.Control, "other"), nil)
	cut, stays := open(t, up, n, "echo"), open(t, other, n, "echo")
	n.Check(func(c *x509.Certificate) error {
		if name, err := identity.NameOf(c); err != nil || name == up.me {
			return errors.Join(errors.New("revoked"), err)
		}
		return nil
	})
	ends(t, "a connection of a revoked process", cut)
	says(t, stays, "hello")
	if s := n.Stats(); s.Connections != 1 || s.Streams != 1 || s.Sent == 0 || s.Received == 0 {
		t.Errorf("counts %+v, want one connection with one stream", s)
	}
}

// TestExpiredPeersAreCut checks that a connection ends with the certificate of its peer, and that a
// peer stays that has renewed it.
func TestExpiredPeersAreCut(t *testing.T) {
	ca := identitytest.New(t, "c1")
	soon := func(c *x509.Certificate) { c.NotAfter = time.Now().Add(3 * time.Second) }
	lapsed, renewed := identity.Name{Cluster: "c1", Role: identity.Node, Name: "lapsed"}, identity.Name{Cluster: "c1", Role: identity.Node, Name: "renewed"}
	asked := make(chan struct{}, 1)
	up := newEnd(t, ca.Source(identity.Control, "up"), func(c *Config) {
		c.expiry = 10 * time.Millisecond
		c.Until = func(peer identity.Name) time.Time {
			if peer != renewed {
				return time.Time{}
			}
			select {
			case asked <- struct{}{}:
			default:
			}
			return time.Now().Add(time.Hour)
		}
	})
	var streams []net.Conn
	for _, name := range []identity.Name{lapsed, renewed} {
		n := newEnd(t, ca.Source(identity.Node, name.Name, soon), nil)
		c, err := n.Open(t.Context(), up.me, up.addr, Request{V: Version, Want: "echo"})
		if err != nil {
			t.Fatal(err)
		}
		streams = append(streams, c)
	}
	ends(t, "the connection of a process whose certificate has expired", streams[0])
	select {
	case <-asked: // its certificate has expired, too
	case <-time.After(limit):
		t.Fatal("nobody has asked for the peer that has renewed its certificate")
	}
	if _, err := streams[1].Write([]byte("x")); err != nil {
		t.Error(err)
	}
	if _, err := io.ReadFull(streams[1], make([]byte, 1)); err != nil {
		t.Errorf("the connection of a process that has renewed its certificate: %v", err)
	}
	if !up.Connected(renewed) || up.Connected(lapsed) {
		t.Error("want a connection with the process that has renewed its certificate, and none with the other")
	}
}
