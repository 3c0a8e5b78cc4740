package pipeline

import (
	"slices"
	"time"
)

// Prefix begins the name of every annotation of Stagecoach.
const Prefix = "stagecoach.dev/"

// Function is one function's parsed declaration as a stage, with defaults filled in.
type Function struct {
	Name      string // without the namespace
	Namespace string

	Pipelines []string // pipelines that it belongs to; empty: none
	Next      []Edge   // successors
	Each      bool     // one call per item of the input, with results joined in order
	// Meaning of a JSON array in a request: ItemsMany or ItemsOne; empty: see [Function.Alone].
	Items     string
	Join      int // number of predecessors to wait for; 0: all
	SLO       time.Duration
	GPU       int    // devices per replica
	GPUMemory int64  // bytes that it takes of each device; 0: all of it, exclusively
	Start     string // how replicas get their model: auto, fork, heap, map or cold; empty: auto
	Process   string // stages with the same name share a worker process; empty: its own
	Isolation
	QueueLimit int  // largest number of waiting requests
	Weight     int  // weight of its fair share among functions that compete
	Idempotent bool // a call may run twice
	Batching
	Variant
	Length   string // how the length of tasks is measured, see ParseLength; empty: it is not
	Policies        // of an entry stage: what its domain asks for

	Scale Scale
	Async Async
}

// Batching says how many calls of a function may run together.
type Batching struct {
	Batch     int  // largest batch; 0: not declared
	AutoBatch bool // the batch is chosen from the profile, up to Batch
	// BatchWait is how long a call may wait for its batch to fill; 0: not at all.
	BatchWait time.Duration
}

// MostBatchWait is the largest BatchWait.
const MostBatchWait = time.Second

// AutoBatch is the largest batch that is chosen from a profile if the function names no number.
const AutoBatch = 256

// MostBatch returns the largest batch that the function may ever get.
func (b Batching) MostBatch() int {
	if b.AutoBatch && b.Batch == 0 {
		return AutoBatch
	}
	return max(b.Batch, 1)
}

// Variant says how a function serves a stage beside the stage's other functions.
type Variant struct {
	VariantOf string  // the stage that the function can serve too; empty: it is no variant
	Accuracy  float64 // of its answers, above 0 and at most 1
	MaxLength int     // the longest input that it takes, in the unit of Length; 0: any
	// MinAccuracy is the least mean accuracy of the pipeline's answers; 0: any. An entry stage has it.
	MinAccuracy float64
	// Retained means that the function was removed while it had variants. Its declaration stays, so
	// that they go on serving its stage. No deployment says so.
	Retained bool
}

// Policies are what an entry stage asks for on behalf of its domain. An empty name means the flags
// of `stagecoach up`, or the default.
type Policies struct {
	Allocator string // decides counts and shares
	Rank      string // order of lines: RankFIFO, RankFair or RankLeastSlack
	Route     string // computes routing tables where the allocator does not
}

// Orders of waiting lines: the values of the annotation rank.
const (
	RankFIFO       = "fifo"        // first come, first served
	RankFair       = "fair"        // applications share replicas by weight
	RankLeastSlack = "least-slack" // the task with the least time to spare first
)

// Isolation is what replicas have of their machine.
type Isolation struct {
	Network          string   // what they can reach: NetworkDefault, NetworkHost or NetworkNone
	RuntimeClass     string   // of their containers, by the operator's name; empty: the default
	DropCapabilities []string // that their program gives up, such as CAP_CHOWN, or ALL; sorted
	CDIDevices       []string // that their containers get, by CDI's names; sorted
	Spares           int      // containers of each node that wait for its next starts
}

// MaxSpares bounds the spare containers of a function on each node.
const MaxSpares = 16

// What the replicas of a function can reach: the values of the annotation network.
const (
	NetworkDefault = "default" // a separate network with a way out
	NetworkHost    = "host"    // the machine's network
	NetworkNone    = "none"    // a separate network with loopback only
)

// Values of the annotation "items" of a function or of a pipeline's entry. The annotation says what
// a JSON array in a request means.
const (
	ItemsMany = "many" // a list of items
	ItemsOne  = "one"  // one document
)

// Alone returns a pipeline with the function's name and the function as its only stage. A JSON
// array is one document for this pipeline, unless the function declares items or has one call per
// item.
func (f Function) Alone() Pipeline {
	f.Join = 0
	if f.Items == "" && !f.Each {
		f.Items = ItemsOne
	}
	return Pipeline{Name: f.Name, Namespace: f.Namespace, Entry: f.Name, SLO: f.SLO, Stages: []Stage{{Function: f}}}
}

// TakesItems reports whether a JSON array that invokes the pipeline is a list of items. The
// pipeline must have no faults, so that its first stage is its entry.
func (p *Pipeline) TakesItems() bool {
	return len(p.Stages) == 0 || p.Stages[0].Items != ItemsOne
}

// StageOf reports whether the function is a stage of the named pipeline in its namespace. Variants
// are not stages.
func (f Function) StageOf(pipeline string) bool {
	return f.VariantOf == "" && slices.Contains(f.Pipelines, pipeline)
}

// Stage returns the key of the stage that a variant serves; zero: f is no variant.
func (f Function) Stage() Key {
	if f.VariantOf == "" {
		return Key{}
	}
	return Key{f.VariantOf, f.Namespace}
}

// Edge leads to a successor.
type Edge struct {
	To string // a function of the same namespace
	If string // a condition over the output, opaque here; empty: always
}

// Scale holds the labels com.openfaas.scale.*.
type Scale struct {
	Min, Max int
	Zero     bool          // may scale to zero
	ZeroAge  time.Duration // idle time before it scales to zero

	Type string // kind of load: rps, capacity or cpu; empty: no target declared
	// load per replica: requests per second, concurrent requests, or thousandths of a core.
	Target     int
	Proportion float64 // share of Target to aim at, above 0 and at most 1
}

// Pipeline is a graph of stages, invoked under its own name.
type Pipeline struct {
	Name      string
	Namespace string
	Entry     string // name of the first stage; empty: not known yet
	// In topological order, ties by name; sorted by name while the graph is faulty.
	Stages   []Stage
	SLO      time.Duration
	Faults   []Fault // empty: the pipeline can be invoked
	Warnings []Fault // of variants that serve none of its stages but are meant to
}

// Stage is a function's place in one pipeline.
type Stage struct {
	Function
	Next     []Edge     // the function's edges within the pipeline
	Prev     []string   // predecessors, sorted
	Variants []Function // functions that can serve the stage too, sorted by name
}

// Fault describes a fault in a pipeline's graph so that its author can fix it.
type Fault struct {
	Function   string // function whose declaration is at fault; empty: the pipeline as a whole
	Annotation string // with the prefix
	Got, Want  string
	Missing    string // name of the function whose deploy would remove the fault; empty: none
}
