package keysmanager

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// The paths on which a replica starts. Paths for functions with a model are listed in order of
// preference (docs/adr/0023).
const (
	// Forked by a zygote whose weights are mapped from their pre-packed file.
	PathFork    = zygote.PathFork
	PathHeap    = zygote.PathHeap // forked by a zygote that has the weights in its heap
	PathMap     = zygote.PathMap  // a process that maps the weights from sealed memory
	PathCold    = "cold"          // a process that loads the weights itself
	PathProcess = "process"       // a process of a function without a model
	// A process of a function without a model, whose container waited for the start.
	PathSpare = "spare"
	// A fork that was parked on its device before the order came. By then, all was ready there
	// except for the parameters (docs/adr/0033).
	PathParked = zygote.PathParked
	// A thread of a worker. Functions with the same worker name share the worker on a device
	// (docs/adr/0033).
	PathResident = zygote.PathResident
)

// choosesPath reports whether a function leaves the choice of its path to the Manager.
func choosesPath(s node.Spec) bool { return s.Start == "" || s.Start == "auto" }

// withPossibleForm calls do with a function's parameters in the first form that is possible.
func (l *loader) withPossibleForm(a *asking, s node.Spec, e engine, image sandbox.Image, do func(zygote.Key) error) error {
	if err := e.can(s); err != nil {
		return err
	}
	for again := false; ; again = true {
		l.store.mu.Lock()
		if a.forgotten {
			l.store.mu.Unlock()
			return errForgotten
		}
		key := l.store.newest(l.store.key(s, e, image))
		l.store.uses[s.Function] = key
		l.store.mu.Unlock()
		if again {
			l.tidy() // ends the zygotes that failed
		}
		err := do(key)
		var no zygote.Impossible
		if !errors.As(err, &no) || !choosesPath(s) {
			return err
		}
		l.store.fallBack(s.Function, key, no)
	}
}

// place starts p from its function's parameters.
func (l *starter) place(ctx context.Context, o node.Order, p *process, e engine, image sandbox.Image, env map[string]string) (conn wire.Socket, err error) {
	err = l.loader.withPossibleForm(p.asking, o.Spec, e, image, func(key zygote.Key) (err error) {
		if key.Form == zygote.None {
			conn, err = l.cold(ctx, o, p, e, image, env)
			return err
		}
		return l.loader.withZygote(ctx, key, o.Spec, image, func(z *zygote.Zygote, load time.Duration) (err error) {
			if p.path = z.Path(); o.Spec.Start == "fork" && p.path != PathFork && e.library {
				return errNotPacked
			}
			conn, err = l.launch(ctx, o, p, func(socket *os.File) error {
				p.ordered(load)
				if z.Memory() != nil {
					return l.mapMemory(ctx, z, o, p, e, image, env, socket)
				}
				if err := z.Held().ShowSecrets(z.PID, o.Spec.Secrets); err != nil {
					return err
				}
				return l.fork(ctx, z, o, p, image.Root, env, socket)
			})
			return err
		})
	})
	return conn, err
}

// mostZygotes bounds how many zygotes a start tries if they end before they have forked its
// process.
const mostZygotes = 3

// withZygote calls start with the zygote of a key. If that zygote ends during the call, it calls
// start with another one. load is how long the start waited for the zygote; 0: the zygote was
// ready.
func (l *loader) withZygote(ctx context.Context, key zygote.Key, s node.Spec, image sandbox.Image, start func(z *zygote.Zygote, load time.Duration) error) error {
	begin := time.Now()
	for n := 1; ; n++ {
		z, warm, release, err := l.borrow(ctx, key, s, image)
		if err != nil {
			return err
		}
		l.store.count(z.Key, warm)
		load := time.Duration(0)
		if !warm || n > 1 {
			load = time.Since(begin)
		}
		err = start(z, load)
		release()
		if err == nil || n == mostZygotes || ctx.Err() != nil || z.Memory() != nil || z.Alive() || errors.As(err, new(zygote.ErrLied)) {
			return err
		}
		l.cfg.Log.Info("a start uses another "+key.What()+": the one before has ended", "function", s.Function, "error", err)
	}
}

