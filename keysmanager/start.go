package keysmanager

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
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
	wire.EnvPrepacked, wire.EnvPack, wire.EnvMapped, wire.EnvWorker, wire.EnvStageRoot, wire.EnvSecrets,
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
		p.path = PathProcess
		conn, err = l.launch(ctx, o, p, func(socket *os.File) error {
			p.ordered(0)
			return l.spawn(ctx, o, p, image, env, []*os.File{socket})
		})
	}
	if err != nil {
		return node.Started{}, err
	}
	if err := p.held.Group().Bound(o.CPUMilli); err != nil {
		l.cfg.Log.Warn("replica's CPU limit is not set", "replica", o.Replica, "error", err)
	}
	return node.Started{PID: p.pid, Path: p.path, Phases: p.phases, Conn: conn}, nil
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
	limits := limitsOf(o.Spec)
	if Watched(image, env) {
		limits.Platform = watchdogMemory
	}
	groups, err := p.held.Enter(p.entry, o.Spec.Function, limits)
	if err != nil {
		return err
	}
	defer resources.CloseFiles(groups)
	p.held.Become(o.CPUMilli)
	env[wire.EnvStageFD] = "3"
	command := sandbox.Command{
		Dir: image.Root, Process: o.Spec.Process, Env: env, Files: files, Stdout: p.output.Stdout, Stderr: p.output.Stderr,
		Groups: groups,
	}
	who := resources.Itself
	if Watched(image, env) {
		if who = resources.ItsPrograms; image.Rootfs {
			who = resources.Nobody
		}
		if err := l.shim(&command, o.Spec, image); err != nil {
			return err
		}
		command.Env[wire.EnvOutOfMemory] = p.held.Group().TellsOutOfMemory(groups)
	}
	ended := l.exits.Await(p.entry)
	pid, err := p.held.Start(ctx, tenantOf(o.Spec), who, warden.Process{Name: p.entry, Meta: p.meta(), Command: command, Keep: p.output.Readers()})
	if err != nil {
		l.exits.Cancel(p.entry)
		return err
	}
	p.pid = pid
	p.phase("spawn", time.Since(begin))
	l.keep(p)
	l.ends.Go(func() { p.reportEnd(ended) })
	return nil
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
