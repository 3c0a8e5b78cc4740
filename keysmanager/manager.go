package keysmanager

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/sandbox"
	"github.com/stagecoach-serving/stagecoach/wire"
)

// Threshold is the share of the node's memory that zygotes may take before idle ones are evicted (QUART, §5).
const Threshold = 0.85

// Config is what a Manager is made of.
type Config struct {
	Node    string
	Images  sandbox.Images
	ORT     string // ONNX Runtime's shared library; empty: functions with a model cannot start
	Cache   string // folder for pre-packed parameters, kept across restarts; empty: none are made
	Memory  int64  // bytes of the node for zygotes and replicas; 0: the machine's or the cgroup's
	Threads int    // that a replica computes with; 0: the machine's
	OnExit  func(Exit)
	Output  func(replica, stream, line string) // each line that a replica or zygote prints
	Log     *slog.Logger
	Metrics prometheus.Registerer
}

// Spec is what a Manager needs to know of a function.
type Spec struct {
	Function  string // pipeline.Key
	Namespace string
	Image     string
	Process   string            // the env fprocess; empty: the image's ./stage
	Env       map[string]string // of the function; STAGECOACH_MODEL makes it one with parameters
}

// Order asks for a replica.
type Order struct {
	Replica string // its name, unique on the node
	Spec    Spec
}

// Phase is a part of a start.
type Phase struct {
	Name string // load (of a zygote that was not there), fork, spawn
	Took time.Duration
}

// Replica is a process that was started. Conn is the dispatcher's end of its stage socket, the caller's to close.
type Replica struct {
	Name   string
	PID    int
	Path   string // fork: from a zygote that was there; cold: from one that had to be loaded; process: without a zygote
	Phases []Phase
	Conn   *net.UnixConn
}

// Exit says that a replica's process has ended, and why.
type Exit struct {
	Replica, Function string
	PID               int
	Cause             string
}

// Manager is a node's KeysManager. Its methods are safe for concurrent use.
type Manager struct {
	cfg     Config
	spawner *sandbox.Spawner
	metrics *metrics

	mu        sync.Mutex
	closed    bool
	processes map[string]*process
	slots     *simplelru.LRU[zygoteKey, *slot] // least recently used first
	uses      map[string]zygoteKey             // by function: the zygote of its present spec

	ctx      context.Context // of loads; ends with Close
	cancel   context.CancelFunc
	starts   sync.WaitGroup // Starts, loads and evictions under way
	watchers sync.WaitGroup // one a zygote
}

// slot is the place of a zygote: it loads, is there, or has failed.
type slot struct {
	loading chan struct{} // closed when the load has ended; nil: none is under way
	zygote  *zygote       // nil: none
	users   int           // orders that will fork from it
	keep    bool          // a key stage
	fails   int           // in a row
	retry   time.Time
	err     error // of the last load
}

// ErrClosed says that a Manager starts nothing any more.
var ErrClosed = errors.New("keysmanager: closed")

// New returns a Manager without processes. The caller closes it.
func New(cfg Config) (*Manager, error) {
	if cfg.Memory == 0 {
		cfg.Memory = availableMemory()
	}
	if cfg.Threads == 0 {
		cfg.Threads = runtime.NumCPU()
	}
	if cfg.ORT != "" {
		abs, err := filepath.Abs(cfg.ORT)
		if err != nil {
			return nil, fmt.Errorf("keysmanager: %w", err)
		}
		cfg.ORT = abs
	}
	slots, err := simplelru.NewLRU[zygoteKey, *slot](1<<20, nil) // bounded by memory, not by number
	if err != nil {
		return nil, err
	}
	m := &Manager{cfg: cfg, spawner: sandbox.NewSpawner(), processes: map[string]*process{}, slots: slots, uses: map[string]zygoteKey{}}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	if m.metrics, err = newMetrics(cfg.Metrics); err != nil {
		m.spawner.Close()
		return nil, err
	}
	return m, nil
}

// Start starts a replica and returns when its process runs; that it is ready it says on Conn.
func (m *Manager) Start(ctx context.Context, o Order) (*Replica, error) {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return nil, ErrClosed
	}
	if _, twice := m.processes[o.Replica]; twice {
		m.mu.Unlock()
		return nil, fmt.Errorf("replica %q runs already, want a new name", o.Replica)
	}
	m.starts.Add(1)
	p := &process{replica: o.Replica, function: o.Spec.Function, started: time.Now(), gone: make(chan struct{}), report: m.exited}
	m.processes[o.Replica] = p
	m.mu.Unlock()
	defer m.starts.Done()

	r, err := m.start(ctx, o, p)
	if err != nil {
		m.mu.Lock()
		delete(m.processes, o.Replica)
		m.mu.Unlock()
		return nil, fmt.Errorf("replica %q of %q: %w", o.Replica, o.Spec.Function, err)
	}
	m.mu.Lock()
	p.running = true
	m.mu.Unlock()
	for _, ph := range r.Phases {
		m.metrics.start.WithLabelValues(ph.Name, r.Path).Observe(ph.Took.Seconds())
	}
	return r, nil
}

