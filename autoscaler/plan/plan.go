package plan

import "time"

// Snapshot is all that a policy may know, at one instant. Every slice is sorted by name. Policies
// must neither change nor keep them.
type Snapshot struct {
	Rev       uint64    // grows with each Snapshot
	At        time.Time // the only clock of a policy
	Epoch     uint64    // of the observing owner; its plans carry it
	Nodes     []Node
	Functions []Function
	Pipelines []Pipeline
	// Largest number of replicas of all functions together; 0: bounded by the nodes only.
	Budget int
}

// Node is one machine with a KeysManager.
type Node struct {
	Name        string
	Memory      int64 // bytes that replicas and zygotes may use
	MemoryUsed  int64 // includes what is starting or loading
	Threshold   int64 // part of Memory up to which zygotes are loaded; 0: Memory
	CPUMilli    int
	Devices     []Device
	Zygotes     []Zygote
	Unavailable string // why nothing new may be placed here; empty: it may
	Leaving     bool   // its replicas are drained too
	// An operator drains the node, and Unavailable says so. Each of its replicas stays until another
	// one is ready elsewhere. A replica for which no other node has room is kept. If the node is also
	// Leaving, its replicas stay for a short time, and only if another node has room for them.
	Moving bool `json:",omitzero"`
}

// Device is an accelerator of a node.
type Device struct {
	ID                 string
	Memory, MemoryUsed int64 // in bytes; used: reserved for replicas, or in use by others
	// Why no replica may be on it, not even an existing one; empty: it is healthy.
	Unavailable string
}

// Zygote is a loaded parameter set on a node.
type Zygote struct {
	Function string
	Digest   string
	Bytes    int64
	Idle     bool // no replica runs from it, so it is evicted when memory is short
}

// Function is what is known about one function: its declaration, its demand and its replicas.
type Function struct {
	Name     string // pipeline.Key
	Revision uint64 // of the spec
	Variant
	Min, Max int
	Zero     bool          // may scale to zero
	ZeroAge  time.Duration // idle time before it scales to zero
	GPU      int           // devices per replica
	Memory   int64         // bytes per additional replica; 0: unknown
	CPUMilli int           // CPU request per replica in thousandths of a core; 0: none
	CPULimit int           // CPU limit per replica in thousandths of a core, as declared; 0: none
	CPUNow   int           // current CPU limit, if a plan has changed it; 0: as declared
	// DeviceMemory is what a replica takes of each of its devices, in bytes; 0: all of it,
	// exclusively.
	DeviceMemory int64
	Batch        int // largest batch; at least 1
	Slots        int // concurrent batches per replica; at least 1

	// Measured demand and service. If a function was never invoked, or never answered, the Known
	// fields are false, and the values do not mean zero.
	Demand  Demand
	Service Service
	Wait    Wait // how long tasks waited recently; unknown if none did
	Busy    Busy
	Starts  []Start // measured start times of replicas, sorted by path
	// Service times measured by stagecoach profile, sorted by CPU, batch and length; empty: not
	// measured.
	Profile []Point
	Target  Target // OpenFaaS's scaling target, if its owner declared one
	Passing
	Waiting  int // tasks in the line
	Running  int // tasks on replicas
	Replicas []Replica
	Trouble
}

// Variant says how a function serves a stage beside the stage's other functions, and by which
// policies.
type Variant struct {
	// VariantOf is the stage, as pipeline.Key in text, that the function can serve too; empty: it
	// is no variant.
	VariantOf string  `json:",omitzero"`
	Accuracy  float64 `json:",omitzero"` // of its answers, above 0 and at most 1; 0: not declared
	MaxLength int     `json:",omitzero"` // the longest input that it takes; 0: any
	// AutoBatch is the largest batch that may be chosen from the profile; 0: the function declares
	// its Batch. See [Snapshot.AutoBatch].
	AutoBatch int `json:",omitzero"`
	// BatchWait is how long a task may wait for its batch to fill; 0: not at all.
	BatchWait time.Duration `json:",omitzero"`
	// Objective is the SLO of a function outside all pipelines that has an AutoBatch.
	Objective time.Duration `json:",omitzero"`
	// Chosen are the policies that the function asks for on its own behalf. Only a function outside
	// all pipelines has them; a pipeline's entry stage speaks through [Pipeline.Chosen].
	Chosen Chosen `json:",omitzero"`
}

