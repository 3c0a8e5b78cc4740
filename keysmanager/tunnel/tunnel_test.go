package tunnel

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity/identitytest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// limit bounds waits. Tests normally need a fraction of it.
const limit = time.Minute

// end is a process of a test.
type end struct {
	*Tunnel
	me   identity.Name
	addr string
}

func newEnd(t testing.TB, source identity.Source, change func(*Config)) *end {
	t.Helper()
	cfg := Config{Source: source, Log: slog.New(slog.DiscardHandler), Handlers: map[string]Handler{"echo": echo, "sink": sink, "deaf": deaf, "no": no}}
	if change != nil {
		change(&cfg)
	}
	e := &end{Tunnel: New(cfg), me: source.Me()}
	t.Cleanup(e.Close)
	addr, err := e.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	e.addr = addr.String()
	return e
}

func echo(_ context.Context, _ identity.Name, _ json.RawMessage, c net.Conn) {
	if Accept(c) == nil {
		_, _ = io.Copy(c, c)
	}
}

// sink answers with the number of bytes that came.
func sink(_ context.Context, _ identity.Name, _ json.RawMessage, c net.Conn) {
	if Accept(c) == nil {
		n, _ := io.Copy(io.Discard, c)
		fmt.Fprint(c, n)
	}
}

// deaf reads nothing until its connection ends.
func deaf(ctx context.Context, _ identity.Name, _ json.RawMessage, c net.Conn) {
	if Accept(c) == nil {
		<-ctx.Done()
	}
}

func no(_ context.Context, peer identity.Name, first json.RawMessage, c net.Conn) {
	var r struct{ Why string }
	_ = json.Unmarshal(first, &r)
	_ = Refuse(c, fmt.Errorf("not for %v: %s", peer, r.Why))
}

func want(kind string) Request { return Request{Version, kind} }

// pair returns a control plane and a node of one cluster.
func pair(t testing.TB, change func(*Config)) (control, node *end) {
	t.Helper()
	ca := identitytest.New(t, "c1")
	return newEnd(t, ca.Source(identity.Control, "up"), change), newEnd(t, ca.Source(identity.Node, "n1"), change)
}

func open(t testing.TB, from, to *end, kind string) net.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	c, err := from.Open(ctx, to.me, to.addr, want(kind))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// says sends a text to an echo and reads it again.
func says(t testing.TB, c net.Conn, text string) {
	t.Helper()
	_ = c.SetDeadline(time.Now().Add(limit))
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, len(text))
	if _, err := io.ReadFull(c, b); err != nil || string(b) != text {
		t.Fatalf("%q, %v, want %q", b, err, text)
	}
	_ = c.SetDeadline(time.Time{})
}

func eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	for until := time.Now().Add(limit); !done(); time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatalf("waited %v for %s", limit, what)
		}
	}
}

// TestBothSidesOpenStreams checks that both processes open streams over the connection that one of
// them has dialed, and what they are told about each other.
func TestBothSidesOpenStreams(t *testing.T) {
	t.Parallel()
	up, n := pair(t, nil)
	if _, err := n.Open(t.Context(), up.me, "", want("echo")); !errors.Is(err, ErrNotConnected) {
		t.Errorf("without an address: %v, want ErrNotConnected", err)
	}
	says(t, open(t, up, n, "echo"), "hello")
	up.addr = ""
	says(t, open(t, n, up, "echo"), "back")
	var refused *RefusedError
	if _, err := n.Open(t.Context(), up.me, "", struct {
		Request
		Why string
	}{want("no"), "it rains"}); !errors.As(err, &refused) || refused.Text != "not for node n1: it rains" {
		t.Errorf("refused with %v", err)
	}
	if _, err := n.Open(t.Context(), up.me, "", want("tea")); !errors.As(err, &refused) || !strings.Contains(refused.Text, `want: "tea", want one of deaf, echo, no, sink`) {
		t.Errorf("unknown: %v", err)
	}
	if _, err := n.Open(t.Context(), up.me, "", Request{2, "echo"}); !errors.As(err, &refused) || !strings.Contains(refused.Text, "version 2, want 1") {
		t.Errorf("another version: %v", err)
	}
	if got := up.Peers(identity.Node); len(got) != 1 || got[0] != n.me {
		t.Errorf("peers of the control plane: %v", got)
	}
	if got := n.Peers(identity.Node); len(got) != 0 {
		t.Errorf("nodes that the node knows: %v", got)
	}
}

