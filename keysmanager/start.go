package keysmanager

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// Start starts a replica and returns when its process runs. The replica reports on Started.Conn
// when it is ready; the caller closes Conn. If ctx ends first, Start ends the replica and leaves
// nothing behind. Start returns ErrRunning if the replica's name is taken.
//
// progress is called for each phase that has ended. It must not block, and may be nil.
func (m *Manager) Start(ctx context.Context, o node.Order, progress func(node.Phase)) (node.Started, error) {
	m.store.mu.Lock()
	if m.store.closed {
		m.store.mu.Unlock()
		return node.Started{}, ErrClosed
	}
	if _, twice := m.store.processes[o.Replica]; twice {
		m.store.mu.Unlock()
		return node.Started{}, fmt.Errorf("replica %q: %w", o.Replica, ErrRunning)
	}
	p := &process{
		replica: o.Replica, function: o.Spec.Function, device: o.Device, milli: o.CPUMilli, timing: timing{started: time.Now(), told: progress}, owner: m,
		entry: zygote.NewEntry("replica"), placed: make(chan struct{}), gone: make(chan struct{}),
	}
	var err error
	if p.held, err = m.pool.Reserve(o.Replica, o.Spec.Function, o.Device, o.Spec.DeviceMemory, m.parker.holders()); err != nil {
		m.store.mu.Unlock()
		return node.Started{}, fmt.Errorf("replica %q of %q: %w", o.Replica, o.Spec.Function, err)
	}
	m.store.processes[o.Replica] = p
	m.parker.unparkFor(o)
	m.starts.Add(1)
	p.asking = m.store.ask(o.Spec.Function)
	m.store.mu.Unlock()
	defer m.starts.Done()
	defer m.store.asked(p.asking)
	defer close(p.placed)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(m.ctx, func() { cancel(ErrClosed) })()

	started, err := m.starter.start(ctx, o, p)
	if err != nil {
		p.held.Release()
		m.store.mu.Lock()
		m.store.processes.remove(p)
		m.store.mu.Unlock()
		return node.Started{}, fmt.Errorf("replica %q of %q: %w", o.Replica, o.Spec.Function, err)
	}
	m.store.mu.Lock()
	p.running = true
	p.held.Runs(p.pid)
	m.store.mu.Unlock()
	m.cfg.changed()
	return started, nil
}

// notTheirs lists the variables that a function must not set.
var notTheirs = []string{
	wire.EnvZygoteFD, wire.EnvImage, wire.EnvAccount, wire.EnvNetwork, wire.EnvReady, wire.EnvHealth, wire.EnvORT, wire.EnvPoolThreads, wire.EnvThreads,
	wire.EnvPrepacked, wire.EnvPack, wire.EnvMapped, wire.EnvWorker, wire.EnvStageRoot, wire.EnvSecrets, wire.EnvSpare, wire.EnvRendezvous,
}

// starter starts the processes of replicas on the path that their function asks for. It asks the
// loader for a zygote to start from, and does not decide what stays in memory.
type starter struct {
	cfg    *Config
	pool   *resources.Pool
	exits  *resources.Ends
	warden *warden.Client
	ends   *sync.WaitGroup // of the processes that it starts
	loader *loader
	spares *spares

	mu    sync.Mutex       // guards gates; nothing is called under it
	gates map[string]*gate // by function, for functions with launches under way
}

func (l *starter) start(ctx context.Context, o node.Order, p *process) (node.Started, error) {
	// A function is refused even if a zygote that it could fork from is in memory.
	if err := l.pool.CheckNetwork(o.Spec.Network); err != nil {
		return node.Started{}, err
	}
	image, err := l.cfg.Images.Resolve(o.Spec.Image)
	if err != nil {
		return node.Started{}, err
	}
	o.Spec = inImage(o.Spec, image)
	e, err := engineOf(o.Spec, image)
	if err != nil {
		return node.Started{}, err
	}
	env := environmentOf(o.Spec)
	env[wire.EnvReplica], env[wire.EnvFunction], env[resources.EnvDevices] = o.Replica, o.Spec.Function, o.Device
	var conn wire.Socket
	switch {
	case o.Spec.Worker != "":
		conn, err = l.startResident(ctx, o, p, e, image, env)
	case e.keeps(o.Spec):
		conn, err = l.place(ctx, o, p, e, image, env)
	default:
		l.loader.store.unuse(p.asking)
		conn, err = l.startAlone(ctx, o, p, image, env)
	}
	if err != nil {
		return node.Started{}, err
	}
	if err := p.held.Group().Bound(o.CPUMilli); err != nil {
		l.cfg.Log.Warn("replica's CPU limit is not set", "replica", o.Replica, "error", err)
	}
	return node.Started{PID: p.pid, Path: p.path, Phases: p.phases, Conn: conn}, nil
}

// startAlone starts p as a process of its own, or makes a spare of its function the process.
func (l *starter) startAlone(ctx context.Context, o node.Order, p *process, image sandbox.Image, env map[string]string) (conn wire.Socket, err error) {
	if s := l.spares.take(o, image); s != nil {
		p.ordered(0)
		if conn, err = l.become(o, p, s); err != nil {
			l.cfg.Log.Info("a start does not use a spare: it is of no use", "function", o.Spec.Function, "spare", s.entry, "error", err)
		}
	}
	if conn == nil {
		p.path = PathProcess
		conn, err = l.launch(ctx, o, p, func(socket *os.File) error {
			p.ordered(0)
			return l.spawn(ctx, o, p, image, env, []*os.File{socket})
		})
	}
	if err == nil {
		l.spares.started(p, o, image)
	}
	return conn, err
}