// Passing is what comes to a stage, and what goes on from it.
type Passing struct {
	// Stage is the demand of a stage with variants, whatever the lane; unknown for other functions.
	// The function's Demand has the tasks that its own lane got.
	Stage Demand `json:",omitzero"`
	// Lengths has the shares of a stage's tasks by the length of their inputs, in the order of
	// MaxLength, with 0 last. They sum to 1. Empty: unknown, or the stage has no variants that
	// differ in MaxLength.
	Lengths []LengthShare `json:",omitempty"`
	Items   Items         `json:",omitzero"` // what its calls return
	// Learned is what its calls have taken over hours, whichever applications called it.
	Learned Learned `json:",omitzero"`
	// Expected is how many requests in earlier stages of pipelines will still come here. It is
	// counted only while no task waits or runs here; otherwise it is 0.
	Expected int `json:",omitzero"`
}

// Trouble is what keeps a function's replicas from starting, and what ends them.
type Trouble struct {
	Failing Failure
	Bars    []Bar // current bars, sorted by node, then device
	// Parameters is how many bytes of a node's memory the function's parameters take, as a node last
	// said; 0: no node did. No replica starts where they do not fit.
	Parameters int64 `json:",omitzero"`
	// Survived is the largest batch, because replicas have ended under larger ones. The function's
	// Batch and AutoBatch are at most that. 0: no replica has.
	Survived int `json:",omitzero"`
}

// Demand is how requests arrive at a function, over a sliding window.
type Demand struct {
	Known bool
	Rate  float64   // per second
	CV    float64   // of the times between arrivals; 0: too few arrivals
	Last  time.Time // the latest arrival
	// Ahead is the rate to expect soon. It is nearer to the mean of minutes than Rate is if the rate
	// has changed often; 0: not measured.
	Ahead float64 `json:",omitzero"`
	// Since is the time of the latest change of the rate, or of the first arrival.
	Since time.Time `json:",omitzero"`
	// Envelope is the largest number of arrivals within stretches of several lengths, over the last
	// minute; all zero: not measured.
	Envelope Envelope `json:",omitzero"`
}

// Envelope is a traffic envelope as in network calculus (Le Boudec and Thiran, Network Calculus,
// 2001, §1.2). It holds the largest number of arrivals in any stretch of time of a given length.
// Each length is twice the previous one. Short stretches show bursts, long ones the rate.
type Envelope [10]int

// ShortestStretch is the first length of an Envelope.
const ShortestStretch = 125 * time.Millisecond

// Stretch returns the length that belongs to the envelope's i-th number.
func (Envelope) Stretch(i int) time.Duration { return ShortestStretch << i }

// Service is how long a replica's slot is busy per call, over a sliding window. A call's time is
// its share of its batch's time.
type Service struct {
	Known   bool
	Mean    time.Duration
	CV      float64
	Batches []Batched // by batch size, sorted; empty: unknown
	Served  Tally     `json:",omitzero"` // tasks, and the times of their batches
}

// Tally counts tasks since a process began to measure, and adds up their times. The difference of
// two tallies has the exact mean between them. A smaller N than before means that it began again.
type Tally struct {
	N       uint64
	Seconds float64
}

// Batched is the recent mean time of batches of one size.
type Batched struct {
	Size int
	Mean time.Duration // per batch
	N    int           // number of batches measured
}

// Items is the number of items that a call of a function returns, over a sliding window. A next
// stage with one call per item receives that many calls per call.
type Items struct {
	Known bool
	Mean  float64 // per call
}

// LengthShare is the share of a stage's tasks whose inputs are longer than the class before allows,
// and at most MaxLength long. MaxLength 0 has all other tasks, and those of unknown length.
type LengthShare struct {
	MaxLength int
	Share     float64
}

// Learned is what package demand has learned about a function's calls. The weight of a call halves
// per hour. Unlike Service, it survives restarts and has quantiles.
type Learned struct {
	Known bool
	Calls float64 // number of calls, each weighted by its age
	Mean  time.Duration
	CV    float64
	// Mean, CV and quantiles are of the time on a replica per item. The relative error of a quantile
	// is at most sketch.Error.
	P50, P95, P99 time.Duration
	Factor        float64 // items returned per item received
	// Age is the time since the latest of these calls.
	Age time.Duration `json:",omitzero"`
}

// Wait is how long tasks waited in a function's line before a replica took them or their deadline
// passed, over a sliding window. Tasks that still wait are not included, except in Oldest.
type Wait struct {
	Known         bool
	Mean          time.Duration
	P50, P95, P99 time.Duration
	Oldest        time.Duration // of the waiting tasks; 0: none waits
	Left          Tally         `json:",omitzero"` // tasks that have left the line, and their waits
}