func (m *Manager) start(ctx context.Context, o Order, p *process) (*Replica, error) {
	image, err := m.cfg.Images.Resolve(o.Spec.Image)
	if err != nil {
		return nil, err
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("stage socket: %w", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "stage")
	defer theirs.Close()
	conn, err := unixConn(fds[0])
	if err != nil {
		return nil, err
	}
	if p.output, err = sandbox.NewOutput(func(stream, line string) { m.cfg.Output(o.Replica, stream, line) }); err != nil {
		_ = conn.Close()
		return nil, err
	}
	env := maps.Clone(o.Spec.Env)
	if env == nil {
		env = map[string]string{}
	}
	env[wire.EnvReplica], env[wire.EnvFunction] = o.Replica, o.Spec.Function
	if env[wire.EnvModel] != "" {
		err = m.fork(ctx, o, p, image, env, theirs)
	} else {
		err = m.spawn(o, p, image, env, theirs)
	}
	p.output.Started()
	if err != nil {
		_ = conn.Close()
		p.output.Wait()
		return nil, err
	}
	return &Replica{Name: o.Replica, PID: p.pid, Path: p.path, Phases: p.phases, Conn: conn}, nil
}

// fork starts p from its function's zygote.
func (m *Manager) fork(ctx context.Context, o Order, p *process, image sandbox.Image, env map[string]string, socket *os.File) error {
	begin := time.Now()
	z, warm, release, err := m.borrow(ctx, o.Spec, image)
	if err != nil {
		return err
	}
	defer release()
	p.path = "fork"
	if !warm {
		p.path = "cold"
		p.phases = append(p.phases, Phase{"load", time.Since(begin)})
	}
	p.zygote = z
	begin = time.Now()
	_, err = z.fork(ctx, p, m.cfg.Threads, env, [3]*os.File{socket, p.output.Stdout, p.output.Stderr})
	p.phases = append(p.phases, Phase{"fork", time.Since(begin)})
	return err
}

// spawn starts p as a process of its own.
func (m *Manager) spawn(o Order, p *process, image sandbox.Image, env map[string]string, socket *os.File) error {
	begin := time.Now()
	env[wire.EnvStageFD] = "3"
	cmd, err := m.spawner.Start(sandbox.Command{
		Dir: image.Root, Process: o.Spec.Process, Env: env, Files: []*os.File{socket}, Stdout: p.output.Stdout, Stderr: p.output.Stderr,
	})
	if err != nil {
		return err
	}
	p.cmd, p.pid, p.path = cmd, cmd.Process.Pid, "process"
	p.phases = []Phase{{"spawn", time.Since(begin)}}
	go func() { // ends with the process; p.gone says so
		_ = cmd.Wait() // the state says how it ended
		p.end(describeState(cmd.ProcessState))
	}()
	return nil
}

// exited forgets a process and reports it.
func (m *Manager) exited(p *process, cause string) {
	m.mu.Lock()
	delete(m.processes, p.replica)
	m.mu.Unlock()
	if m.cfg.OnExit != nil {
		m.cfg.OnExit(Exit{Replica: p.replica, Function: p.function, PID: p.pid, Cause: cause})
	}
	m.tidy()
}

// Stop ends a replica whose Start has returned: SIGTERM, and after grace, or when ctx ends, SIGKILL. It returns when the process has ended and was
// reported. Stopping what does not run is no error.
func (m *Manager) Stop(ctx context.Context, replica string, grace time.Duration) error {
	m.mu.Lock()
	p := m.processes[replica]
	runs := p != nil && p.running
	m.mu.Unlock()
	if !runs {
		return nil
	}
	p.signal(syscall.SIGTERM)
	t := time.NewTimer(grace)
	defer t.Stop()
	select {
	case <-p.gone:
		return nil
	case <-t.C:
	case <-ctx.Done():
	}
	p.signal(syscall.SIGKILL)
	select {
	case <-p.gone:
		return nil
	case <-time.After(10 * time.Second):
		return fmt.Errorf("replica %q, process %d: still there 10 s after SIGKILL", replica, p.pid)
	}
}

// Close ends all processes and returns when they are gone.
func (m *Manager) Close() {
	m.mu.Lock()
	m.closed = true
	m.mu.Unlock()
	m.cancel()
	m.starts.Wait()
	m.mu.Lock()
	processes := slices.Collect(maps.Values(m.processes))
	slots := m.slots.Values()
	m.mu.Unlock()
	for _, p := range processes {
		p.signal(syscall.SIGKILL)
	}
	for _, s := range slots {
		if s.zygote != nil {
			s.zygote.stop()
		}
	}
	for _, p := range processes {
		<-p.gone
	}
	m.watchers.Wait()
	m.spawner.Close()
}

// availableMemory is the cgroup's limit or the machine's memory in bytes, whichever is lower.
func availableMemory() int64 {
	most := int64(1) << 62
	for _, file := range []string{"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"} {
		if b, err := os.ReadFile(file); err == nil {
			if n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64); err == nil {
				most = min(most, n)
			}
		}
	}
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) == nil {
		most = min(most, int64(info.Totalram)*int64(info.Unit))
	}
	return most
}
