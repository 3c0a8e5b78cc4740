package keysmanager

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// The paths on which a replica comes up, those of functions with a model in order of preference (docs/adr/0023).
const (
	PathFork    = "fork"     // forked by a zygote whose weights are mapped from their pre-packed file
	PathHeap    = "forkheap" // forked by a zygote that has them in its heap
	PathMap     = "map"      // a process that maps them from sealed memory
	PathCold    = "cold"     // a process that loads them by itself
	PathProcess = "process"  // a process of a function without a model
	// Told who it is when it was ready on its device, but for its parameters: a fork that was parked there (docs/adr/0033).
	PathParked = "parked"
	// A thread of a worker, a process that stages of one name share on a device (docs/adr/0033).
	PathResident = "resident"
)

// form is what is kept of a variant's parameters, for its replicas to start from.
type form string

const (
	formFork form = ""     // a zygote, with pre-packed weights if it can have them
	formHeap form = "heap" // a zygote that is not to write any
	formMap  form = "map"  // sealed memory
	formNone form = "cold" // nothing
	// A worker: what keeps no parameters but a device's context, and has the replicas themselves.
	formWorker form = "worker"
)

// impossible says that a variant's parameters cannot be kept in a form.
type impossible struct{ why string }

func (e impossible) Error() string { return e.why }

// choice tells whether a function leaves its path to us.
func choosesPath(s node.Spec) bool { return s.Start == "" || s.Start == "auto" }

// key says where the parameters of a spec are kept now, with m.mu held.
func (m *Manager) key(s node.Spec, e engine, image sandbox.Image) zygoteKey {
	k := zygoteKey{
		namespace: s.Namespace, digest: image.Digest, model: s.Env[wire.EnvModel], process: s.Process, engineName: e.name, environment: e.seen(s), network: m.pool.NetworkOf(s.Network),
		secrets: s.Secrets,
	}
	k.form = e.starts[formOf(s)]
	if choosesPath(s) {
		k.form = m.instead[k]
	}
	return k
}

// threads is how many threads a replica computes with at first: as many as its share of the processor has use for.
func (m *Manager) threads(o node.Order) int {
	milli := o.CPUMilli
	if milli == 0 {
		milli = o.Spec.CPUMilli
	}
	if milli <= 0 {
		return m.cfg.Threads
	}
	return min((milli+999)/1000, m.cfg.Threads)
}

// variant is the key of the same variant in the form that is tried first and of the first generation.
func (k zygoteKey) variant() zygoteKey {
	k.form, k.generation = formFork, 0
	return k
}

// possibly does something with a function's parameters in the first form that is possible.
func (m *Manager) possibly(a *asking, s node.Spec, e engine, image sandbox.Image, do func(zygoteKey) error) error {
	if err := e.can(s); err != nil {
		return err
	}
	for again := false; ; again = true {
		m.mu.Lock()
		if a.forgotten {
			m.mu.Unlock()
			return errForgotten
		}
		key := m.newest(m.key(s, e, image))
		m.uses[s.Function] = key
		m.mu.Unlock()
		if again {
			m.tidy() // what failed
		}
		err := do(key)
		var no impossible
		if !errors.As(err, &no) || !choosesPath(s) {
			return err
		}
		m.fallBack(s.Function, key, no)
	}
}

// place starts p from its function's parameters.
func (m *Manager) place(ctx context.Context, o node.Order, p *process, e engine, image sandbox.Image, env map[string]string) (conn *net.UnixConn, err error) {
	err = m.possibly(p.asking, o.Spec, e, image, func(key zygoteKey) (err error) {
		if key.form == formNone {
			conn, err = m.cold(ctx, o, p, e, image, env)
			return err
		}
		return m.withZygote(ctx, key, o.Spec, image, func(z *zygote, load time.Duration) (err error) {
			if p.path = z.path(); o.Spec.Start == "fork" && p.path != PathFork && e.library {
				return errNotPacked
			}
			conn, err = m.launch(ctx, o, p, func(socket *os.File) error {
				p.ordered(load)
				if z.memory != nil {
					return m.mapMemory(z, o, p, e, image, env, socket)
				}
				if err := z.held.ShowSecrets(z.pid, o.Spec.Secrets); err != nil {
					return err
				}
				return m.fork(ctx, z, o, p, image.Root, env, socket)
			})
			return err
		})
	})
	return conn, err
}

// mostZygotes is how many zygotes a start tries at most if they end before they have forked its
// process.
const mostZygotes = 3

// withZygote calls start with the zygote of a key, and with another one if that zygote ends
// meanwhile. load is how long the start waited for the zygote; 0: it was ready.
func (m *Manager) withZygote(ctx context.Context, key zygoteKey, s node.Spec, image sandbox.Image, start func(z *zygote, load time.Duration) error) error {
	begin := time.Now()
	for n := 1; ; n++ {
		z, warm, release, err := m.borrow(ctx, key, s, image)
		if err != nil {
			return err
		}
		m.count(z.key, warm)
		load := time.Duration(0)
		if !warm || n > 1 {
			load = time.Since(begin)
		}
		err = start(z, load)
		release()
		if err == nil || n == mostZygotes || ctx.Err() != nil || z.memory != nil || z.alive() || errors.As(err, new(errLied)) {
			return err
		}
		m.cfg.Log.Info("a start uses another "+key.what()+": the one before has ended", "function", s.Function, "error", err)
	}
}

