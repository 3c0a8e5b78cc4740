package plan

import "time"

// Snapshot is all a policy may know, frozen at one instant. Every slice is sorted by name; a policy neither changes nor
// keeps them.
type Snapshot struct {
	Rev       uint64    // grows with each Snapshot
	At        time.Time // the only clock a policy has
	Epoch     uint64    // of the owner that observes; its plans carry it
	Nodes     []Node
	Functions []Function
	Pipelines []Pipeline
	Budget    int // replicas that all functions together may have; 0: as many as the nodes hold
}

// Node is one machine with a KeysManager.
type Node struct {
	Name        string
	Memory      int64 // bytes that replicas and zygotes may use
	MemoryUsed  int64 // what is starting or loading included
	Threshold   int64 // of Memory: no zygote is loaded that would pass it; 0: Memory
	CPUMilli    int
	Devices     []Device
	Zygotes     []Zygote
	Unavailable string // why nothing new may be placed here; empty: fit
	Leaving     bool   // replicas that are here are let go, too
}

// Device is an accelerator of a node.
type Device struct {
	ID                 string
	Memory, MemoryUsed int64  // bytes; used: reserved for replicas, or in use by others
	Unavailable        string // why no replica may be there, not even one that is; empty: it is well
}

// Zygote is a parameter set held warm on a node.
type Zygote struct {
	Function string
	Digest   string
	Bytes    int64
	Idle     bool // nothing runs from it: it gives way when memory is short
}

// Function is what is known of one function: what its owner asked for, what its users demand, what runs.
type Function struct {
	Name     string // pipeline.Key
	Revision uint64 // of its spec
	Min, Max int
	Zero     bool          // may have no replica
	ZeroAge  time.Duration // after this long without a request
	GPU      int           // devices a replica needs
	Memory   int64         // bytes a replica adds; 0: unknown
	CPUMilli int           // thousandths of a core that a replica is promised; 0: nothing
	CPULimit int           // thousandths of a core that a replica may use, as declared; 0: all there are
	CPUNow   int           // what replicas may use now, if a plan changed it; 0: as declared
	// DeviceMemory is what a replica takes of each of its devices, in bytes; 0: all, and no other replica is there.
	DeviceMemory int64
	Batch        int // largest batch; at least 1
	Slots        int // batches a replica takes at a time; at least 1

	// Demand and service as measured. A function that was never asked, or never answered, says so by Known fields being
	// false: it is not zero.
	Demand  Demand
	Service Service
	Wait    Wait // what tasks went through lately; not known while none did
	Busy    Busy
	Starts  []Start // what it costs to bring up a replica, sorted by path
	Profile []Point // service times as measured by stagecoach profile, sorted by CPU, batch, length; empty: never
	Target  Target  // OpenFaaS's way to scale, if its owner asked for it

	Waiting int // tasks in its line
	Running int // tasks on replicas
	// Expected is how many requests have yet to come here from earlier stages of their pipelines.
	// It is counted only while nothing waits or runs here; otherwise it is 0.
	Expected int `json:",omitzero"`

	Replicas []Replica
	Failing  Failure
	Bars     []Bar // that hold, sorted by node, then device
}

// Demand is how requests arrive at a function, over a sliding window.
type Demand struct {
	Known bool
	Rate  float64   // per second
	CV    float64   // of the times between arrivals; 0 while too few
	Last  time.Time // the latest arrival
	// Envelope is how many arrived at most within stretches of some lengths, over the last minute; all zero: not measured.
	Envelope Envelope `json:",omitzero"`
}

// Envelope is a traffic envelope, as network calculus has them (Le Boudec and Thiran, Network Calculus, 2001, §1.2): the most
// arrivals in any stretch of time of a length, for lengths of which each is twice the one before. Short stretches tell of bursts,
// long ones of the rate.
type Envelope [10]int

// ShortestStretch is the length that an Envelope begins with.
const ShortestStretch = 125 * time.Millisecond

// Stretch is the length of time that the envelope's i-th number is of.
func (Envelope) Stretch(i int) time.Duration { return ShortestStretch << i }

// Service is how long a slot of a replica is busy with one call, over a sliding window: the call's share of its batch's time.
type Service struct {
	Known   bool
	Mean    time.Duration
	CV      float64
	Batches []Batched // by size of batch, sorted; empty: not known
}

// Batched is how long batches of so many calls took lately, on average.
type Batched struct {
	Size int
	Mean time.Duration // of a batch
	N    int           // batches that this is of
}

// Wait is how long tasks waited in a function's line before a replica took them or their deadline passed, over a sliding window. A
// task that still waits is none of them, but Oldest says how long the first has.
type Wait struct {
	Known         bool
	Mean          time.Duration
	P50, P95, P99 time.Duration
	Oldest        time.Duration // of those that wait now; 0: none does
}

// Busy is how much of the time the slots of its ready replicas were taken, over a sliding window: 0 to 1.
type Busy struct {
	Known bool
	Share float64
}

