package container

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"net"
	"os"
	"runtime"
	"slices"
	"sync"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"google.golang.org/grpc"

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
	// Classes are containerd's runtimes by the names that functions may ask for. A command without a
	// class has runc.
	Classes map[string]string
	// Devices are the CDI devices that functions may have: vendor.com/class=name, or * for the name.
	Devices []string
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
	startTimeout  = 45 * time.Second // for the start of a container, and for each call of it
	endTimeout    = 30 * time.Second // for the status of a container that has ended
	settleTime    = 10 * time.Second // for the end of a container whose program has ended
	removeTimeout = 30 * time.Second // for a removal, and for all of them in Close
	lateTime      = 10 * time.Second // for what containerd still makes after a call without an answer
	redialPause   = time.Second      // between two connections to a containerd that is away, at most
)

// Runtime starts processes in containers. Its methods are safe for concurrent use.
type Runtime struct {
	cfg     Config
	client  *containerd.Client
	spawner *sandbox.Spawner // for processes of the platform
	owner   string           // identifies this Runtime's containers, and says whether it lives

	open     context.Context // ends when Close begins; so do starts
	shut     context.CancelFunc
	starts   sync.WaitGroup  // starts under way
	starting chan struct{}   // has an element per start that containerd works on
	patience time.Duration   // for a call of a start: startTimeout
	remove   context.Context // ends when Close has waited long enough for removals
	giveUp   context.CancelFunc
	removes  sync.WaitGroup // removals, Sweeps in the background, and waits for ends
	removing chan struct{}  // has an element per removal that containerd works on

	sweeps sweeps
	shims  *shims

	mu     sync.Mutex
	closed bool
	live   map[*process]bool // until their removal ends
	failed []*process        // whose removal has failed; it is tried again
	again  int               // removals under way that have failed before
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
	r := &Runtime{cfg: cfg, client: client, spawner: sandbox.NewSpawner(), owner: ownName(), patience: startTimeout, live: map[*process]bool{}, sweeps: sweeps{late: map[string]bool{}}, shims: newShims(cfg)}
	r.open, r.shut = context.WithCancel(context.Background())
	r.remove, r.giveUp = context.WithCancel(context.Background())
	r.starting, r.removing = make(chan struct{}, 2*runtime.NumCPU()), make(chan struct{}, 2*runtime.NumCPU())
	return r, nil
}

// connect returns a client of a containerd that answers. If nothing listens at its socket, connect
// fails at once.
func connect(ctx context.Context, cfg Config) (*containerd.Client, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	if err := listens(cfg.Address); err != nil {
		return nil, err
	}
	// All calls have deadlines. Until then they wait for a containerd that comes back.
	client, err := containerd.New(cfg.Address, containerd.WithDefaultNamespace(cfg.Namespace), containerd.WithDefaultRuntime(runc), containerd.WithTimeout(redialPause),
		containerd.WithCallOpts([]grpc.CallOption{grpc.WaitForReady(true)}))
	if err != nil {
		return nil, err
	}
	if _, err = client.Version(ctx); err != nil {
		return nil, errors.Join(err, client.Close())
	}
	return client, nil
}

// listens returns an error if nothing listens at a unix socket.
func listens(address string) error {
	conn, err := net.DialTimeout("unix", address, answerTimeout)
	if err != nil {
		return err
	}
	return conn.Close() // nothing was sent
}

// Start implements sandbox.Runtime.
func (r *Runtime) Start(ctx context.Context, c sandbox.Command) (sandbox.Process, error) {
	if c.Platform {
		p, err := r.spawner.Start(ctx, c)
		if err != nil {
			return nil, err
		}
		return platform{p, r}, nil
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(r.open, func() { cancel(sandbox.ErrClosed) })()
	p, err := r.startInTurn(ctx, c)
	if why := context.Cause(ctx); err != nil && why != nil && !errors.Is(err, why) {
		err = fmt.Errorf("%w: %w", why, err)
	}
	if err != nil {
		where := c.Dir
		if c.Chroot != "" {
			where = "root " + c.Chroot
		}
		return nil, fmt.Errorf("start %s in %s, in a container: %w", c.Args()[0], where, err)
	}
	return p, nil
}

// startInTurn starts a process once containerd works on few enough starts. Their time begins then.
func (r *Runtime) startInTurn(ctx context.Context, c sandbox.Command) (*process, error) {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return nil, sandbox.ErrClosed
	}
	r.starts.Add(1)
	r.mu.Unlock()
	defer r.starts.Done()
	if err := enter(ctx, r.starting, startTimeout); err != nil {
		return nil, fmt.Errorf("containerd works on %d other starts: %w", cap(r.starting), err)
	}
	var calls sync.WaitGroup
	defer r.removes.Go(func() { calls.Wait(); <-r.starting })
	ctx, end := context.WithTimeout(ctx, startTimeout)
	defer end()
	if err := listens(r.cfg.Address); err != nil {
		return nil, fmt.Errorf("containerd: %w", err)
	}
	p, err := r.start(ctx, c, &calls)
	if err == nil {
		r.retry(cap(r.removing) / 2) // containerd answers
		r.mu.Lock()
		r.sweepDue()
		r.mu.Unlock()
	}
	return p, err
}

// enter puts an element into a channel, when there is room within this time.
func enter(ctx context.Context, room chan struct{}, most time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	select {
	case room <- struct{}{}:
		if ctx.Err() == nil {
			return nil
		}
		<-room
	case <-ctx.Done():
	}
	return context.Cause(ctx)
}

// platform is a process of the platform, such as a watchdog. If it is killed, it leaves containers.
type platform struct {
	sandbox.Process
	of *Runtime
}

// Forget implements sandbox.Process.
func (p platform) Forget() {
	p.Process.Forget()
	p.of.sweepSoon()
}

// add makes a process one of the Runtime's.
func (r *Runtime) add(p *process) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.live[p] = true
}

// forget removes a process from the Runtime's. If its removal has failed, it is kept for retry.
func (r *Runtime) forget(p *process, failed error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.live, p)
	if failed != nil && !r.closed {
		r.failed = append(r.failed, p)
	}
}

// retry removes in the background what could not be removed before, up to most containers at a
// time: other removals must not wait for those that fail again. The caller is a start or a Sweep
// under way, or Close.
func (r *Runtime) retry(most int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(r.failed) > 0 && r.again < most {
		p := r.failed[0]
		r.failed = r.failed[1:]
		r.live[p] = true
		r.again++
		r.removes.Go(func() {
			p.removeOrKeep()
			r.mu.Lock()
			defer r.mu.Unlock()
			r.again--
		})
	}
}

// Close implements sandbox.Runtime. It ends starts under way. It returns when the containers are
// removed, and those that killed processes of the platform have left, or when containerd has had
// enough time for that. The caller has forgotten the processes of the platform.
func (r *Runtime) Close() {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.shut()
	r.starts.Wait() // no process is half made from here on
	r.retry(math.MaxInt)
	r.mu.Lock()
	left := slices.Collect(maps.Keys(r.live))
	r.mu.Unlock()
	for _, p := range left {
		p.Forget()
	}
	stop := time.AfterFunc(removeTimeout, r.giveUp)
	r.removes.Wait()
	r.sweepLast()
	stop.Stop()
	r.giveUp()
	r.spawner.Close()
	_ = r.client.Close() // nothing is on its way
}
