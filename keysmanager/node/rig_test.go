package node_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/request/queue"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// limit bounds waits. Tests normally need a fraction of it.
const limit = time.Minute

// errFull is an error that both sides know.
var errFull = errors.New("full")

// fullError is an errFull that says how many bytes did not fit.
type fullError struct{}

func (fullError) Error() string      { return errFull.Error() }
func (fullError) Unwrap() error      { return errFull }
func (fullError) NeedsMemory() int64 { return 3 << 30 }

var codes = node.Codes{node.CodeUnsupported: errors.ErrUnsupported, node.CodeNoRoom: errFull}

// worker is a fake KeysManager whose replicas are pipes. It records what it was asked, and what
// runs.
type worker struct {
	mu      sync.Mutex
	orders  []node.Order
	running map[string]*os.File // the replica's end of its socket
	changed chan struct{}       // closed and replaced with each change

	hold chan struct{} // a start waits until it is closed; nil: it does not
}

func newWorker() *worker {
	return &worker{running: map[string]*os.File{}, changed: make(chan struct{})}
}

func (w *worker) change(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
	close(w.changed)
	w.changed = make(chan struct{})
}

// until waits for what is asked of w with its mutex held.
func (w *worker) until(t *testing.T, what string, done func() bool) {
	t.Helper()
	deadline := time.After(limit)
	for {
		w.mu.Lock()
		ok, changed := done(), w.changed
		w.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			t.Fatalf("waited %v for %s", limit, what)
		}
	}
}

func (w *worker) of(kind node.OrderKind) []node.Order {
	return slices.DeleteFunc(slices.Clone(w.orders), func(o node.Order) bool { return o.Kind != kind })
}

func (w *worker) Start(ctx context.Context, o node.Order, progress func(node.Phase)) (node.Started, error) {
	w.mu.Lock()
	hold := w.hold
	w.mu.Unlock()
	w.change(func() { w.orders = append(w.orders, o) })
	if o.Spec.Image == "broken" {
		return node.Started{}, errors.New("its image is broken")
	}
	if o.Spec.Image == "crowded" {
		return node.Started{}, fmt.Errorf("start: %w", &node.MemoryError{Devices: []string{"GPU-1"}, Text: "want 2 GiB"})
	}
	load := node.Phase{Name: "load", Took: time.Second}
	progress(load)
	if hold != nil {
		select {
		case <-hold:
		case <-ctx.Done():
			w.change(func() { w.orders = append(w.orders, node.Order{Kind: "given up", Replica: o.Replica}) })
			return node.Started{}, context.Cause(ctx)
		}
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return node.Started{}, err
	}
	f := os.NewFile(uintptr(fds[0]), "near")
	defer f.Close()
	conn, err := wire.OpenSocket(f)
	if err != nil {
		return node.Started{}, err
	}
	w.change(func() { w.running[o.Replica] = os.NewFile(uintptr(fds[1]), "far") })
	return node.Started{PID: 42, Path: "cold", Phases: []node.Phase{load}, Conn: conn}, nil
}

func (w *worker) Do(_ context.Context, o node.Order) (int64, error) {
	var far *os.File
	w.change(func() {
		w.orders = append(w.orders, o)
		if o.Kind == node.OrderStop {
			far = w.running[o.Replica]
			delete(w.running, o.Replica)
		}
	})
	if far != nil {
		return 0, far.Close()
	}
	if o.Kind == node.OrderLoad && o.Spec.Image == "large" {
		return 0, fmt.Errorf("load: %w: 3 GiB", fullError{})
	}
	if o.Kind == node.OrderSetCPU {
		return 0, fmt.Errorf("no cgroups: %w", errors.ErrUnsupported)
	}
	return 7, nil
}

func (w *worker) Inventory() node.Inventory {
	w.mu.Lock()
	defer w.mu.Unlock()
	var inv node.Inventory
	for name := range w.running {
		inv.Replicas = append(inv.Replicas, node.Replica{Name: name, Function: "f.ns"})
	}
	return inv
}

// broker is a real NATS server that can go and come back at its address.
type broker struct {
	t      *testing.T
	config queue.ServerConfig
	server *queue.Server
	url    string
}

func startBroker(t *testing.T) *broker {
	t.Helper()
	keys, err := queue.NewKeys()
	if err != nil {
		t.Fatal(err)
	}
	b := &broker{t: t, config: queue.ServerConfig{Dir: t.TempDir(), Log: slog.New(slog.DiscardHandler), Listen: fmt.Sprintf("127.0.0.1:%d", proctest.Ports(t, 1)[0]), Keys: keys}}
	b.start()
	b.url = b.server.URL()
	t.Cleanup(func() { b.stop() })
	return b
}

func (b *broker) start() {
	b.t.Helper()
	var err error
	if b.server, err = queue.StartServer(b.config); err != nil {
		b.t.Fatal(err)
	}
}

func (b *broker) stop() {
	if b.server != nil {
		b.server.Close()
		b.server = nil
	}
}

// link is a connection of another process's kind.
func (b *broker) link(name string) *queue.Link {
	b.t.Helper()
	nc, err := queue.Connect(b.url, b.config.Keys.Control(), name, slog.New(slog.DiscardHandler))
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(nc.Close)
	return queue.NewLink(nc)
}

