package items

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity/identitytest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/tunnel"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// limit bounds waits. Tests normally need a fraction of it.
const limit = time.Minute

// logText is a log that tests read.
type logText struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logText) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *logText) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// process has a tunnel that listens.
type process struct {
	*tunnel.Tunnel
	me   identity.Name
	addr string
	text *logText
	slog *slog.Logger
}

func newProcess(t testing.TB, source identity.Source) *process {
	t.Helper()
	p := &process{me: source.Me(), text: &logText{}}
	p.slog = slog.New(slog.NewTextHandler(p.text, nil))
	p.Tunnel = tunnel.New(tunnel.Config{Source: source, Log: p.slog})
	t.Cleanup(p.Close)
	addr, err := p.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p.addr = addr.String()
	return p
}

// bytes returns what the process has sent and received over TLS.
func (p *process) bytes() uint64 { s := p.Stats(); return s.Sent + s.Received }

// daemon is a node.
type daemon struct {
	*process
	*Carrier
}

// cluster is a control plane and its nodes.
type cluster struct {
	t     testing.TB
	ca    *identitytest.Authority
	up    *process
	plane *Plane
	blobs string   // the plane's folder
	ended sync.Map // nodes that are known to have ended
}

func newCluster(t testing.TB) *cluster {
	t.Helper()
	c := &cluster{t: t, ca: identitytest.New(t, "c1"), blobs: t.TempDir()}
	c.up = newProcess(t, c.ca.Source(identity.Control, "up"))
	dir, err := tensor.OpenDir(c.blobs, 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	c.plane = NewPlane(dir, 64<<20, c.up.slog)
	c.plane.pause = time.Millisecond
	t.Cleanup(c.plane.Close)
	c.plane.Reach("up", func(ctx context.Context, node, addr string, first any) (net.Conn, error) {
		return c.up.Open(ctx, identity.Name{Cluster: "c1", Role: identity.Node, Name: node}, addr, first)
	}, func(node string) bool {
		_, ended := c.ended.Load(node)
		return !ended
	})
	c.up.Handle(WantItem, c.plane.Relay)
	return c
}

// node joins a node, to which the control plane has a connection.
func (c *cluster) node(name string, room int64) *daemon {
	c.t.Helper()
	d := &daemon{process: newProcess(c.t, c.ca.Source(identity.Node, name))}
	store := NewStore(Config{Node: name, Limit: room, Log: d.slog})
	c.t.Cleanup(store.Close)
	d.Carrier = NewCarrier(CarrierConfig{
		Store: store, Log: d.slog, pause: time.Millisecond,
		dialTime: limit, // the usual time is short for a busy machine
		Direct: func(ctx context.Context, node, addr string, first any) (net.Conn, error) {
			return d.process.Open(ctx, identity.Name{Cluster: "c1", Role: identity.Node, Name: node}, addr, first)
		},
		Control: func(ctx context.Context, plane string, first any) (net.Conn, error) {
			to := c.up.me
			if plane != "" {
				to.Name = plane
			}
			return d.process.Open(ctx, to, "", first)
		},
	})
	d.Handle(WantItem, store.Serve)
	d.Handle(WantDrop, store.ServeDrop)
	d.Handle("hello", func(_ context.Context, _ identity.Name, _ json.RawMessage, s net.Conn) { _ = tunnel.Accept(s) })
	s, err := c.up.Open(c.t.Context(), d.me, d.addr, tunnel.Request{V: tunnel.Version, Want: "hello"})
	if err != nil {
		c.t.Fatal(err)
	}
	_ = s.Close()
	return d
}

// random returns bytes that do not compress.
func random(size int) []byte {
	b := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{byte(size)}).Read(b) // never fails
	return b
}

// file returns a file in memory with a content.
func file(t testing.TB, content []byte) *os.File {
	t.Helper()
	f, err := wire.NewMemory()
	if err == nil {
		_, err = f.Write(content)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// keep has a node keep an item, as the control plane gets its reference.
func (d *daemon) keep(t testing.TB, owner string, content []byte) tensor.Ref {
	t.Helper()
	ref, err := d.Keep(wire.Owner{Request: owner}, "f.ns", file(t, content), int64(len(content)))
	if err != nil {
		t.Fatal(err)
	}
	ref.Address = d.addr
	return ref
}

// holds checks the content of a file, and closes it.
func holds(t testing.TB, f *os.File, err error, want []byte) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	got, err := io.ReadAll(io.NewSectionReader(f, 0, 1<<40))
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes, %v, want the %d of the item", len(got), err, len(want))
	}
	if _, err := f.WriteAt([]byte{1}, 0); err == nil {
		t.Error("the file can be changed")
	}
}

// fails checks an error.
func fails(t testing.TB, what string, f *os.File, err error, want string) {
	t.Helper()
	if f != nil {
		_ = f.Close()
	}
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%s: %v, want an error with %q", what, err, want)
	}
}

// until waits for a condition.
func until(t testing.TB, what string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); !done(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited %v for %s", limit, what)
		}
	}
}
