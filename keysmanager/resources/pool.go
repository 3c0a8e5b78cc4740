package resources

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"os"
	"strings"
	"sync"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
)

// Config configures a Pool.
type Config struct {
	Warden *warden.Client // starts the processes
	// Accounts are the users of processes that have no root of their own; nil: the user of this
	// process.
	Accounts Accounts
	// Networks makes the networks of processes; nil: they share the machine's. HostNetwork allows
	// functions to ask for the machine's network.
	Networks    Networks
	HostNetwork bool
	// Groups makes the cgroups; nil: there are none, so functions have no limits.
	Groups Groups
	// Devices returns the node's accelerators as they were last seen; it must not block. nil: there
	// are none.
	Devices func() []Device
	Log     *slog.Logger
	// Output gets lines for the log of a function, as in keysmanager's Config.
	Output func(function, replica, stream, line string)
}

// Pool assigns a node's resources to its processes. Its methods are safe for concurrent use.
type Pool struct {
	cfg Config

	measuring sync.Mutex // held while usage is measured
	totals    totals     // of usage, with a lock of its own

	// Guards replicas, and pid and devices of each reservation. The owner of a Pool may call it with
	// its own locks held. Under mu, the Pool calls back only Config.Devices.
	mu       sync.Mutex
	replicas map[*Reservation]bool // that have not been released
}

// NewPool returns a Pool without reservations.
func NewPool(cfg Config) *Pool {
	return &Pool{cfg: cfg, replicas: map[*Reservation]bool{}}
}

// Reservation is the share of a node's resources that one process holds. It exists before the
// process starts, and the start may fail.
//
// group and account belong to the goroutine that starts the process. Other goroutines may read them
// once they know that the process runs.
type Reservation struct {
	pool              *Pool
	replica, function string // empty for a zygote, and for a child that is no replica yet

	pid     int              // of a replica that runs; guarded by pool.mu
	devices map[string]int64 // bytes by device; guarded by pool.mu, and its content does not change

	group     *Cgroup      // nil: none
	account   *heldAccount // nil: none
	admitting sync.Mutex   // held while the process gets access to another folder

	once sync.Once // of Release
}

// New returns an empty reservation for a process that is no replica.
func (p *Pool) New() *Reservation { return &Reservation{pool: p} }

// Reserve returns the reservation of a replica. ids are the replica's devices, separated by commas;
// empty: none. Reserve reserves the given bytes of each device. If bytes is 0, it reserves all free
// memory of the devices, which no other replica may use. others are the holders of device memory
// that are no replicas. The error is ErrDevice if a device is missing, unhealthy or too full.
func (p *Pool) Reserve(replica, function, ids string, bytes int64, others []Holder) (*Reservation, error) {
	r := &Reservation{pool: p, replica: replica, function: function}
	p.mu.Lock()
	defer p.mu.Unlock()
	if ids != "" {
		var err error
		if r.devices, err = reserve(p.survey(others), strings.Split(ids, ","), bytes); err != nil {
			return nil, err
		}
	}
	p.replicas[r] = true
	return r, nil
}

// Adopt returns the reservation of a process that an earlier daemon has left to the warden. It has
// the process's account. AdoptGroup and AdoptDevices add its cgroup and devices.
func (p *Pool) Adopt(k warden.Kept) *Reservation {
	r := p.New()
	r.adoptAccount(k)
	return r
}

// AdoptDevices records which replica the reservation belongs to, and how many bytes of each device
// the replica has.
func (r *Reservation) AdoptDevices(replica, function string, devices map[string]int64) {
	r.pool.mu.Lock()
	defer r.pool.mu.Unlock()
	r.replica, r.function, r.devices = replica, function, devices
	r.pool.replicas[r] = true
}

// Runs sets the process of the replica. From now on the process's use of a device counts as the
// reservation's.
func (r *Reservation) Runs(pid int) {
	r.pool.mu.Lock()
	defer r.pool.mu.Unlock()
	r.pid = pid
}

// Devices returns the reserved bytes by device. The caller must not change the map.
func (r *Reservation) Devices() map[string]int64 {
	r.pool.mu.Lock()
	defer r.pool.mu.Unlock()
	return r.devices
}