// TestLargeTransfer checks that bytes arrive whole and in order, that CloseWrite is the end of one
// direction only, and that Close ends a Read that waits.
func TestLargeTransfer(t *testing.T) {
	t.Parallel()
	up, n := pair(t, nil)
	c := open(t, up, n, "echo")
	sent := make([]byte, 20<<20)
	_, _ = rand.Read(sent)
	go func() {
		_, _ = c.Write(sent)
		_ = c.(interface{ CloseWrite() error }).CloseWrite()
	}()
	if got, err := io.ReadAll(c); err != nil || !bytes.Equal(got, sent) {
		t.Errorf("%d bytes, %v, want the %d sent ones", len(got), err, len(sent))
	}
	waits := open(t, up, n, "deaf")
	ended := make(chan error)
	go func() {
		_, err := waits.Read(make([]byte, 1))
		ended <- err
	}()
	time.Sleep(20 * time.Millisecond) // most likely it waits now; otherwise this proves less
	_ = waits.Close()
	if err := <-ended; !errors.Is(err, net.ErrClosed) {
		t.Errorf("Read after Close: %v, want net.ErrClosed", err)
	}
	if _, err := waits.Write([]byte{1}); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Write after Close: %v, want net.ErrClosed", err)
	}
	_ = open(t, up, n, "echo").SetReadDeadline(time.Now())
	late := open(t, up, n, "echo")
	_ = late.SetReadDeadline(time.Now().Add(time.Millisecond))
	if _, err := late.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Read behind its deadline: %v", err)
	}
}

// TestUnreadStreamStopsNoOther checks that streams that nobody reads block their writers, and no
// other stream.
func TestUnreadStreamStopsNoOther(t *testing.T) {
	t.Parallel()
	up, n := pair(t, func(c *Config) { c.window = 256 << 10 })
	var full sync.WaitGroup
	for range 8 {
		c := open(t, up, n, "deaf")
		var sent int
		_ = c.SetWriteDeadline(time.Now().Add(200 * time.Millisecond))
		full.Go(func() {
			var err error
			for b := make([]byte, 100<<10); err == nil; {
				var n int
				n, err = c.Write(b)
				sent += n
			}
			if !errors.Is(err, os.ErrDeadlineExceeded) || sent > 256<<10 {
				t.Errorf("%d bytes until %v, want the window of 256 KiB and a deadline", sent, err)
			}
		})
	}
	c := open(t, up, n, "sink")
	const size = 8 << 20
	if _, err := c.Write(make([]byte, size)); err != nil {
		t.Fatal(err)
	}
	full.Wait()
	if _, err := c.Write(make([]byte, size)); err != nil {
		t.Fatal(err)
	}
	_ = c.(interface{ CloseWrite() error }).CloseWrite()
	if b, err := io.ReadAll(c); err != nil || string(b) != fmt.Sprint(2*size) {
		t.Errorf("%s bytes arrived, %v, want %d", b, err, 2*size)
	}
	says(t, open(t, n, up, "echo"), "the other way")
}

// TestClosedStreamEndsItsWriter checks that a peer that goes on to write to a closed stream gets an
// error, and that a stream whose other direction goes on is left alone.
func TestClosedStreamEndsItsWriter(t *testing.T) {
	t.Parallel()
	wrote, goOn := make(chan error, 1), make(chan struct{})
	up, n := pair(t, func(c *Config) {
		c.window, c.linger = 256<<10, 10*time.Millisecond
		c.Handlers["pour"] = func(_ context.Context, _ identity.Name, _ json.RawMessage, c net.Conn) {
			err := Accept(c)
			for b := make([]byte, 100<<10); err == nil; {
				_, err = c.Write(b)
			}
			wrote <- err
		}
		c.Handlers["late"] = func(_ context.Context, _ identity.Name, _ json.RawMessage, c net.Conn) {
			if Accept(c) == nil {
				<-goOn
				fmt.Fprint(c, "late")
			}
		}
	})
	half, other := open(t, up, n, "late"), open(t, up, n, "echo")
	if err := half.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	c := open(t, up, n, "pour")
	if _, err := io.ReadFull(c, make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	if err := <-wrote; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the peer's write ends with %v, want a reset", err)
	}
	close(goOn)
	if b, err := io.ReadAll(half); err != nil || string(b) != "late" {
		t.Errorf("the stream that is closed for writing has %q, %v", b, err)
	}
	says(t, other, "the same connection")
}

// TestClosedStreamCanBeRead checks that a slow peer gets all that was sent before the close.
func TestClosedStreamCanBeRead(t *testing.T) {
	t.Parallel()
	const linger, size = 200 * time.Millisecond, 200 << 10
	closed := make(chan struct{})
	up, n := pair(t, func(c *Config) {
		c.window, c.linger = 256<<10, linger
		c.Handlers["burst"] = func(_ context.Context, _ identity.Name, _ json.RawMessage, c net.Conn) {
			if Accept(c) == nil {
				_, _ = c.Write(make([]byte, size))
			}
			_ = c.Close()
			close(closed)
		}
	})
	c := open(t, up, n, "burst")
	<-closed
	time.Sleep(3 * linger) // it is not reset meanwhile
	if b, err := io.ReadAll(c); err != nil || len(b) != size {
		t.Errorf("got %d bytes, %v, want %d", len(b), err, size)
	}
}

