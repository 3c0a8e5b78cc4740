package zygote

import (
	"crypto/rand"
	"path"
)

// Key identifies the replicas that may share a zygote. Functions of different namespaces never
// share one, because all children of a zygote have its address layout.
type Key struct {
	Namespace string
	Digest    string // of the image
	Model     string
	Process   string
	Form      Form

	Engine string // name of the engine; empty: ONNX Runtime
	// Hash of what the zygote knows of the function's environment; empty: it knows nothing.
	Environment string

	// Secrets is the folder that its replicas read. For a worker it is the set of secrets that all its
	// functions name. Empty: none.
	Secrets string

	Generation uint64 // how often the parameters have been invalidated

	Network string // of its processes, as resources.Pool.NetworkOf returns it

	Options string // as sandbox.Options.Text returns them

	Worker, Device string // of a worker: its name and its device; empty device: the CPU
}

// Form is the form in which a variant's parameters are kept for its replicas to start from.
type Form string

// The forms.
const (
	Forks Form = ""     // a zygote, with pre-packed weights if possible
	Heap  Form = "heap" // a zygote that must not write pre-packed weights
	Map   Form = "map"  // sealed memory
	None  Form = "cold" // nothing
	// Worker is a worker: it keeps no parameters but a device's context, and its threads are the
	// replicas.
	Worker Form = "worker"
)

// What returns the kind of process or memory that the key names, as text.
func (k Key) What() string {
	if k.Form == Worker {
		return "worker"
	}
	return "zygote"
}

// Variant returns the key of the same variant in the form that is tried first, with generation 0.
func (k Key) Variant() Key {
	k.Form, k.Generation = Forks, 0
	return k
}

// The paths on which a replica starts from what a zygote keeps (docs/adr/0023, docs/adr/0033).
const (
	PathFork     = "fork"     // forked by a zygote whose weights are mapped from their pre-packed file
	PathHeap     = "forkheap" // forked by a zygote that has them in its heap
	PathMap      = "map"      // a process that maps them from sealed memory
	PathParked   = "parked"   // a fork that was parked on its device, ready but for its parameters
	PathResident = "resident" // a thread of a worker; functions with the same worker name share it
)

// NewEntry returns a name for an entry of the warden. It is unique, also among the entries of
// earlier daemons.
func NewEntry(kind string) string { return kind + "-" + rand.Text() }

// childGroup returns a name for the cgroup of a child of a zygote, whose own cgroup has the given
// name. It is in the same family, if there is one: an earlier release made groups without families.
func childGroup(of string) string { return path.Join(path.Dir(of), NewEntry("child")) }
