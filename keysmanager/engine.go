package keysmanager

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// engine is what a stage's processes compute with, as its wire.EnvRuntime says: all in which the
// Manager tells functions of one from those of another (docs/adr/0031).
type engine struct {
	name string // of a variant's key; empty: ONNX Runtime
	// Functions without a model have zygotes, too: a fork saves them their imports.
	always  bool
	library bool // its processes load Config.ORT
	// Its zygotes run the author's code, and so have the function's environment.
	author bool
	// Its zygotes make files that later zygotes of the image use: pre-packed parameters, compiled
	// code.
	makes bool
	// Bytes that a zygote takes beside its parameters and a needShare of these.
	base int64
	// By what the annotation stagecoach.dev/start asks for: in which form parameters are kept then.
	starts map[zygote.Form]zygote.Form
	// That takes the place of one that is impossible, when the function leaves the choice to us.
	next map[zygote.Form]zygote.Form
}

var (
	// onnxRuntime: a Go program over package stage. It has a graph, which grows with the model, in
	// its heap.
	onnxRuntime = engine{
		library: true, makes: true, base: 32 << 20,
		starts: map[zygote.Form]zygote.Form{zygote.Forks: zygote.Forks, zygote.Heap: zygote.Heap, zygote.Map: zygote.Map, zygote.None: zygote.None},
		next:   map[zygote.Form]zygote.Form{zygote.Forks: zygote.Map, zygote.Map: zygote.None},
	}
	// python: the template python3-stage. What its zygote's replicas share is the hooks' to decide.
	// base is the interpreter with PyTorch.
	python = engine{
		name: "python", always: true, author: true, makes: true, base: 256 << 20,
		starts: map[zygote.Form]zygote.Form{zygote.Forks: zygote.Forks, zygote.Heap: zygote.Forks, zygote.None: zygote.None},
		next:   map[zygote.Form]zygote.Form{zygote.Forks: zygote.None},
	}
)

// engine returns what a function of this image computes with.
func engineOf(s node.Spec, image sandbox.Image) (engine, error) {
	switch name := s.Env[wire.EnvRuntime]; {
	case name == "" || name == "onnx" || Watched(image, s.Env):
		return onnxRuntime, nil
	case name == python.name:
		return python, nil
	default:
		return engine{}, fmt.Errorf("%s=%q, want onnx or python; build the image again, or use a newer Stagecoach", wire.EnvRuntime, name)
	}
}

// engineByKey returns what a variant computes with.
func engineByKey(k zygote.Key) engine {
	if k.Engine == python.name {
		return python
	}
	return onnxRuntime
}

// keeps tells whether something is kept of a function that its replicas start from.
func (e engine) keeps(s node.Spec) bool { return e.always || s.Env[wire.EnvModel] != "" }

// can says why a function's replicas cannot start as it asks for; nil: they can.
func (e engine) can(s node.Spec) error {
	if _, ok := e.starts[formOf(s)]; !ok {
		return fmt.Errorf("annotation stagecoach.dev/start is %s, which stages of %s=%s have not; want auto, fork, heap or cold", s.Start, wire.EnvRuntime, e.name)
	}
	return nil
}

// form is what a function asks for.
func formOf(s node.Spec) zygote.Form {
	if choosesPath(s) || s.Start == "fork" {
		return zygote.Forks
	}
	return zygote.Form(s.Start)
}

// environment is the function's, without what is not its own to say.
func environmentOf(s node.Spec) map[string]string {
	env := maps.Clone(s.Env)
	if env == nil {
		env = map[string]string{}
	}
	for _, name := range notTheirs {
		delete(env, name)
	}
	return env
}

// seen is what a zygote of the engine knows of a function's environment, as text that tells two
// that differ apart; empty: nothing.
func (e engine) seen(s node.Spec) string {
	if !e.author {
		return ""
	}
	env := environmentOf(s)
	h := sha256.New()
	for _, name := range slices.Sorted(maps.Keys(env)) {
		fmt.Fprintf(h, "%q=%q\n", name, env[name])
	}
	return hex.EncodeToString(h.Sum(nil)[:8])
}

// loads is the environment of a process that loads its model: a zygote's, whose own is empty or, of
// the author's code, the function's; a replica's. threads is how many it computes with at first; 0:
// as its replicas are told.
func (c *Config) loads(e engine, env map[string]string, threads int) map[string]string {
	env = maps.Clone(env)
	if e.library {
		env[wire.EnvORT], env["ORT_DISABLE_TELEMETRY"] = c.ORT, "1"
	}
	env[wire.EnvPoolThreads] = strconv.Itoa(c.Threads)
	if threads > 0 {
		env[wire.EnvThreads] = strconv.Itoa(threads)
	}
	return env
}

// zygoteEnvironment is that of a zygote, or of the process that packs in its place.
func (l *loader) zygoteEnvironment(key zygote.Key, s node.Spec) map[string]string {
	e, env := engineByKey(key), map[string]string{wire.EnvModel: key.Model}
	if key.Form == zygote.Worker {
		env = map[string]string{wire.EnvRuntime: e.name, wire.EnvWorker: "1", resources.EnvDevices: key.Device}
	} else if e.author {
		env = environmentOf(s)
		env[resources.EnvDevices] = "" // no zygote has a device: it could not be forked
		env[wire.EnvFunction] = s.Function
	}
	if e.makes && key.Form == zygote.Forks {
		if folder := l.disk.prepacked(key); folder != "" {
			env[wire.EnvPrepacked] = folder
		}
	}
	threads := 0
	if e.author { // what it compiles is for as many threads as its replicas have
		threads = l.cfg.threads(node.Order{Spec: s})
	}
	return l.cfg.loads(e, env, threads)
}

// loadable says why no process can load a variant's parameters; nil: one can.
func (c *Config) loadable(e engine) error {
	if e.library && c.ORT == "" {
		return errNoORT
	}
	return nil
}

// threads returns how many threads a replica computes with at first: as many as its share of the
// processor has use for.
func (c *Config) threads(o node.Order) int {
	milli := o.CPUMilli
	if milli == 0 {
		milli = o.Spec.CPUMilli
	}
	if milli <= 0 {
		return c.Threads
	}
	return min((milli+999)/1000, c.Threads)
}

// zygoteLimits returns the limits of a zygote: what all zygotes may take.
func (c *Config) zygoteLimits() GroupLimits {
	return GroupLimits{Memory: c.Memory, PIDs: resources.MaxProcesses}
}

// changed tells that the inventory is another; it must be called without the store's mutex.
func (c *Config) changed() {
	if c.OnChange != nil {
		c.OnChange()
	}
}