// Busy is the share of time, 0 to 1, that the slots of ready replicas were taken, over a sliding
// window.
type Busy struct {
	Known bool
	Share float64
}

// Signals are the measurements of a function's tasks at one instant. Its fields are those of
// Function.
type Signals struct {
	Demand           Demand
	Stage            Demand // of a stage with variants
	Lengths          []LengthShare
	Items            Items
	Service          Service
	Wait             Wait
	Busy             Busy
	Waiting, Running int
	Survived         int
}

// Start is the recent time from the order of a replica until it is ready, for one start path.
type Start struct {
	Path string // a KeysManager's name for the path: cold, fork, parked, resident, …
	Mean time.Duration
	N    int // number of starts measured
}

// Point is the measured service time of a batch, for one CPU limit and input length.
type Point struct {
	CPUMilli int
	Batch    int
	Length   int // of the inputs, in the profile's own unit; 0: unchanged inputs
	// per batch; Err is half the width of the mean's 95 % confidence interval.
	Mean, Err time.Duration
	CV        float64
	N         int // number of batches
}

// Target is OpenFaaS's scaling target: a load per replica. It works in addition to the queue; the
// larger count wins.
type Target struct {
	Type  string  // rps, capacity (concurrent calls) or cpu (thousandths of a core); empty: none
	Value float64 // per replica, multiplied by the owner's proportion
	Load  float64 // current load of all replicas together, in the same unit
	Known bool    // Load was measured
}

// Failure says that replicas of a function fail to start.
type Failure struct {
	Count int       // consecutive failures
	Until time.Time // nothing is started before this time
	Cause string
}

// Bar keeps a function off a device for a while, because its replicas were out of memory there.
type Bar struct {
	Node, Device string
	Count        int // consecutive failures
	Until        time.Time
	Cause        string
}

// State is a phase in a replica's life.
type State uint8

// The states of a replica.
const (
	Starting State = iota
	Ready
	Draining
)

// Replica is one running copy of a function.
type Replica struct {
	Name     string
	Revision uint64 // of the spec that it was started from
	Node     string
	Device   string // empty: CPU only
	State    State
	Since    time.Time // start of State
}

// Pipeline is the part of a pipeline that a policy needs: its stages and its objective.
type Pipeline struct {
	Name   string   // pipeline.Key
	Stages []string // pipeline.Key of the functions as text, in topological order
	// Sorted by From, then To, with From < To. Edges to stages that are not deployed are left out.
	Edges []Edge
	SLO   time.Duration
	// Chosen are the policies that its entry stage asks for.
	Chosen Chosen `json:",omitzero"`
	// MinAccuracy is the least mean accuracy of its answers; 0: any. An allocator of variants would
	// rather drop requests.
	MinAccuracy float64 `json:",omitzero"`
	// Accuracies has the accuracy of each chain of functions, if that of some chain was measured;
	// else it is empty, and the accuracies of functions count.
	Accuracies []ChainAccuracy `json:",omitempty"`
}

// ChainAccuracy is the accuracy of a pipeline's answers if these functions serve its stages.
type ChainAccuracy struct {
	Functions []string // pipeline.Key as text, parallel to Pipeline.Stages
	Accuracy  float64  // above 0, at most 1
	Measured  bool     // false: it is the scaled product of its functions' accuracies
}

// Edge leads from a stage to a successor. Both are indices into Stages.
type Edge struct {
	From, To int
	Each     bool `json:",omitzero"` // To has one call per item that From returns
}

// Chosen names the policies of a domain, as the annotations of an entry stage do. An empty name
// means the default.
type Chosen struct {
	Allocator string `json:",omitzero"`
	Rank      string `json:",omitzero"` // fifo, fair or least-slack
	Route     string `json:",omitzero"`
}

// Domain is a set of pipelines that are connected by shared functions. An allocator decides one
// domain at a time.
type Domain struct {
	Pipelines []string // sorted
	Functions []string // sorted
}

// Line is the decision for one function.
type Line struct {
	Function string
	Count    int
	// Fixed means that the domain's allocator owns the mix of variants: it has kept to a [Budget],
	// and no later level may change Count.
	Fixed bool
	// Worth is the part of Count that is worth its price of latency: no corrector takes replicas below
	// it. 0: latency has no price.
	Worth    int
	CPUMilli int // per replica; 0: as declared
	Batch    int // largest batch
	// A key stage: its parameters stay warm, and its replicas are spread over nodes.
	Key bool
	Why string // one line for the operator: which term changed what
	// Why the function gets no replica although it needs one, and what to do; empty: not denied.
	Denied string
}

