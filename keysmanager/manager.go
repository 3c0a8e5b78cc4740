package keysmanager

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// Config configures a Manager.
type Config struct {
	Node   string
	Images Images
	ORT    string // ONNX Runtime's shared library; empty: functions with a model cannot start
	Cache  string // folder for pre-packed parameters, kept across restarts; empty: none are made
	// Bytes of the node's memory for all zygotes and replicas together; 0: no configured limit. The
	// memory of the machine and of the cgroup are limits in any case.
	Memory  int64
	Threads int // threads that a replica computes with; 0: as many as this process may run
	// Watchdog is the command of a program that runs package watchdog, for functions that do not speak
	// the stage protocol.
	Watchdog []string
	// Warden is the parent of the node's processes, and may hold processes of an earlier Manager. The
	// caller closes it. nil: a warden inside this process.
	Warden *warden.Client
	// Accounts are the users of processes that run among the machine's files, without a root of
	// their own; nil: this process's user. The caller closes them.
	Accounts Accounts
	// Networks makes the networks of replicas and zygotes; nil: they share the machine's.
	Networks Networks
	Allowed
	// Groups makes the cgroups of replicas and zygotes; nil: there are no cgroups, so functions have
	// no limits.
	Groups Groups
	// Devices returns the node's accelerators as they were last seen; it must not block. nil: there
	// are none.
	Devices func() []Device
	Log     *slog.Logger
	Metrics prometheus.Registerer

	// OnExit is called once per replica that Start has started or New has adopted, when the replica's
	// process has ended. The call may come before Start or New has returned. nil: nobody is told.
	OnExit func(Exit)
	// OnEvict is called for each zygote that is ended because memory is short, with its function
	// and its size in bytes. It must neither block nor call the Manager. nil: evictions are not
	// reported.
	OnEvict func(function string, bytes int64)
	// OnChange is called when the inventory has changed; it must not block. nil: changes are not
	// reported.
	OnChange func()
	// Output gets each line that a replica or zygote prints to stdout or stderr. A line is cut off
	// after sandbox.MaxLine bytes. function is the key of the replica's function, or of the function
	// that the zygote was loaded for. Many goroutines may call Output. It must not block for long,
	// because it holds up the process that prints.
	Output func(function, replica, stream, line string)

	tuning
}

// Allowed is what functions may ask for.
type Allowed struct {
	HostNetwork bool // the machine's network
	Spares      int  // spare containers, at most this many for each function; 0: none
}

// tuning has settings that only tests change. The zero value is that of the product.
type tuning struct {
	meter       resources.Meter // nil: this machine's
	loadTimeout time.Duration   // 0: the constant's value; also for the fields below
	workerRests time.Duration
	workerEnds  time.Duration
	sampleEvery time.Duration
	spareRests  time.Duration
}

// Images resolves images to roots that they can run from; sandbox.Images implements it.
type Images interface {
	Resolve(image string) (sandbox.Image, error)
}

// Exit reports that a replica's process has ended. Its cause is "exited", "killed by SIGKILL",
// "exit status 1: " and the last line on stderr, or "its zygote ended: " and why.
type Exit struct {
	Replica, Function string
	PID               int
	Cause             string
	End               task.End
	Memory            *task.MemoryError // nil: its devices had enough memory
}

// Manager is a node's KeysManager. It carries out orders, and reports ends and changes. Its methods
// are safe for concurrent use.
//
// Its state is in its parts: starter, store, loader, parker and ahead. The comment of each part
// says what guards it. New sets the Manager's own fields, and they do not change.
type Manager struct {
	cfg    *Config
	warden *warden.Client

	pool    *resources.Pool // what processes hold of the node
	exits   resources.Ends  // of the warden's processes
	host    *zygote.Host    // of its zygotes
	starter *starter
	spares  *spares

	store  *store
	loader *loader
	parker *parker
	ahead  *ahead

	over     sync.Once       // for Close or Detach
	detached chan struct{}   // closed by Detach: processes are left to the warden
	ctx      context.Context // of starts and loads; ends with Close
	cancel   context.CancelCauseFunc
	starts   sync.WaitGroup // starts and loads under way
	watchers sync.WaitGroup // one goroutine per zygote
	// One goroutine per process whose parent is the warden, and one per report or eviction under
	// way.
	ends sync.WaitGroup
}

// Errors of Start that callers may want to tell apart.
var (
	// ErrClosed means that the Manager is closed and starts nothing any more.
	ErrClosed = errors.New("keysmanager: closed")
	// ErrRunning refuses an order whose replica starts or runs already. So an order that arrives
	// twice is carried out once.
	ErrRunning = errors.New("a replica of this name starts or runs already")
)

// maxThreads bounds the threads that a zygote can be made for.
const maxThreads = 256

// New returns a Manager that has adopted the processes of its warden, if there are any. The caller
// calls Close or Detach.
func New(cfg Config) (*Manager, error) {
	if cfg.meter == nil {
		cfg.meter = resources.NewKernel("")
	}
	if cfg.Threads == 0 {
		cfg.Threads = min(runtime.GOMAXPROCS(0), maxThreads) // GOMAXPROCS knows the cgroup's limit
	}
	if cfg.ORT != "" {
		abs, err := filepath.Abs(cfg.ORT)
		if err != nil {
			return nil, fmt.Errorf("keysmanager: %w", err)
		}
		cfg.ORT = abs
	}
	m := &Manager{cfg: &cfg, warden: cfg.Warden, detached: make(chan struct{})}
	m.ctx, m.cancel = context.WithCancelCause(context.Background())
	if m.warden == nil {
		m.warden = warden.InProcess(sandbox.NewSpawner())
	}
	m.wire()
	if err := m.newMetrics(cfg.Metrics); err != nil {
		m.cancel(err)
		return nil, err
	}
	if err := m.adopt(); err != nil {
		m.cancel(err)
		return nil, fmt.Errorf("keysmanager: %w", err)
	}
	live, _ := m.store.seen()
	m.pool.RetainGroups(live)
	m.store.mu.Lock()
	// Spare children start only now, because RetainGroups would have removed their new groups.
	for _, s := range m.store.slots.Values() {
		if s.zygote != nil && s.settled == nil {
			s.zygote.Family.EnsureSpare("")
		}
	}
	m.store.mu.Unlock()
	m.watchers.Go(m.watchMemory)
	return m, nil
}