// loaded brings a function's parameters into memory, unless they are there or its replicas share none, and calls do, if not
// nil, before they may be evicted again.
func (m *Manager) loaded(ctx context.Context, a *asking, s node.Spec, e engine, image sandbox.Image, do func(*zygote)) error {
	return m.possibly(a, s, e, image, func(key zygoteKey) error {
		if key.form == formNone {
			return nil
		}
		z, _, release, err := m.borrow(ctx, key, s, image)
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

// fallBack has a variant's replicas start on another path from now on, until its parameters are invalidated.
func (m *Manager) fallBack(function string, key zygoteKey, why impossible) {
	m.mu.Lock()
	defer m.mu.Unlock()
	to := key.engine().next[key.form]
	if m.instead[key.variant()] != key.form {
		return // another start was faster
	}
	m.instead[key.variant()] = to
	m.cfg.Log.Warn("replicas of a function start on another path", "function", function, "path", string(to), "why", why.why)
}

// fork starts p, of an image with this root, as a child of a zygote.
func (m *Manager) fork(ctx context.Context, z *zygote, o node.Order, p *process, root string, env map[string]string, socket *os.File) error {
	begin := time.Now()
	p.zygote = z
	if ctx.Err() != nil { // a spare child needs no waiting for
		return context.Cause(ctx)
	}
	if z.works() {
		env[wire.EnvStageRoot] = root
	}
	message, err := beginning(m.threads(o), env)
	if err != nil {
		return err
	}
	files := []*os.File{socket, p.output.Stdout, p.output.Stderr}
	c := z.claim(limitsOf(o.Spec), o.Device)
	parked := c != nil && o.Device != ""
	if c == nil && o.Device != "" {
		c = z.claim(limitsOf(o.Spec), "")
	}
	for spare := c != nil; ; spare, parked = false, false {
		if !spare {
			if c, err = m.bear(ctx, z, limitsOf(o.Spec), false); err != nil {
				break
			}
		}
		p.held.Take(c.held, o.CPUMilli)
		if err = z.begin(c, p, message, files); err == nil {
			break
		}
		m.dispose(c)
		if !spare || !errors.Is(err, errChildEnded) {
			break
		}
	}
	p.phase("fork", time.Since(begin))
	if err != nil {
		return err
	}
	if parked {
		p.path = PathParked
	}
	if z.works() {
		m.pool.Began(p.function)
	}
	m.keep(p, p.output.Readers()...)
	m.provide(z, "")
	return nil
}

// cold starts p as a process that loads the parameters by itself.
func (m *Manager) cold(ctx context.Context, o node.Order, p *process, e engine, image sandbox.Image, env map[string]string) (*net.UnixConn, error) {
	if err := m.loadable(e); err != nil {
		return nil, err
	}
	m.count(zygoteKey{}, false)
	p.path = PathCold
	return m.launch(ctx, o, p, func(socket *os.File) error {
		p.ordered(0)
		return m.spawn(o, p, image, m.loads(e, env, m.threads(o)), []*os.File{socket})
	})
}

// mapMemory starts p as a process that maps the parameters.
func (m *Manager) mapMemory(z *zygote, o node.Order, p *process, e engine, image sandbox.Image, env map[string]string, socket *os.File) error {
	env = m.loads(e, env, m.threads(o))
	env[wire.EnvMapped] = "1"
	p.mapped = z
	if err := m.spawn(o, p, image, env, slices.Concat([]*os.File{socket}, z.memory)); err != nil {
		return err
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	z.children[uint32(p.pid)] = p // its end comes later: it waits for this start
	return nil
}

// path is that of replicas that start from z.
func (z *zygote) path() string {
	switch {
	case z.works():
		return PathResident
	case z.memory != nil:
		return PathMap
	case z.prepacked:
		return PathFork
	}
	return PathHeap
}

// bring brings a function's parameters into memory, in the form of the key. began is told of the process that does it.
func (m *Manager) bring(ctx context.Context, cmd sandbox.Command, key zygoteKey, s node.Spec, began func(pid int)) (*zygote, error) {
	if key.form != formMap {
		return m.startZygote(ctx, cmd, key, s, began)
	}
	z, err := m.pack(ctx, cmd, key, s, began)
	if err != nil && ctx.Err() == nil {
		return nil, impossible{err.Error()}
	}
	return z, err
}

var errNotPacked = errors.New("its parameters could not be pre-packed, as the lines of its zygote say, and annotation " +
	"stagecoach.dev/start is fork: with auto or heap it starts all the same")

var errNoORT = fmt.Errorf("the function has a model (%s) and ONNX Runtime is not configured: start with --ort", wire.EnvModel)
