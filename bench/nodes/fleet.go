package nodes

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/request/queue"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// fleet is a number of nodes that start no processes. Each has its own connection to NATS and its
// own socket, as a daemon has.
type fleet struct {
	nodes  []*noop
	cancel context.CancelFunc
	group  sync.WaitGroup
}

// noop is a node of a fleet.
type noop struct {
	server *node.Server
	worker *worker
	hangUp func() // closes its connection to NATS
}

// openFleet starts nodes that join the server at url.
func openFleet(url, token, dir string, count int, log *slog.Logger) (*fleet, error) {
	f := &fleet{}
	ctx, cancel := context.WithCancel(context.Background())
	f.cancel = cancel
	for i := range count {
		n, err := openNoop(url, token, filepath.Join(dir, fmt.Sprint(i), "socket"), nodeName(i), log)
		if err != nil {
			f.close()
			return nil, err
		}
		f.nodes = append(f.nodes, n)
		f.group.Go(func() {
			if err := n.server.Run(ctx); err != nil && ctx.Err() == nil {
				log.Error("a node has ended", "error", err)
			}
		})
	}
	return f, nil
}

// nodeMilli is the thousandths of a core of each node.
const nodeMilli = 32000

func nodeName(i int) string { return fmt.Sprintf("node-%04d", i) }

func openNoop(url, token, socket, name string, log *slog.Logger) (*noop, error) {
	me, err := node.Identify(name, "bench")
	if err != nil {
		return nil, err
	}
	a, err := accessOf(token, name)
	if err != nil {
		return nil, err
	}
	nc, err := queue.Connect(url, a, name, log)
	if err != nil {
		return nil, err
	}
	w := &worker{name: name, replicas: map[string]*held{}}
	server, err := node.NewServer(node.ServerConfig{Me: me, Bus: queue.NewLink(nc), Worker: w, Socket: socket, Log: log})
	if err != nil {
		nc.Close()
		return nil, err
	}
	return &noop{server: server, worker: w, hangUp: nc.Close}, nil
}

// accessOf returns the access of a node with a user of its own. keys is the text of NATS's keys.
func accessOf(keys, name string) (queue.Access, error) {
	k, err := queue.ParseKeys([]byte(keys))
	if err != nil {
		return queue.Access{}, err
	}
	seed, public, err := queue.NewUser()
	if err != nil {
		return queue.Access{}, err
	}
	user, err := k.Node(public, name, time.Now().Add(24*time.Hour))
	return queue.Access{User: func() (string, error) { return user, nil }, Seed: seed}, err
}

// silence cuts off the first nodes, as if their machines had lost the network. Their replicas stay.
func (f *fleet) silence(count int) {
	for _, n := range f.nodes[:min(count, len(f.nodes))] {
		n.hangUp()
	}
}

// close ends the nodes and what they hold.
func (f *fleet) close() {
	f.cancel()
	f.group.Wait()
	for _, n := range f.nodes {
		n.server.Close()
		n.hangUp()
		n.worker.close()
	}
}

// worker is a KeysManager that starts nothing. A replica is the other end of its stage socket,
// which greets and then waits until it is closed.
type worker struct {
	name string

	mu       sync.Mutex
	replicas map[string]*held
	sorted   []node.Replica // by name; nil: made on demand
	zygotes  []node.Zygote
}

// held is a replica of a worker.
type held struct {
	node.Replica
	far  *wire.Conn
	gone chan struct{} // closed when its goroutine has ended
}

// Start implements node.Worker.
func (w *worker) Start(_ context.Context, o node.Order, progress func(node.Phase)) (node.Started, error) {
	near, far, err := socketpair()
	if err != nil {
		return node.Started{}, err
	}
	fork := node.Phase{Name: "fork", Took: 2 * time.Millisecond}
	progress(fork)
	r := &held{far: wire.NewConn(far), gone: make(chan struct{}), Replica: node.Replica{
		Name: o.Replica, Function: o.Spec.Function, PID: os.Getpid(), Path: "fork", Phases: []node.Phase{fork}, Started: time.Now().UTC(),
		CPUMilli: o.CPUMilli, Device: o.Device, Usage: &node.Usage{CPUMilli: 100, Memory: 64 << 20},
	}}
	go r.serve()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.replicas[o.Replica], w.sorted = r, nil
	return node.Started{PID: r.PID, Path: r.Path, Phases: r.Phases, Conn: near}, nil
}

// serve greets, and reads until the connection ends.
func (r *held) serve() {
	defer close(r.gone)
	defer r.far.Close()
	hello := wire.Hello{Oldest: wire.OldestVersion, Newest: wire.Version, PID: r.PID, Function: r.Function, Replica: r.Name, Slots: 1, MaxBatch: 1, Threads: 1}
	if err := r.far.Write(wire.Frame{Type: wire.FrameHello, Payload: hello.Append(nil)}); err != nil {
		return
	}
	for {
		if _, err := r.far.Read(); err != nil {
			return
		}
	}
}

// Do implements node.Worker.
func (w *worker) Do(_ context.Context, o node.Order) (int64, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch o.Kind {
	case node.OrderStop:
		if r := w.replicas[o.Replica]; r != nil {
			_ = r.far.Close() // nothing is sent any more
			delete(w.replicas, o.Replica)
			w.sorted = nil
		}
	case node.OrderWarm:
		w.zygotes = w.zygotes[:0:0]
		for _, want := range o.Wanted {
			w.zygotes = append(w.zygotes, node.Zygote{
				Function: want.Spec.Function, Namespace: want.Spec.Namespace, Digest: "sha256:" + want.Spec.Image, Model: "model", PID: os.Getpid(), Bytes: 256 << 20, Path: "fork",
				Key: want.Key, State: node.Ready, Load: time.Second, Usage: &node.Usage{Memory: 256 << 20},
			})
		}
	}
	return 0, nil
}

// Inventory implements node.Worker.
func (w *worker) Inventory() node.Inventory {
	const gib = 1 << 30
	w.mu.Lock()
	defer w.mu.Unlock()
	inv := node.Inventory{
		Memory: node.Memory{Bound: "machine", Total: 64 * gib, Threshold: 48 * gib, Free: 48 * gib}, CPU: node.CPU{Total: nodeMilli},
		Devices: []node.Device{}, Failures: []node.Failure{}, Zygotes: []node.Zygote{},
	}
	if w.sorted == nil {
		w.sorted = make([]node.Replica, 0, len(w.replicas))
		for _, r := range w.replicas {
			w.sorted = append(w.sorted, r.Replica)
		}
		sortReplicas(w.sorted)
	}
	inv.Replicas = w.sorted
	for _, z := range w.zygotes {
		for i := range w.sorted {
			if w.sorted[i].Function == z.Function {
				z.Replicas++
			}
		}
		inv.Memory.Used += z.Bytes
		inv.Zygotes = append(inv.Zygotes, z)
	}
	inv.Memory.Used += int64(len(w.sorted)) * (64 << 20)
	return inv
}

// close ends the replicas.
func (w *worker) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range w.replicas {
		_ = r.far.Close()
		<-r.gone
	}
}

// socketpair returns the two ends of a stage socket.
func socketpair() (near, far wire.Socket, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("stage socket: %w", err)
	}
	var ends [2]wire.Socket
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "stage")
		if ends[i], err = wire.OpenSocket(f); err != nil {
			return nil, nil, fmt.Errorf("stage socket: %w", err)
		}
		if err := f.Close(); err != nil {
			return nil, nil, fmt.Errorf("stage socket: %w", err)
		}
	}
	return ends[0], ends[1], nil
}