// Signals is what is measured of a function's tasks as of one instant: its fields are those of Function.
type Signals struct {
	Demand           Demand
	Service          Service
	Wait             Wait
	Busy             Busy
	Waiting, Running int
}

// Start is what it took to bring up replicas on one path, from the order to ready; lately.
type Start struct {
	Path string // as a KeysManager names it: cold, fork, parked, resident, …
	Mean time.Duration
	N    int // starts that this is of
}

// Point is a measured service time: of a batch, with so much CPU and inputs of so many units.
type Point struct {
	CPUMilli  int
	Batch     int
	Length    int           // of inputs, in what the profile's author counts; 0: as they come
	Mean, Err time.Duration // of a batch; half the width of the mean's 95 % confidence interval
	CV        float64
	N         int // batches
}

// Target is OpenFaaS's way to scale: a load a replica. It is beside the queue, not in its place: the larger count holds.
type Target struct {
	Type  string  // rps, capacity (calls at a time), cpu (thousandths of a core); empty: none is asked for
	Value float64 // a replica, the owner's proportion included
	Load  float64 // of all replicas together, now, in the same unit
	Known bool    // Load was measured
}

// Failure says that starting replicas of a function fails.
type Failure struct {
	Count int       // in a row
	Until time.Time // nothing is started before
	Cause string
}

// Bar keeps a function from a device for a while, because its replicas were out of memory there: none of them may be there.
type Bar struct {
	Node, Device string
	Count        int // in a row
	Until        time.Time
	Cause        string
}

// State is where a replica is in its life.
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
	Revision uint64 // of the spec it was started from
	Node     string
	Device   string // empty: the CPU
	State    State
	Since    time.Time // of State
}

// Pipeline is what a policy needs of a pipeline: its stages and its objective.
type Pipeline struct {
	Name   string   // pipeline.Key
	Stages []string // pipeline.Key of the functions, in topological order
	Edges  []Edge   // sorted by From, then To; From is less than To; those to stages that are not deployed are left out
	SLO    time.Duration
}

// Edge leads from a stage of a pipeline to a successor: indices into its Stages.
type Edge struct{ From, To int }

// Domain is a set of pipelines connected by shared functions: what one allocator decides at a time.
type Domain struct {
	Pipelines []string // sorted
	Functions []string // sorted
}

// Line is the decision on one function.
type Line struct {
	Function string
	Count    int
	CPUMilli int    // a replica; 0: as declared
	Batch    int    // largest
	Key      bool   // a key stage: its parameters stay warm, its replicas are spread
	Why      string // one line for the operator: which term, from what to what
	Denied   string // why it is to have no replica although it asks for one, and what to do; empty: it is not so
}

// Alloc is the decision of the levels allocate, correct and share: lines sorted by Function.
type Alloc []Line

// Slot is one wanted replica.
type Slot struct {
	Replica string // an existing replica to keep; empty: a new one
	Node    string
	Device  string // empty: the CPU; several are joined by commas
}

// Want is what a Plan wants of one function.
type Want struct {
	Function string
	Revision uint64 // of the spec that the decision was made for
	Slots    []Slot
	CPUMilli int
	Batch    int
	Key      bool
	Why      string
	Short    string // why fewer slots than allocated could be placed, or none was allocated; empty: all placed
	Denied   bool   // it is to have no replica for as long as nothing else changes: what waits for one need not
}

// Warmth is how far a function's parameters are brought up on a node before a replica asks for them.
type Warmth uint8

// The levels of warmth.
const (
	Cold   Warmth = iota
	File          // on the node's disk
	Host          // in a zygote
	Parked        // a forked child with a device context and no parameters yet
)

// Warm wants a function's parameters on a node at least this warm.
type Warm struct {
	Function string
	Node     string
	Warmth   Warmth
	Key      bool // a key stage: evicted last
}

// Plan is the wanted state of the cluster. Wants and Warm are sorted by function, then node.
type Plan struct {
	Epoch uint64
	Rev   uint64 // of the Snapshot it was made from
	At    time.Time
	Wants []Want
	Warm  []Warm
}

// Allocator decides which functions serve with which base count. M is its memory: it goes in and comes out, so that a
// refused plan leaves no trace.
type Allocator[M any] interface {
	Allocate(s Snapshot, d Domain, m M) (Alloc, M, error)
}

// Corrector changes count and CPU of the lines it is given and nothing else.
type Corrector[M any] interface {
	Correct(s Snapshot, d Domain, a Alloc, m M) (Alloc, M, error)
}

// Sharer trims the allocations of all domains to what the cluster has.
type Sharer interface {
	Share(s Snapshot, a Alloc) (Alloc, error)
}

// Placer gives every replica of an allocation a node and a device. It may report a shortage, never change the mix.
type Placer interface {
	Place(s Snapshot, a Alloc) ([]Want, error)
}

// Warmer decides what is kept warm where.
type Warmer interface {
	Warm(s Snapshot, wants []Want) ([]Warm, error)
}
