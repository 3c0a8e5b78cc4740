package keysmanager

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// Config is what a Manager is made of.
type Config struct {
	Node    string
	Images  Images
	ORT     string // ONNX Runtime's shared library; empty: functions with a model cannot start
	Cache   string // folder for pre-packed parameters, kept across restarts; empty: none are made
	Memory  int64  // bytes of the node for zygotes and replicas, in all; the machine's and the cgroup's memory bound it anyway. 0: they alone
	Threads int    // that a replica computes with; 0: as many as this process may run
	// Watchdog is the command of a program that runs package watchdog, for functions that do not speak the stage protocol.
	Watchdog []string
	// Warden is the parent of the node's processes, and has what an earlier Manager has left to it; it stays the caller's to
	// close. nil: one inside this process.
	Warden *warden.Client
	// Accounts are who processes run as that have no root of their own; nil: as this one. They stay the caller's to close.
	Accounts Accounts
	// Networks makes the networks of replicas and zygotes; nil: they share the machine's. HostNetwork
	// allows functions to ask for the machine's.
	Networks    Networks
	HostNetwork bool
	// Groups makes the cgroups of replicas and zygotes; nil: there are none, and so no limits of functions.
	Groups Groups
	// Devices returns the node's accelerators as they were seen last; it must not block. nil: there are none.
	Devices func() []Device
	Log     *slog.Logger
	Metrics prometheus.Registerer

	// OnExit is called once for each replica that Start has started, possibly before Start has returned, and for each that
	// was adopted, possibly before New has; nil: nobody is told.
	OnExit func(Exit)
	// OnEvict is called for each zygote that is ended for want of memory, with its function and its size in bytes. It must
	// not block or call back; nil: nobody is told.
	OnEvict func(function string, bytes int64)
	// OnChange is called when the inventory has changed; it must not block. nil: nobody is told.
	OnChange func()
	// Output gets each line that a replica or zygote prints to stdout or stderr, at most sandbox.MaxLine bytes of it, with the
	// key of its function; a zygote's is the one that it was loaded for. It may be called by many goroutines and must not block
	// for long: who prints is held up.
	Output func(function, replica, stream, line string)

	meter       meter         // nil: this machine's
	loadTimeout time.Duration // 0: as the constant
	workerRests time.Duration // 0: as the constant
	workerEnds  time.Duration // 0: as the constant
	sampleEvery time.Duration // 0: as the constant
}

// Images knows where images can be run from; sandbox.Images does.
type Images interface {
	Resolve(image string) (sandbox.Image, error)
}

// Spec is what a Manager needs to know of a function.
type Spec struct {
	Function  string            `json:"function"` // pipeline.Key
	Namespace string            `json:"namespace"`
	Group     int               `json:"group,omitempty"`    // of users, that may read its secrets, and that it runs in where it has an account; 0: in one of its own
	Secrets   string            `json:"secrets,omitempty"`  // absolute path of the folder with its secrets, whose last part tells sets of secrets in a namespace apart; empty: it has none
	Image     string            `json:"image"`              // as Images has it
	Process   string            `json:"process,omitempty"`  // the env fprocess; empty: the image's ./stage, or its entrypoint
	Health    string            `json:"health,omitempty"`   // of such a function: wire.EnvHealth
	Ready     string            `json:"ready,omitempty"`    // HTTP path that says whether it is ready, of a function that speaks HTTP; empty: see package watchdog
	Network   string            `json:"network,omitempty"`  // default, host or none (annotation stagecoach.dev/network); empty: default
	Gateway   string            `json:"gateway,omitempty"`  // address and port of this machine where its processes reach functions, as gateway.openfaas; empty: nowhere
	Env       map[string]string `json:"env,omitempty"`      // of the function; STAGECOACH_MODEL makes it one with parameters
	Start     string            `json:"start,omitempty"`    // on which path: auto, fork, heap, map, cold (docs/adr/0023); empty: auto
	Worker    string            `json:"worker,omitempty"`   // the name of the process that it shares with others of its namespace on a device (docs/adr/0033); empty: none
	ReadOnly  bool              `json:"readOnly,omitempty"` // its program writes to /tmp alone, when its image is its root
	Memory    int64             `json:"memory,omitempty"`   // bytes that a replica may use (limits.memory); 0: not bounded
	CPUMilli  int               `json:"cpuMilli,omitempty"` // thousandths of a core that a replica may use (limits.cpu); 0: not bounded
	Devices   int               `json:"devices,omitempty"`  // that a replica gets; of one that gets one, children may be parked
	// DeviceMemory is what a replica may use of each of its devices, in bytes; 0: all of it, and nobody else uses the device.
	DeviceMemory int64 `json:"deviceMemory,omitempty"`
}