// daemon is a server that runs.
type daemon struct {
	*node.Server
	*worker
	me    node.Identity
	ended chan error
	stop  func()
}

// join runs a daemon; its worker may have been another's before.
func (b *broker) join(name string, w *worker, change ...func(*node.ServerConfig)) *daemon {
	b.t.Helper()
	me, err := node.Identify(name, "test")
	if err != nil {
		b.t.Fatal(err)
	}
	cfg := node.ServerConfig{
		Codes: codes, Me: me, Bus: b.link(name), Worker: w, Socket: filepath.Join(b.t.TempDir(), "run", "node.sock"), Log: slog.New(slog.DiscardHandler),
		Announce: 100 * time.Millisecond,
	}
	for _, f := range change {
		f(&cfg)
	}
	d := &daemon{worker: w, me: cfg.Me, ended: make(chan error, 1)}
	if d.Server, err = node.NewServer(cfg); err != nil {
		b.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() { d.ended <- d.Run(ctx) }()
	d.stop = sync.OnceFunc(func() {
		cancel()
		<-d.ended
		d.Close()
	})
	b.t.Cleanup(d.stop)
	b.t.Cleanup(func() {
		w.change(func() {
			for _, f := range w.running {
				_ = f.Close()
			}
			w.running = map[string]*os.File{}
		})
	})
	return d
}

// end waits for the daemon's own end.
func (d *daemon) end(t *testing.T) error {
	t.Helper()
	select {
	case err := <-d.ended:
		d.ended <- err
		return err
	case <-time.After(limit):
		t.Fatalf("the daemon has not ended by itself within %v", limit)
		return nil
	}
}

// cluster listens to nodes and records what it was told, in order.
type cluster struct {
	*node.Directory
	t *testing.T

	mu      sync.Mutex
	told    []string
	clients map[string]*node.Client
	changed chan struct{}
}

func (b *broker) watch(change ...func(*node.DirectoryConfig)) *cluster {
	b.t.Helper()
	boot, err := node.BootID()
	if err != nil {
		b.t.Fatal(err)
	}
	c := &cluster{t: b.t, clients: map[string]*node.Client{}, changed: make(chan struct{})}
	cfg := node.DirectoryConfig{
		Codes: codes, Bus: b.link("cluster"), Boot: boot, Log: slog.New(slog.DiscardHandler),
		Joined: func(n *node.Client) {
			c.mu.Lock()
			c.clients[n.Name()] = n
			c.mu.Unlock()
			c.note("joined " + n.Name())
		},
		Left: func(name, cause string) { c.note("left " + name + ": " + cause) },
		Heard: func(n *node.Client) {
			var names []string
			for _, r := range n.Inventory().Replicas {
				names = append(names, r.Name)
			}
			slices.Sort(names)
			c.note(fmt.Sprintf("heard %s %v", n.Name(), names))
		},
		Event: func(name string, e node.Event) {
			c.note(fmt.Sprintf("event %s %d %s %s", name, e.Number, e.Kind, e.Replica))
		},
		Line: func(name string, l node.Line) {
			c.note(fmt.Sprintf("line %s %s %q %d", name, l.Replica, l.Text, l.Lost))
		},
	}
	for _, f := range change {
		f(&cfg)
	}
	if c.Directory, err = node.OpenDirectory(cfg); err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(c.Close)
	return c
}

func (c *cluster) note(s string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.told = append(c.told, s)
	close(c.changed)
	c.changed = make(chan struct{})
}

// mark returns the position of the next record.
func (c *cluster) mark() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.told)
}

// until waits for a record that begins with the given text and is not older than a mark, and
// returns the record.
func (c *cluster) until(since int, begins string) string {
	c.t.Helper()
	deadline := time.After(limit)
	for {
		c.mu.Lock()
		told, changed := c.told[since:], c.changed
		c.mu.Unlock()
		if i := slices.IndexFunc(told, func(s string) bool { return strings.HasPrefix(s, begins) }); i >= 0 {
			return told[i]
		}
		select {
		case <-changed:
		case <-deadline:
			c.t.Fatalf("waited %v for %q; told was\n%s", limit, begins, strings.Join(told, "\n"))
		}
	}
}

func (c *cluster) node(name string) *node.Client {
	c.t.Helper()
	c.until(0, "joined "+name)
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.clients[name]
}

// alive checks that data passes between both ends of a stage socket.
func alive(t *testing.T, near net.Conn, far *os.File) {
	t.Helper()
	if _, err := far.WriteString("hello"); err != nil {
		t.Errorf("write from the replica: %v", err)
	}
	_ = near.SetReadDeadline(time.Now().Add(limit))
	b := make([]byte, 5)
	if _, err := io.ReadFull(near, b); err != nil || string(b) != "hello" {
		t.Errorf("read %q, %v, want hello", b, err)
	}
}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	return ctx
}

var spec = imaged("noop")

// imaged returns the spec of a function with an image.
func imaged(image string) node.Spec {
	return node.Spec{Function: "f.ns", Namespace: "ns", Image: image}
}