// keep stores the description of p with the warden.
func (l *starter) keep(p *process, files ...*os.File) {
	if err := l.warden.Put(p.entry, p.meta(), files...); err != nil {
		l.cfg.Log.Warn("description of a replica is not stored: another daemon may not adopt it correctly", "replica", p.replica, "error", err)
	}
}

// spawn starts p as a child of the warden. files become its descriptors from 3 on; the first one is
// its stage socket.
func (l *starter) spawn(ctx context.Context, o node.Order, p *process, image sandbox.Image, env map[string]string, files []*os.File) error {
	begin := time.Now()
	pid, ended, err := l.begin(ctx, o.Spec, image, &beginning{
		entry: p.entry, held: p.held, output: p.output, env: env, files: files, entered: func() { p.held.Become(o.CPUMilli) }, meta: p.meta,
	})
	if err != nil {
		return err
	}
	p.pid = pid
	p.phase("spawn", time.Since(begin))
	l.keep(p)
	l.ends.Go(func() { p.reportEnd(ended) })
	return nil
}

// beginning is what begin needs beside a spec.
type beginning struct {
	entry   string // of the warden
	held    *resources.Reservation
	output  *sandbox.Output
	env     map[string]string
	files   []*os.File    // descriptors from 3 on; the first one is the stage socket
	spare   bool          // the last of files is its end of a sandbox.Holder
	entered func()        // is called once the cgroup exists; nil: nothing is
	meta    func() []byte // is called after that
}

// begin starts a process of a function as a child of the warden. It returns a channel that receives
// the end of the process.
func (l *starter) begin(ctx context.Context, s node.Spec, image sandbox.Image, b *beginning) (pid int, ended <-chan warden.Exit, err error) {
	limits := limitsOf(s)
	watched := Watched(image, b.env)
	if watched {
		limits.Platform = watchdogMemory
	}
	groups, err := b.held.Enter(b.entry, s.Function, limits)
	if err != nil {
		return 0, nil, err
	}
	defer resources.CloseFiles(groups)
	if b.entered != nil {
		b.entered()
	}
	b.env[wire.EnvStageFD] = "3"
	command := sandbox.Command{
		Dir: image.Root, Process: s.Process, Env: b.env, Files: b.files, Stdout: b.output.Stdout, Stderr: b.output.Stderr, Groups: groups,
	}
	who := resources.Itself
	if watched {
		if who = resources.ItsPrograms; image.Rootfs {
			who = resources.Nobody
		}
		if err := l.shim(&command, s, image); err != nil {
			return 0, nil, err
		}
		command.Env[wire.EnvOutOfMemory] = b.held.Group().TellsOutOfMemory(groups)
	}
	if command.Held = b.spare && !watched; b.spare && watched {
		command.Env[wire.EnvSpare] = strconv.Itoa(2 + len(b.files))
	}
	ended = l.exits.Await(b.entry)
	pid, err = b.held.Start(ctx, tenantOf(s), who, warden.Process{Name: b.entry, Meta: b.meta(), Command: command, Keep: b.output.Readers()})
	if err != nil {
		l.exits.Cancel(b.entry)
		return 0, nil, err
	}
	return pid, ended, nil
}

// Watched reports whether a watchdog runs the replicas of a function with this image and
// environment. A watchdog is needed if the image does not speak the stage protocol. A function can
// also ask for one: its environment then names one of of-watchdog's modes.
func Watched(image sandbox.Image, env map[string]string) bool {
	switch env["mode"] {
	case "http", "streaming", "serializing", "static":
		return true
	}
	return !image.Stage
}

// shim changes the command of a function to that of its watchdog.
func (l *starter) shim(c *sandbox.Command, s node.Spec, image sandbox.Image) error {
	if len(l.cfg.Watchdog) == 0 {
		return fmt.Errorf("image %q has no executable ./%s, and this node runs no functions of other kinds", image.Name, sandbox.Executable)
	}
	image.ReadOnly, image.Options = s.ReadOnly, optionsOf(s)
	image.Options.Memory, image.Options.CPUMilli = s.Memory, s.CPUMilli
	b, err := json.Marshal(image)
	if err != nil {
		return fmt.Errorf("image %q: %w", image.Name, err)
	}
	if s.Process != "" {
		c.Env["fprocess"] = s.Process
	}
	own := map[string]string{wire.EnvImage: string(b), wire.EnvReady: s.Ready, wire.EnvHealth: s.Health}
	if s.Secrets != "" {
		own[wire.EnvSecrets] = s.Secrets
	}
	if s.Rendezvous != "" {
		own[wire.EnvRendezvous] = s.Rendezvous
	}
	for name, value := range c.Env {
		switch name {
		case wire.EnvStageFD, wire.EnvReplica, wire.EnvFunction:
			own[name] = value
		default:
			own[wire.EnvProgram+name] = value
		}
	}
	c.Env, c.Argv = own, l.cfg.Watchdog
	return nil
}