// Order asks for a replica.
type Order struct {
	Replica  string // its name, unique on the node
	Spec     Spec
	CPUMilli int    // thousandths of a core, in place of the Spec's; 0: as that says
	Device   string // UUIDs of the devices that it gets, by commas; empty: none
	// Phase is told of each part of the start when it has ended; it must not block. nil: nobody is.
	Phase func(Phase)
}

// Phase is a part of a start.
type Phase struct {
	// Name is order (from Start to the order to the process, without load), load (of parameters that were not there), fork
	// (from that order to its answer) or spawn (of a process).
	Name string
	Took time.Duration
}

// Replica is a process that was started. Conn is the dispatcher's end of its stage socket, the caller's to close.
type Replica struct {
	Name   string
	PID    int
	Path   string // PathFork, …
	Phases []Phase
	Conn   *net.UnixConn
}

// Exit says that a replica's process has ended, and why: "exited", "killed by SIGKILL", "exit status 1: " and its last line on
// stderr, "its zygote ended: " and why.
type Exit struct {
	Replica, Function string
	PID               int
	Cause             string
	End               task.End
	Memory            *task.MemoryError // nil: its devices had enough memory
}

// Manager is a node's KeysManager. Its methods are safe for concurrent use.
type Manager struct {
	cfg    Config
	warden *warden.Client

	measuring sync.Mutex // held while usage is measured
	totals    totals     // of usage

	mu        sync.Mutex
	closed    bool
	processes map[string]*process
	slots     *simplelru.LRU[zygoteKey, *slot] // least recently used first
	uses      map[string]zygoteKey             // by function: the zygote of its present spec
	sizes     map[zygoteKey]int64              // bytes that zygotes took, by key without generation
	gates     map[string]*gate                 // by function, of those that are launched
	instead   map[zygoteKey]form               // of variants whose zygote, of formFork, is impossible
	counts    Counts
	awaited   map[string]chan<- warden.Exit // by name of the warden's entry: who waits for the end of a process
	early     map[string]warden.Exit        // ends that were told during an adoption; nil: there is none
	lodgings  map[string]*lodging           // by entry of the warden, of processes with an account
	looked    map[string]looked             // by image, as the latest Warm saw it

	asks        map[string]*asking   // by function: what is under way for it
	generations map[zygoteKey]uint64 // how often parameters have been invalidated, by key without generation
	going       map[*zygote]bool     // that are being ended
	epoch       uint64               // grows when a zygote comes or goes: a sample from before does not count it
	pressed     bool                 // as evict has it
	calm        time.Time            // until then nothing is loaded ahead of need

	sampling sync.Mutex // guards what follows; taken before mu
	sample   sample     // the latest
	exact    struct {   // the latest exact measurement
		beyond map[*zygote]int64 // bytes that families take beyond what it seemed
		next   time.Time         // not before
	}
	retired prometheus.Histogram // seconds that replaced parameters have stayed

	over     sync.Once       // Close or Detach
	detached chan struct{}   // closed by Detach: what runs is left to the warden
	ctx      context.Context // of starts and loads; ends with Close
	cancel   context.CancelCauseFunc
	starts   sync.WaitGroup // Starts and loads under way
	watchers sync.WaitGroup // one a zygote
	ends     sync.WaitGroup // one a process of our own; reports and evictions under way
}

// slot is the place of a zygote: it loads, is there, or has failed.
type slot struct {
	loading  chan struct{}           // closed when the load has ended; nil: none is under way
	cancel   context.CancelCauseFunc // gives that load up
	need     need                    // of that load
	pid      int                     // of its process; 0: it has not begun
	function string                  // that it was loaded for
	zygote   *zygote                 // nil: none
	users    int                     // orders that will fork from it
	used     time.Time               // by a start, the latest
	keeping                          // of a key stage
	fails    int                     // loads that failed, in a row
	failed   uint64                  // loads that failed, ever
	ends     int                     // zygotes that loaded and ended soon, in a row
	retry    time.Time
	err      error // of the latest failed load, or why the latest zygote ended

	settled chan struct{} // invalidated: closed when no order will fork from it any more; nil: it is not
	since   time.Time     // when it was replaced; zero: it was not

	idle   time.Time       // since when a worker has had no replicas; zero: it has some
	guests map[string]bool // functions that a worker has had replicas of
}

