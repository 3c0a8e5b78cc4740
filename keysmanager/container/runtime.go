package container

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	containerd "github.com/containerd/containerd/v2/client"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// Config says which containerd a Runtime uses, and for which node.
type Config struct {
	Address   string // path of containerd's unix socket
	Namespace string // of containerd, in which the containers are
	// Node is the name of the node, which no other node of the machine has. A Runtime removes what
	// killed processes of its node have left.
	Node string
	Init string // path of the program stagecoach-init
	// Labels are those of all Commands, in addition to a Command's own.
	Labels map[string]string

	Log *slog.Logger
}

// Defaults of a Config.
const (
	Address   = "/run/containerd/containerd.sock"
	Namespace = "stagecoach"
)

// Bounds of the waits for containerd.
const (
	answerTimeout = 10 * time.Second // for its first answer
	startTimeout  = 45 * time.Second // for the start of a container
	endTimeout    = 30 * time.Second // for the status of a container that has ended
	settleTime    = 10 * time.Second // for the end of a container whose program has ended
	removeTimeout = 30 * time.Second // for the removal of a container
)

// Runtime starts processes in containers. Its methods are safe for concurrent use.
type Runtime struct {
	cfg     Config
	client  *containerd.Client
	spawner *sandbox.Spawner // for processes of the platform
	owner   string           // identifies this Runtime's containers, and says whether it lives
	removes sync.WaitGroup   // removals under way, and waits for ends

	sweeping sync.Mutex // held while Sweep runs

	mu     sync.Mutex
	closed bool
	live   map[*process]bool // until they are forgotten
}

// Open returns a Runtime. The caller closes it.
func Open(ctx context.Context, cfg Config) (*Runtime, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("runtime containerd: containers need root: run as root, or choose --runtime process")
	}
	if info, err := os.Stat(cfg.Init); err != nil || !info.Mode().IsRegular() {
		return nil, fmt.Errorf("runtime containerd: program %s is missing: make build puts it beside stagecoach", cfg.Init)
	}
	client, err := connect(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("runtime containerd: %w; want containerd at %s: start it, or name its socket with --containerd-address", err, cfg.Address)
	}
	return &Runtime{cfg: cfg, client: client, spawner: sandbox.NewSpawner(), owner: ownName(), live: map[*process]bool{}}, nil
}

// connect returns a client of a containerd that answers. If nothing listens at its socket, connect
// fails at once.
func connect(ctx context.Context, cfg Config) (*containerd.Client, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "unix", cfg.Address)
	if err != nil {
		return nil, err
	}
	_ = conn.Close() // nothing was sent
	client, err := containerd.New(cfg.Address, containerd.WithDefaultNamespace(cfg.Namespace), containerd.WithTimeout(answerTimeout))
	if err != nil {
		return nil, err
	}
	if _, err = client.Version(ctx); err != nil {
		return nil, errors.Join(err, client.Close())
	}
	return client, nil
}

// Start implements sandbox.Runtime.
func (r *Runtime) Start(c sandbox.Command) (sandbox.Process, error) {
	if c.Platform {
		p, err := r.spawner.Start(c)
		if err != nil {
			return nil, err
		}
		return platform{p, r}, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	p, err := r.start(ctx, c)
	if err != nil {
		where := c.Dir
		if c.Chroot != "" {
			where = "root " + c.Chroot
		}
		return nil, fmt.Errorf("start %s in %s, in a container: %w", program(c), where, err)
	}
	return p, nil
}

// platform is a process of the platform, such as a watchdog. If it is killed, it leaves containers.
type platform struct {
	sandbox.Process
	of *Runtime
}

// Forget implements sandbox.Process.
func (p platform) Forget() {
	p.Process.Forget()
	p.of.removes.Go(func() { p.of.Sweep(context.Background()) })
}

// add makes a process one of the Runtime's. It returns false if the Runtime is closed.
func (r *Runtime) add(p *process) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return false
	}
	r.live[p] = true
	return true
}

// forget removes a process from the Runtime's, and reports whether it was one of them.
func (r *Runtime) forget(p *process) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	was := r.live[p]
	delete(r.live, p)
	return was
}

// Close implements sandbox.Runtime. It returns when the containers are removed.
func (r *Runtime) Close() {
	r.mu.Lock()
	r.closed = true
	var left []*process
	for p := range r.live {
		left = append(left, p)
	}
	r.mu.Unlock()
	for _, p := range left {
		p.Forget()
	}
	r.removes.Wait()
	r.spawner.Close()
	_ = r.client.Close() // nothing is on its way
}