// TestStrangersAreRefused checks that processes without a certificate of the cluster, and those
// with another name than the one that was asked for, get no stream.
func TestStrangersAreRefused(t *testing.T) {
	t.Parallel()
	ca, other := identitytest.New(t, "c1"), identitytest.New(t, "c1")
	up := newEnd(t, ca.Source(identity.Control, "up"), nil)
	n := newEnd(t, ca.Source(identity.Node, "n1"), nil)
	stranger := newEnd(t, other.Source(identity.Control, "up"), nil)
	expired := newEnd(t, ca.Source(identity.Control, "old", func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) }), nil)
	nameless := newEnd(t, ca.Source(identity.Control, "x", func(c *x509.Certificate) { c.URIs = nil }), nil)
	foreign := newEnd(t, ca.Source(identity.Control, "x", func(c *x509.Certificate) {
		c.URIs[0] = identity.Name{Cluster: "c2", Role: identity.Control, Name: "x"}.URI()
	}), nil)
	for what, from := range map[string]*end{"another authority's": stranger, "an expired one": expired, "a nameless one": nameless, "another cluster's": foreign} {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		if _, err := from.Open(ctx, n.me, n.addr, want("echo")); err == nil || ctx.Err() != nil {
			t.Errorf("a process with %s certificate: %v, want a refusal", what, err)
		}
		cancel()
	}
	if _, err := up.Open(t.Context(), identity.Name{Cluster: "c1", Role: identity.Node, Name: "n2"}, n.addr, want("echo")); err == nil || !strings.Contains(err.Error(), "n2") {
		t.Errorf("asked for n2 at n1's address: %v", err)
	}
	says(t, open(t, up, n, "echo"), "and a good one")
}

// TestGreetingHasDeadline checks that a connection that says nothing ends, before TLS and after.
func TestGreetingHasDeadline(t *testing.T) {
	t.Parallel()
	ca := identitytest.New(t, "c1")
	source := ca.Source(identity.Control, "up")
	n := newEnd(t, ca.Source(identity.Node, "n1"), func(c *Config) { c.greeting, c.firstLine = 3*time.Second, 3*time.Second })
	gone := func(what string, c net.Conn) {
		t.Helper()
		defer c.Close()
		_ = c.SetReadDeadline(time.Now().Add(limit))
		if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s stays", what)
		}
	}
	silent, err := net.Dial("tcp", n.addr)
	if err != nil {
		t.Fatal(err)
	}
	gone("a silent connection", silent)
	polite, err := tls.Dial("tcp", n.addr, source.Client(n.me))
	if err != nil {
		t.Fatal(err)
	}
	gone("one without a hello", polite)
	up := newEnd(t, source, nil)
	s, err := up.connected(t.Context(), n.me, n.addr)
	if err != nil {
		t.Fatal(err)
	}
	y, err := s.mux.OpenStream()
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(newStream(s, y))
	if err != nil || !strings.Contains(string(b), "first line") {
		t.Errorf("a stream without a first line gets %q, %v", b, err)
	}
	says(t, open(t, up, n, "echo"), "the connection goes on")
}

// TestStreamsAreBounded checks that a stream above the bound is refused and others go on.
func TestStreamsAreBounded(t *testing.T) {
	t.Parallel()
	up, n := pair(t, nil)
	n.cfg.streams = 3
	var all []net.Conn
	for range 3 {
		all = append(all, open(t, up, n, "echo"))
	}
	var refused *RefusedError
	if _, err := up.Open(t.Context(), n.me, n.addr, want("echo")); !errors.As(err, &refused) || !strings.Contains(refused.Text, "want at most 3") {
		t.Errorf("a fourth stream: %v", err)
	}
	says(t, all[2], "still open")
	_ = all[0].Close()
	eventually(t, "room for one more", func() bool {
		c, err := up.Open(t.Context(), n.me, n.addr, want("echo"))
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	})
}

// TestStrangersAreBounded checks that many faults of strangers take bounded memory, and that later
// ones are logged, too.
func TestStrangersAreBounded(t *testing.T) {
	var log bytes.Buffer
	up := New(Config{Log: slog.New(slog.NewTextHandler(&log, nil))})
	defer up.Close()
	for i := range 1000 {
		up.stranger(&net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: i}, fmt.Errorf("fault %d", i))
	}
	if len(up.said) > 256 || !strings.Contains(log.String(), "fault 999") {
		t.Errorf("%d faults are kept, want at most 256; the last one was logged: %v", len(up.said), strings.Contains(log.String(), "fault 999"))
	}
}