// loaded loads a function's parameters, unless they are in memory. It then calls do, if do is not
// nil, while the parameters cannot be evicted. If the replicas share no parameters, loaded does
// nothing.
func (l *loader) loaded(ctx context.Context, a *asking, s node.Spec, e engine, image sandbox.Image, do func(*zygote.Zygote)) error {
	return l.withPossibleForm(a, s, e, image, func(key zygote.Key) error {
		if key.Form == zygote.None {
			return nil
		}
		z, _, release, err := l.borrow(ctx, key, s, image)
		if err != nil {
			return err
		}
		defer release()
		if do != nil {
			do(z)
		}
		return nil
	})
}

// fork starts p, of an image with this root, as a child of a zygote.
func (l *starter) fork(ctx context.Context, z *zygote.Zygote, o node.Order, p *process, root string, env map[string]string, socket *os.File) error {
	begin := time.Now()
	p.zygote = z
	if ctx.Err() != nil { // a spare child needs no wait
		return context.Cause(ctx)
	}
	if z.Works() {
		env[wire.EnvStageRoot] = root
	}
	message, err := zygote.Beginning(l.cfg.threads(o), env)
	if err != nil {
		return err
	}
	parked, err := z.Family.Fork(ctx, zygote.ForkOrder{
		Replica: p, Limits: limitsOf(o.Spec), Device: o.Device, Message: message, Files: []*os.File{socket, p.output.Stdout, p.output.Stderr},
	})
	p.phase("fork", time.Since(begin))
	if err != nil {
		return err
	}
	if parked {
		p.path = PathParked
	}
	if z.Works() {
		l.pool.Began(p.function)
	}
	l.keep(p, p.output.Readers()...)
	z.Family.EnsureSpare("")
	return nil
}

// cold starts p as a process that loads the parameters by itself.
func (l *starter) cold(ctx context.Context, o node.Order, p *process, e engine, image sandbox.Image, env map[string]string) (wire.Socket, error) {
	if err := l.cfg.loadable(e); err != nil {
		return nil, err
	}
	l.loader.store.count(zygote.Key{}, false)
	p.path = PathCold
	return l.launch(ctx, o, p, func(socket *os.File) error {
		p.ordered(0)
		return l.spawn(ctx, o, p, image, l.cfg.loads(e, env, l.cfg.threads(o)), []*os.File{socket})
	})
}

// mapMemory starts p as a process that maps the parameters.
func (l *starter) mapMemory(ctx context.Context, z *zygote.Zygote, o node.Order, p *process, e engine, image sandbox.Image, env map[string]string, socket *os.File) error {
	env = l.cfg.loads(e, env, l.cfg.threads(o))
	env[wire.EnvMapped] = "1"
	p.mapped = z
	if err := l.spawn(ctx, o, p, image, env, slices.Concat([]*os.File{socket}, z.Memory())); err != nil {
		return err
	}
	z.Family.Add(p.pid, p) // its end comes later, because it waits for this start
	return nil
}

// loadForm loads a function's parameters in the form of the key. It calls began with the pid of the
// process that loads them.
func (l *loader) loadForm(ctx context.Context, cmd sandbox.Command, key zygote.Key, s node.Spec, began func(pid int)) (*zygote.Zygote, error) {
	pid := 0
	tell := func(is int) { pid = is; began(is) }
	if key.Form != zygote.Map {
		z, err := zygote.Load(ctx, l.host, cmd, key, tenantOf(s), limitsOf(s), tell)
		if err != nil && pid != 0 {
			l.disk.removeHalfPacked(cmd.Env[wire.EnvPrepacked], pid)
		}
		return z, err
	}
	z, err := zygote.Pack(ctx, l.host, cmd, key, tenantOf(s), tell)
	if err != nil && ctx.Err() == nil {
		return nil, zygote.Impossible{Why: err.Error()}
	}
	return z, err
}

var errNotPacked = errors.New("its parameters could not be pre-packed, as the lines of its zygote say, and annotation " +
	"stagecoach.dev/start is fork: with auto or heap it starts all the same")

var errNoORT = fmt.Errorf("the function has a model (%s) and ONNX Runtime is not configured: start with --ort", wire.EnvModel)