// wire creates the parts of a Manager and connects them.
func (m *Manager) wire() {
	cfg := m.cfg
	m.pool = resources.NewPool(resources.Config{
		Warden: m.warden, Accounts: cfg.Accounts, Networks: cfg.Networks, HostNetwork: cfg.HostNetwork, Groups: cfg.Groups, Devices: cfg.Devices, Log: cfg.Log, Output: cfg.Output,
	})
	m.host = &zygote.Host{
		Warden: m.warden, Pool: m.pool, Exits: &m.exits, Meter: cfg.meter, Limits: cfg.zygoteLimits(), Context: m.ctx, Detached: m.detached, Tasks: &m.ends,
		Describe: func(d zygote.Description) []byte { return encode(meta{Zygote: &d}) }, Output: cfg.Output, Log: cfg.Log,
	}
	m.store = newStore(cfg, m.pool, &m.ends)
	m.loader = &loader{
		cfg: cfg, store: m.store, scale: resources.NewScale(cfg.meter, cfg.Memory), host: m.host, ctx: m.ctx, starts: &m.starts, watchers: &m.watchers,
		disk: &packedFolders{folder: cfg.Cache, log: cfg.Log, unlessUsed: m.store.unlessUsed},
	}
	m.starter = &starter{cfg: cfg, pool: m.pool, exits: &m.exits, warden: m.warden, ends: &m.ends, loader: m.loader, gates: map[string]*gate{}}
	m.spares = newSpares(m)
	m.starter.spares = m.spares
	m.parker = &parker{cfg: cfg, store: m.store, pool: m.pool, loader: m.loader}
	m.ahead = &ahead{loader: m.loader}
}

// exited forgets a process and reports its end.
func (m *Manager) exited(p *process, e resources.Ending) {
	p.held.Release() // before another replica may have its name
	if p.zygote.Works() {
		m.pool.Left(p.function)
	}
	m.store.mu.Lock()
	m.store.processes.remove(p)
	m.store.mu.Unlock()
	if p.mapped != nil {
		p.mapped.Family.Unmap(p.pid)
	}
	if m.cfg.OnExit != nil {
		m.cfg.OnExit(Exit{Replica: p.replica, Function: p.function, PID: p.pid, Cause: e.Cause, End: e.End, Memory: e.Memory})
	}
	m.pool.Drop(p.entry) // now that its end has been reported
	m.loader.tidy()
	m.cfg.changed()
}

// endTimeout bounds the wait for the end of a process that got SIGKILL. The removal of the
// process's cgroup is part of this wait and takes less time.
const endTimeout = 30 * time.Second

// Stop ends a replica whose Start has returned. It sends SIGTERM, and SIGKILL after grace or when
// ctx ends. It returns when the process has ended and OnExit has been called. If no such replica
// runs, it returns nil.
func (m *Manager) Stop(ctx context.Context, replica string, grace time.Duration) error {
	m.store.mu.Lock()
	p := m.store.processes.running(replica)
	m.store.mu.Unlock()
	if p == nil {
		return nil
	}
	p.signal(syscall.SIGTERM)
	t := time.NewTimer(grace)
	defer t.Stop()
	select {
	case <-p.gone:
		return nil
	case <-m.detached:
		return ErrClosed
	case <-t.C:
	case <-ctx.Done():
	}
	p.signal(syscall.SIGKILL)
	if p.zygote.Works() { // only the worker can end its threads, and it may hang
		err := p.awaitEnd(cmp.Or(m.cfg.workerEnds, workerEnds))
		if err == nil || errors.Is(err, ErrClosed) {
			return err
		}
		_ = p.zygote.Lied(err)
	}
	return p.awaitEnd(endTimeout)
}

// Close ends all processes. It returns after they have ended and their ends were reported. If some
// remain long after SIGKILL, it logs that and returns. After Detach it does nothing.
func (m *Manager) Close() { m.over.Do(m.close) }

func (m *Manager) close() {
	m.store.mu.Lock()
	m.store.closed = true
	m.store.mu.Unlock()
	m.cancel(ErrClosed)
	gone := make(chan struct{})
	go func() { defer close(gone); m.endAll() }()
	select {
	case <-gone:
	case <-time.After(endTimeout):
		m.cfg.Log.Error("processes are still there after SIGKILL", "waited", endTimeout, "inventory", m.Inventory())
	}
}

func (m *Manager) endAll() {
	m.spares.close()
	m.starts.Wait() // each start ends with m.ctx
	m.store.mu.Lock()
	processes := slices.Collect(maps.Values(m.store.processes))
	var zygotes []*zygote.Zygote
	for _, s := range m.store.slots.Values() {
		if s.zygote != nil {
			zygotes = append(zygotes, s.zygote)
		}
	}
	m.store.mu.Unlock()
	for _, p := range processes {
		p.signal(syscall.SIGKILL)
	}
	for _, z := range zygotes {
		z.Kill()
	}
	for _, z := range zygotes {
		<-z.Gone()
	}
	m.watchers.Wait()
	m.ends.Wait()
	m.release()
}
