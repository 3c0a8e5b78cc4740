package pipeline

import (
	"slices"
	"time"
)

// Prefix starts every annotation that this package reads.
const Prefix = "stagecoach.dev/"

// Function is one function's declaration as a stage, parsed and with defaults filled in.
type Function struct {
	Name      string // without namespace
	Namespace string

	Pipelines  []string // the pipelines it belongs to; empty: a function of its own
	Next       []Edge   // successors
	Each       bool     // one call an item of the input, results joined in order
	Items      string   // what a JSON array in a request is: ItemsMany or ItemsOne; empty: see [Function.Alone]
	Join       int      // predecessors to wait for; 0: all
	SLO        time.Duration
	GPU        int    // devices a replica needs
	GPUMemory  int64  // bytes it takes of each; 0: all, and nobody else has the device
	Start      string // how its replicas get their model: auto, fork, heap, map, cold; empty: auto
	Process    string // stages with the same name share a worker process; empty: its own
	Network    string // what its replicas reach: NetworkDefault, NetworkHost or NetworkNone
	QueueLimit int    // requests that may wait
	Weight     int    // fair share among the pipelines that share it
	Idempotent bool   // may run twice
	Batch      int    // largest batch; 0: from the profile
	VariantOf  string // the stage that this function can serve too
	Accuracy   float64
	MaxLength  int // tokens

	Scale Scale
	Async Async
}

// What the replicas of a function can reach, as the annotation network says.
const (
	NetworkDefault = "default" // a network of their own, with a way out
	NetworkHost    = "host"    // the machine's network
	NetworkNone    = "none"    // a network of their own, with loopback alone
)

// Values of the annotation items of a function or of a pipeline's entry: what a JSON array in a
// request is.
const (
	ItemsMany = "many" // a list of items
	ItemsOne  = "one"  // one document
)

// Alone returns a pipeline that has the function's name and the function as its only stage. A JSON
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

// StageOf reports whether the function is a stage of the pipeline of this name, in its namespace. Variants are no stages.
func (f Function) StageOf(pipeline string) bool {
	return f.VariantOf == "" && slices.Contains(f.Pipelines, pipeline)
}

// Edge leads to a successor.
type Edge struct {
	To string // a function of the same namespace
	If string // a condition over the output, opaque here; empty: always
}

// Scale is what the labels com.openfaas.scale.* say.
type Scale struct {
	Min, Max int
	Zero     bool          // may scale to zero
	ZeroAge  time.Duration // idle time after which it does

	Type       string  // of load: rps, capacity, cpu; empty: the owner asked for no target
	Target     int     // that a replica should have of it: requests a second, requests at a time, thousandths of a core
	Proportion float64 // of Target that is aimed at, above 0 and at most 1
}

// Pipeline is a graph of stages, invoked under its own name.
type Pipeline struct {
	Name      string
	Namespace string
	Entry     string  // name of the first stage; empty while there is none
	Stages    []Stage // in topological order, ties by name; by name alone while the graph is faulty
	SLO       time.Duration
	Faults    []Fault // empty: it can be invoked
}

// Stage is a function's place in one pipeline.
type Stage struct {
	Function
	Next []Edge   // those of the function's edges that stay within the pipeline
	Prev []string // predecessors, sorted
}

// Fault is something wrong with a pipeline's graph, said so that its author can mend it.
type Fault struct {
	Function   string // whose declaration is at fault; empty: the pipeline as a whole
	Annotation string // with prefix
	Got, Want  string
	Missing    string // name of the function whose deploy would remove the fault; empty: none
}