// Errors of Start that callers may want to tell apart.
var (
	ErrClosed  = errors.New("keysmanager: closed")                           // nothing is started any more
	ErrRunning = errors.New("a replica of this name starts or runs already") // so an order that comes twice is carried out once
)

// maxThreads is the most threads that a zygote can be made for.
const maxThreads = 256

// New returns a Manager with what runs under its warden, which is nothing when it has none. The caller closes or detaches it.
func New(cfg Config) (*Manager, error) {
	if cfg.meter == nil {
		cfg.meter = newKernel("")
	}
	if cfg.Threads == 0 {
		cfg.Threads = min(runtime.GOMAXPROCS(0), maxThreads) // which knows the cgroup's limit
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
	m := &Manager{
		cfg: cfg, warden: cfg.Warden, processes: map[string]*process{}, slots: slots, awaited: map[string]chan<- warden.Exit{},
		detached: make(chan struct{}), uses: map[string]zygoteKey{}, sizes: map[zygoteKey]int64{},
		instead: map[zygoteKey]form{}, asks: map[string]*asking{}, generations: map[zygoteKey]uint64{}, gates: map[string]*gate{}, going: map[*zygote]bool{},
	}
	if err = m.newMetrics(cfg.Metrics); err != nil {
		return nil, err
	}
	m.ctx, m.cancel = context.WithCancelCause(context.Background())
	if m.warden == nil {
		m.warden = warden.InProcess()
	}
	if err := m.adopt(); err != nil {
		m.cancel(err)
		return nil, fmt.Errorf("keysmanager: %w", err)
	}
	m.retainGroups()
	m.mu.Lock()
	for _, s := range m.slots.Values() { // what was adopted, now that groups of its children are no more taken for left ones
		if s.zygote != nil && s.settled == nil {
			m.provide(s.zygote, "")
		}
	}
	m.mu.Unlock()
	m.watchers.Go(m.watchMemory)
	return m, nil
}

// exited forgets a process and reports it.
func (m *Manager) exited(p *process, e ending) {
	m.disclose(p.group) // before another may have its name
	if p.zygote.works() {
		m.totals.left(p.function)
	}
	m.remove(p)
	if p.mapped != nil {
		p.mapped.unmap(p)
	}
	if m.cfg.OnExit != nil {
		m.cfg.OnExit(Exit{Replica: p.replica, Function: p.function, PID: p.pid, Cause: e.cause, End: e.end, Memory: e.memory})
	}
	m.drop(p.entry) // now that it has been heard of
	m.tidy()
	m.changed()
}

// remove frees the name of a process.
func (m *Manager) remove(p *process) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.processes[p.replica] == p {
		delete(m.processes, p.replica)
	}
}

// endTimeout is how long the end of what has got SIGKILL is waited for, and longer than that its cgroup may take to be removed.
const endTimeout = 30 * time.Second

// Stop ends a replica whose Start has returned: SIGTERM, and after grace, or when ctx ends, SIGKILL. It returns when the
// process has ended and was reported. Stopping what does not run is no error.
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
	case <-m.detached:
		return ErrClosed
	case <-t.C:
	case <-ctx.Done():
	}
	p.signal(syscall.SIGKILL)
	if p.zygote.works() { // which alone can end its threads, and may not even hear of it
		err := p.awaitEnd(cmp.Or(m.cfg.workerEnds, workerEnds))
		if err == nil || errors.Is(err, ErrClosed) {
			return err
		}
		_ = p.zygote.lied(err)
	}
	return p.awaitEnd(endTimeout)
}

// Close ends all processes and returns when they are gone and reported. What is still there long after SIGKILL is logged. After
// Detach it does nothing.
func (m *Manager) Close() { m.over.Do(m.close) }

func (m *Manager) close() {
	m.mu.Lock()
	m.closed = true
	m.mu.Unlock()
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
	m.starts.Wait() // each ends with m.ctx
	m.mu.Lock()
	processes := slices.Collect(maps.Values(m.processes))
	var zygotes []*zygote
	for _, s := range m.slots.Values() {
		if s.zygote != nil {
			zygotes = append(zygotes, s.zygote)
		}
	}
	m.mu.Unlock()
	for _, p := range processes {
		p.signal(syscall.SIGKILL)
	}
	for _, z := range zygotes {
		z.kill()
	}
	for _, z := range zygotes {
		<-z.gone
	}
	m.watchers.Wait()
	m.ends.Wait()
	m.release()
}
