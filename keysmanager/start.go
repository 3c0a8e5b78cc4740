package keysmanager

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// Start starts a replica and returns when its process runs. The replica says on Conn when it is
// ready; the caller closes Conn. If ctx ends first, nothing of the replica is left. Start returns
// ErrRunning if the replica's name is taken.
//
// progress is called for each phase that has ended, and must not block; it may be nil.
func (m *Manager) Start(ctx context.Context, o node.Order, progress func(node.Phase)) (node.Started, error) {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return node.Started{}, ErrClosed
	}
	if _, twice := m.processes[o.Replica]; twice {
		m.mu.Unlock()
		return node.Started{}, fmt.Errorf("replica %q: %w", o.Replica, ErrRunning)
	}
	p := &process{
		replica: o.Replica, function: o.Spec.Function, device: o.Device, milli: o.CPUMilli, started: time.Now(), told: progress, owner: m,
		entry: zygote.NewEntry("replica"), placed: make(chan struct{}), gone: make(chan struct{}),
	}
	var err error
	if p.held, err = m.pool.Reserve(o.Replica, o.Spec.Function, o.Device, o.Spec.DeviceMemory, m.holders()); err != nil {
		m.mu.Unlock()
		return node.Started{}, fmt.Errorf("replica %q of %q: %w", o.Replica, o.Spec.Function, err)
	}
	m.processes[o.Replica] = p
	m.yield(o)
	m.starts.Add(1)
	p.asking = m.ask(o.Spec.Function)
	m.mu.Unlock()
	defer m.starts.Done()
	defer m.asked(p.asking)
	defer close(p.placed)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(m.ctx, func() { cancel(ErrClosed) })()

	started, err := m.start(ctx, o, p)
	if err != nil {
		p.held.Release()
		m.remove(p)
		return node.Started{}, fmt.Errorf("replica %q of %q: %w", o.Replica, o.Spec.Function, err)
	}
	m.mu.Lock()
	p.running = true
	p.held.Runs(p.pid)
	m.mu.Unlock()
	m.changed()
	return started, nil
}

// notTheirs is not a function's to say.
var notTheirs = []string{
	wire.EnvZygoteFD, wire.EnvImage, wire.EnvAccount, wire.EnvNetwork, wire.EnvReady, wire.EnvHealth, wire.EnvORT, wire.EnvPoolThreads, wire.EnvThreads,
	wire.EnvPrepacked, wire.EnvPack, wire.EnvMapped, wire.EnvWorker, wire.EnvStageRoot, wire.EnvSecrets,
}

func (m *Manager) start(ctx context.Context, o node.Order, p *process) (node.Started, error) {
	if err := m.pool.CheckNetwork(o.Spec.Network); err != nil { // also if it would fork from a zygote that is there
		return node.Started{}, err
	}
	image, err := m.cfg.Images.Resolve(o.Spec.Image)
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
	var conn *net.UnixConn
	switch {
	case o.Spec.Worker != "":
		conn, err = m.reside(ctx, o, p, e, image, env)
	case e.keeps(o.Spec):
		conn, err = m.place(ctx, o, p, e, image, env)
	default:
		m.unuse(p.asking)
		p.path = PathProcess
		conn, err = m.launch(ctx, o, p, func(socket *os.File) error {
			p.ordered(0)
			return m.spawn(o, p, image, env, []*os.File{socket})
		})
	}
	if err != nil {
		return node.Started{}, err
	}
	if err := p.held.Group().Bound(o.CPUMilli); err != nil {
		m.cfg.Log.Warn("replica's processor is not bounded", "replica", o.Replica, "error", err)
	}
	return node.Started{PID: p.pid, Path: p.path, Phases: p.phases, Conn: conn}, nil
}

// keep describes p to the warden.
func (m *Manager) keep(p *process, files ...*os.File) {
	if err := m.warden.Put(p.entry, p.meta(), files...); err != nil {
		m.cfg.Log.Warn("replica would not be adopted as it is by another daemon", "replica", p.replica, "error", err)
	}
}

// count counts a start that needed a zygote.
func (m *Manager) count(key zygote.Key, hit bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if s, ok := m.slots.Peek(key); ok {
		s.used = time.Now()
	}
	if hit {
		m.counts.Hits++
	} else {
		m.counts.Misses++
	}
}

// spawn starts p as a process of its own. Its files, from descriptor 3 on, begin with its stage socket.
func (m *Manager) spawn(o node.Order, p *process, image sandbox.Image, env map[string]string, files []*os.File) error {
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
		if err := m.shim(&command, o.Spec, image); err != nil {
			return err
		}
		command.Env[wire.EnvOutOfMemory] = p.held.Group().TellsOutOfMemory(groups)
	}
	ended := m.exits.Await(p.entry)
	pid, err := p.held.Start(tenantOf(o.Spec), who, warden.Process{Name: p.entry, Meta: p.meta(), Command: command, Keep: p.output.Readers()})
	if err != nil {
		m.exits.Cancel(p.entry)
		return err
	}
	p.pid = pid
	p.phase("spawn", time.Since(begin))
	m.keep(p)
	m.ends.Go(func() { m.mourned(p, ended) })
	return nil
}

// Watched tells whether replicas of a function of this image and environment are run by a watchdog, because they do not speak
// the stage protocol: the image does not, or the environment asks for one of of-watchdog's modes.
func Watched(image sandbox.Image, env map[string]string) bool {
	switch env["mode"] {
	case "http", "streaming", "serializing", "static":
		return true
	}
	return !image.Stage
}

// shim makes the command of a function that of its watchdog.
func (m *Manager) shim(c *sandbox.Command, s node.Spec, image sandbox.Image) error {
	if len(m.cfg.Watchdog) == 0 {
		return fmt.Errorf("image %q has no executable ./%s, and this node runs no functions of other kinds", image.Name, sandbox.Executable)
	}
	image.ReadOnly = s.ReadOnly
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
	c.Env, c.Argv = own, m.cfg.Watchdog
	return nil
}
