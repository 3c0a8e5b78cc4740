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

// engine describes a runtime that stages compute with, as named by wire.EnvRuntime. All differences
// between runtimes that the Manager knows are in its fields (docs/adr/0031).
type engine struct {
	name string // part of a variant's key; empty: ONNX Runtime
	// Functions without a model have zygotes, too, because a fork saves their imports.
	always  bool
	library bool // its processes load Config.ORT
	// Its zygotes run the author's code, so they get the function's environment.
	author bool
	// Its zygotes make files that later zygotes of the image use: pre-packed parameters or compiled
	// code.
	makes bool
	// Bytes that a zygote takes in addition to its parameters and to 1/needShare of their size.
	base int64
	// Maps the form that the annotation stagecoach.dev/start asks for to the form in which this
	// engine keeps parameters.
	starts map[zygote.Form]zygote.Form
	// Maps an impossible form to the form that replaces it, unless the function asks for a form.
	next map[zygote.Form]zygote.Form
}

var (
	// onnxRuntime is the engine of a Go program over package stage. The program has a graph in its
	// heap, which grows with the model.
	onnxRuntime = engine{
		library: true, makes: true, base: 32 << 20,
		starts: map[zygote.Form]zygote.Form{zygote.Forks: zygote.Forks, zygote.Heap: zygote.Heap, zygote.Map: zygote.Map, zygote.None: zygote.None},
		next:   map[zygote.Form]zygote.Form{zygote.Forks: zygote.Map, zygote.Map: zygote.None},
	}
	// python is the engine of the template python3-stage. The author's hooks decide what the replicas
	// of a zygote share. base is the size of the interpreter with PyTorch.
	python = engine{
		name: "python", always: true, author: true, makes: true, base: 256 << 20,
		starts: map[zygote.Form]zygote.Form{zygote.Forks: zygote.Forks, zygote.Heap: zygote.Forks, zygote.None: zygote.None},
		next:   map[zygote.Form]zygote.Form{zygote.Forks: zygote.None},
	}
)

// engine returns the engine of a function of this image.
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

// engineByKey returns the engine of a variant.
func engineByKey(k zygote.Key) engine {
	if k.Engine == python.name {
		return python
	}
	return onnxRuntime
}

// keeps reports whether replicas of a function start from parameters that the node keeps.
func (e engine) keeps(s node.Spec) bool { return e.always || s.Env[wire.EnvModel] != "" }

// can returns why a function's replicas cannot start as it asks for, or nil if they can.
func (e engine) can(s node.Spec) error {
	if _, ok := e.starts[formOf(s)]; !ok {
		return fmt.Errorf("annotation stagecoach.dev/start is %s, which stages of %s=%s have not; want auto, fork, heap or cold", s.Start, wire.EnvRuntime, e.name)
	}
	return nil
}

// formOf returns the form of parameters that a function asks for.
func formOf(s node.Spec) zygote.Form {
	if choosesPath(s) || s.Start == "fork" {
		return zygote.Forks
	}
	return zygote.Form(s.Start)
}

// environmentOf returns the function's environment without the variables that a function must not
// set.
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

// seen returns a hash of the part of a function's environment that the engine's zygotes get. The
// hash is part of the zygote's key. It is empty if the zygotes get nothing of the environment.
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

// loads returns a copy of env with the variables that a process needs to load its model: ONNX
// Runtime's library, if the engine uses it, and numbers of threads. threads is how many threads the
// process computes with at first. 0 sets no number: each replica of a zygote is then told its own.
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

// zygoteEnvironment returns the environment of a zygote, or of the process that packs in its place.
func (l *loader) zygoteEnvironment(key zygote.Key, s node.Spec) map[string]string {
	e, env := engineByKey(key), map[string]string{wire.EnvModel: key.Model}
	if key.Form == zygote.Worker {
		env = map[string]string{wire.EnvRuntime: e.name, wire.EnvWorker: "1", resources.EnvDevices: key.Device}
	} else if e.author {
		env = environmentOf(s)
		env[resources.EnvDevices] = "" // a zygote must not have a device: it could not be forked
		env[wire.EnvFunction] = s.Function
	}
	if e.makes && key.Form == zygote.Forks {
		if folder := l.disk.prepacked(key); folder != "" {
			env[wire.EnvPrepacked] = folder
		}
	}
	threads := 0
	if e.author { // the code that it compiles is for as many threads as its replicas have
		threads = l.cfg.threads(node.Order{Spec: s})
	}
	return l.cfg.loads(e, env, threads)
}

// loadable returns why no process can load a variant's parameters, or nil if one can.
func (c *Config) loadable(e engine) error {
	if e.library && c.ORT == "" {
		return errNoORT
	}
	return nil
}

// threads returns how many threads a replica computes with at first. It is the number that the
// replica's CPU limit can use, at most Config.Threads.
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

// zygoteLimits returns the limits of a zygote. They are the same for all zygotes.
func (c *Config) zygoteLimits() GroupLimits {
	return GroupLimits{Memory: c.Memory, PIDs: resources.MaxProcesses}
}

// changed reports that the inventory has changed. The caller must not hold the store's mutex.
func (c *Config) changed() {
	if c.OnChange != nil {
		c.OnChange()
	}
}
