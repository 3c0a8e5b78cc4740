package zygote

import "crypto/rand"

// Key says which replicas may share a zygote. Namespaces never do: all children of a zygote have
// its address layout.
type Key struct {
	Namespace string
	Digest    string // of the image
	Model     string
	Process   string
	Form      Form

	Engine string // the name of what its processes compute with; empty: ONNX Runtime
	// What the zygote knows of the function's environment, as a hash; empty: nothing.
	Environment string

	// Secrets is the folder that its replicas read, or of a worker the set of secrets that all its
	// functions name; empty: none.
	Secrets string

	Generation uint64 // how often the parameters have been invalidated

	Network string // that its processes are in, as resources.Pool.NetworkOf has it

	Worker, Device string // of a worker: its name, and its device; empty: the CPU
}

// Form is what is kept of a variant's parameters, for its replicas to start from.
type Form string

// The forms.
const (
	Forks Form = ""     // a zygote, with pre-packed weights if it can have them
	Heap  Form = "heap" // a zygote that is not to write any
	Map   Form = "map"  // sealed memory
	None  Form = "cold" // nothing
	// Worker is a worker: it keeps no parameters but a device's context, and has the replicas
	// themselves.
	Worker Form = "worker"
)

// What returns what is kept under the key, as text.
func (k Key) What() string {
	if k.Form == Worker {
		return "worker"
	}
	return "zygote"
}

// Variant returns the key of the same variant in the form that is tried first and of the first
// generation.
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
	PathResident = "resident" // a thread of a worker, a process that stages of one name share
)

// NewEntry returns a name for an entry of the warden that no other has, also of an earlier daemon.
func NewEntry(kind string) string { return kind + "-" + rand.Text() }