// Group returns the cgroup, or nil if there is none. The methods of a nil Cgroup work.
func (r *Reservation) Group() *Cgroup {
	if r == nil {
		return nil
	}
	return r.group
}

// Release releases all resources, once the process has ended or will not start. It kills processes
// that the process has left running. A second call does nothing.
func (r *Reservation) Release() {
	r.once.Do(func() {
		r.pool.leave(r.group)
		r.pool.mu.Lock()
		delete(r.pool.replicas, r)
		r.pool.mu.Unlock()
		r.vacate()
		if r.pool.cfg.Networks != nil {
			r.pool.cfg.Networks.Ended()
		}
	})
}

// survey returns the devices and how much of each is free. The caller holds p.mu.
func (p *Pool) survey(others []Holder) []DeviceInfo {
	if p.cfg.Devices == nil {
		return nil
	}
	all := make([]Holder, 0, len(p.replicas)+len(others))
	for r := range p.replicas {
		all = append(all, Holder{Replica: r.replica, PID: r.pid, Reserved: r.devices})
	}
	all = append(all, others...)
	return survey(p.cfg.Devices(), all, parents(all))
}

// Devices returns the node's devices and how much of each is free, sorted by ID; others as for
// Reserve.
func (p *Pool) Devices(others []Holder) []DeviceInfo {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.survey(others)
}

// HasDevices reports whether the node knows its devices.
func (p *Pool) HasDevices() bool { return p.cfg.Devices != nil }

// Tenant is what the Pool must know of the function whose process starts.
type Tenant struct {
	Function  string // pipeline.Key
	Namespace string
	Image     string          // the name that its node knows
	Group     int             // gid that may read its secrets; 0 gives each process a group of its own
	Secrets   string          // absolute path of the folder with its secrets; empty: it has none
	Network   string          // default, host or none; empty: default
	Gateway   string          // address and port of the gateway on this machine; empty: unreachable
	Options   sandbox.Options // that the process gets, unless it is a watchdog, which passes them on
}

// Start asks the warden to start a process of t's function, in the network that the function asks
// for. If the node has accounts, Start takes one for the process; with Nobody as the AccountUser it
// takes none. Release returns the account, also if the process does not start.
func (r *Reservation) Start(ctx context.Context, t Tenant, who AccountUser, p warden.Process) (pid int, err error) {
	closeNetwork, err := r.pool.connect(&p.Command, t, who)
	if err != nil {
		return 0, err
	}
	defer closeNetwork()
	if p.Command.Platform = who != Itself; who == Itself {
		p.Command.Options = t.Options
	}
	p.Command.Labels = map[string]string{sandbox.LabelFunction: t.Function, sandbox.LabelImage: t.Image, sandbox.LabelReplica: cmp.Or(r.replica, p.Name), sandbox.LabelEntry: p.Name}
	if r.pool.cfg.Accounts == nil || who == Nobody {
		return r.launch(ctx, p)
	}
	lease, err := r.pool.cfg.Accounts.Take(t.Group)
	if err != nil {
		return 0, err
	}
	r.account = newHeldAccount(lease, t.Function, p.Name)
	if err := r.account.apply(&p.Command, who, t); err != nil {
		return 0, err
	}
	return r.launch(ctx, p)
}

// launch asks the warden to start a process, and puts the limits of its cgroup into force.
func (r *Reservation) launch(ctx context.Context, p warden.Process) (pid int, err error) {
	if pid, err = r.pool.cfg.Warden.Start(ctx, p); err == nil && r.group != nil {
		if failed := r.group.group.Enforce(pid); failed != nil {
			r.pool.cfg.Log.Warn("a process has no limits", "name", p.Name, "error", failed)
		}
	}
	return pid, err
}

// Drop makes the warden forget an entry whose process has ended.
func (p *Pool) Drop(entry string) {
	if err := p.cfg.Warden.Drop(entry); err != nil {
		p.cfg.Log.Warn("warden does not forget an ended process", "error", err)
	}
}

// CloseFiles closes files that were only passed on.
func CloseFiles(files []*os.File) {
	for _, f := range files {
		_ = f.Close() // nothing was written
	}
}

// ErrDevice is the error of a replica for which there is no device, or too little memory on it.
var ErrDevice = errors.New("cannot be reserved")