// Alloc is the decision of the levels allocate, correct and share, sorted by Function.
type Alloc []Line

// Slot is one wanted replica.
type Slot struct {
	Replica string // an existing replica to keep; empty: a new one
	Node    string
	Device  string // empty: CPU only; several devices are joined by commas
}

// Want is a Plan's decision for one function.
type Want struct {
	Function string
	Revision uint64 // of the spec that the decision is for
	Slots    []Slot
	CPUMilli int
	Batch    int
	Key      bool
	Rank     string `json:",omitempty"` // order of its line: fifo, fair or least-slack; empty: fifo
	Why      string
	// Why fewer slots could be placed than allocated, or why none was allocated; empty: all placed.
	// Slots whose replica stays on a node that is Moving do not count as placed.
	Short string
	// The function gets no replica unless something else changes, so its tasks need not wait.
	Denied bool
}

// Warmth is how far a function's parameters are loaded on a node before a replica needs them.
type Warmth uint8

// The levels of warmth.
const (
	Cold   Warmth = iota
	File          // on the node's disk
	Host          // in a zygote
	Parked        // a forked child with a device context, without parameters
)

// Warm asks for a function's parameters on a node, at least at this warmth.
type Warm struct {
	Function string
	Node     string
	Warmth   Warmth
	Key      bool // a key stage: evicted last
}

// Plan is the wanted state of the cluster. Wants and Warm are sorted by function, then node.
type Plan struct {
	Epoch uint64
	Rev   uint64 // of the Snapshot that it was made from
	At    time.Time
	Wants []Want
	Warm  []Warm
	// Tables of the stages with several lanes, sorted by Stage.
	Tables []Table `json:",omitempty"`
	// Excluded are the chains of lanes that Tables do not have, because the allocator has excluded
	// them.
	Excluded []Chain `json:",omitempty"`
	// Ruled are the domains whose entry stages ask for policies, sorted by Domain.
	Ruled []Ruled `json:",omitempty"`
}

// Ruled is a domain whose entry stages ask for policies, and the policies that decide about it.
type Ruled struct {
	Domain    string     // its first function
	Chosen    Chosen     // the policies in force; no name is empty
	Conflicts []Conflict `json:",omitempty"`
}

// Conflict means that entry stages of a domain ask for different policies of one level, or for one
// that does not exist.
type Conflict struct {
	Level string   // allocator, rank or route
	Asked []string // the names, sorted
	Kept  string   // the policy in force, which the domain had before
}

// Allocator decides the base replica count of each function in a domain. M is its memory, which is
// passed in and returned, so that a refused plan has no effect.
type Allocator[M any] interface {
	Allocate(s Snapshot, d Domain, m M) (Alloc, M, error)
}

// Mixer is an allocator that owns the mix of variants. It decides the counts and the routing tables
// of a domain together, within a budget that it gets before. No later level changes its counts.
// What the placer finds no room for is in the next decision's budget: see [Budget.Most].
type Mixer[M any] interface {
	Mix(s Snapshot, d Domain, b Budget, m M) (Mix, M, error)
}

// Mix is a Mixer's decision.
type Mix struct {
	Alloc    Alloc   // one line per function of the domain, sorted
	Tables   []Table // one per stage of the domain with several lanes, sorted; versions do not matter
	Excluded []Chain // chains of lanes that Tables do not route along
}

// Router computes the routing tables of a domain whose allocator does not own the mix. wants are
// those of the whole plan, sorted. The result has one table per stage of the domain with several
// lanes, sorted; versions do not matter.
type Router interface {
	Route(s Snapshot, d Domain, wants []Want) ([]Table, error)
}

// Corrector changes the counts and CPU limits of the given lines, and nothing else.
type Corrector[M any] interface {
	Correct(s Snapshot, d Domain, a Alloc, m M) (Alloc, M, error)
}

// Sharer reduces the allocations of all domains to what the cluster has. It leaves fixed lines as
// they are.
type Sharer interface {
	Share(s Snapshot, a Alloc) (Alloc, error)
}

// Budgeter is a sharer that also gives budgets to the domains of Mixers. Budgets has one budget per
// domain of all, which are all domains of s.
type Budgeter interface {
	Budgets(s Snapshot, all []Domain) ([]Budget, error)
}

// Placer assigns a node and devices to every replica of an allocation. It may report a shortage,
// but never changes the allocation.
type Placer interface {
	Place(s Snapshot, a Alloc) ([]Want, error)
}

// Warmer decides which parameters are kept warm on which nodes.
type Warmer interface {
	Warm(s Snapshot, wants []Want) ([]Warm, error)
}
