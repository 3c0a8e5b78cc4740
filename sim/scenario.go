package sim

import (
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/bench/load/arrivals"
)

// Scenario is a simulation as a user or a study writes it. docs/howto-simulate.md has all fields
// with their defaults. Zero fields mean their defaults.
type Scenario struct {
	Name     string        `yaml:"name"`
	Duration time.Duration `yaml:"duration"` // of the arrivals; 0: of the longest rate or trace
	Warmup   time.Duration `yaml:"warmup"`   // requests that arrive before its end are not counted
	Seed     uint64        `yaml:"seed"`     // first seed
	Seeds    int           `yaml:"seeds"`    // number of seeds, which are consecutive
	Tick     time.Duration `yaml:"tick"`     // time between ticks of control
	// time of a task to its line, or of a reply back; nil: 50 µs
	Hop *time.Duration `yaml:"hop"`
	// largest number of replicas of all functions together; 0: what the nodes hold
	Budget    int        `yaml:"budget"`
	Policies  []Policy   `yaml:"policies"`
	Nodes     []Node     `yaml:"nodes"`
	Pipelines []Pipeline `yaml:"pipelines"`
	Stages    []Stage    `yaml:"stages"`
}

// Policy is a named set of policies, one per level, to compare with others.
type Policy struct {
	Name         string `yaml:"name"`
	policy.Names `yaml:",inline"`
	// Replicas are fixed numbers of replicas, in place of an allocator; other stages have their
	// minimum. Nothing corrects them, unless a corrector is named.
	Replicas []Replicas `yaml:"replicas"`

	// Make, if not nil, makes the policies of each run, and Names is not used. Studies need it for
	// policies without a name, and for policies that depend on the run. It is called before a run
	// begins. Several goroutines may call it at the same time.
	Make func(Run) (policy.Set, error) `yaml:"-"`
}

// Replicas is the number of replicas of a stage's own function, or of a variant.
type Replicas struct {
	Stage string `yaml:"stage"`
	Count int    `yaml:"count"`
}

// Run is what a policy may know about its run before it begins.
type Run struct {
	Seed uint64
	// Arrivals returns the times at which all requests of a pipeline will arrive, ascending, since the
	// start of the run. Only an oracle may use it.
	Arrivals func(pipeline string) ([]time.Duration, error)
}

// Node is a machine, or Count equal ones.
type Node struct {
	Name      string `yaml:"name"`
	Count     int    `yaml:"count"`
	Memory    Bytes  `yaml:"memory"`
	CPU       Milli  `yaml:"cpu"`
	GPUs      int    `yaml:"gpus"`
	GPUMemory Bytes  `yaml:"gpuMemory"`
}

// Pipeline is a pipeline and its load.
type Pipeline struct {
	Name     string        `yaml:"name"`
	SLO      time.Duration `yaml:"slo"`
	Timeout  time.Duration `yaml:"timeout"` // of a request
	Items    int           `yaml:"items"`   // items per request
	Arrivals Arrivals      `yaml:"arrivals"`
	Length   Length        `yaml:"length"` // of each item; zero: unknown
	Weight   int           `yaml:"weight"` // of its fair share; 0: 1
	// Policies of its domain, as annotations of its entry stage choose them; empty: the scenario's.
	Allocator string `yaml:"allocator"`
	Rank      string `yaml:"rank"`
	Route     string `yaml:"route"`
}

// Arrivals say when requests arrive. One of Rate, MMPP, Trace and Make is set.
type Arrivals struct {
	Rate  string   `yaml:"rate"` // see arrivals.ParseProfile
	CV    *float64 `yaml:"cv"`   // of the gaps at a constant rate; nil: 1, a Poisson process
	MMPP  string   `yaml:"mmpp"` // see arrivals.ParseStates
	Trace Trace    `yaml:"trace"`

	// Make, if not nil, makes the source of a run's requests from the run's seed. Studies set it.
	// Several goroutines may call it at the same time.
	Make func(seed uint64) (arrivals.Source, error) `yaml:"-"`
}

// Trace selects the part of a recorded load to play, and how to play it.
type Trace struct {
	File   string          `yaml:"file"`
	Format arrivals.Format `yaml:"format"`
	Column string          `yaml:"column"`
	From   time.Duration   `yaml:"from"`
	To     time.Duration   `yaml:"to"`
	Speed  float64         `yaml:"speed"`
	Scale  float64         `yaml:"scale"`
	Spread arrivals.Spread `yaml:"spread"`
	Loop   bool            `yaml:"loop"`
}

// Length says how long the items of a pipeline's requests are, in the unit of MaxLength. One of
// Constant, Mean, List and File is set, or none.
type Length struct {
	Constant int `yaml:"constant"`
	// of a lognormal distribution, rounded to whole numbers of at least 1
	Mean float64  `yaml:"mean"`
	CV   *float64 `yaml:"cv"`   // of that distribution; nil: 1
	Max  int      `yaml:"max"`  // larger draws count as this; 0: no bound
	List []int    `yaml:"list"` // each of them is drawn equally often
	// A file with one length per line, or CSV with a line of names, of which Column is one. The
	// requests get its lengths in turn, again from the beginning after the last one.
	File   string `yaml:"file"`
	Column string `yaml:"column"`
}

// Stage is a function of one or more pipelines.
type Stage struct {
	Variant   `yaml:",inline"` // the stage's own function
	Pipelines []string         `yaml:"pipelines"` // empty: all pipelines
	Next      []string         `yaml:"next"`
	Each      bool             `yaml:"each"`     // one call per item
	Join      int              `yaml:"join"`     // number of predecessors that it waits for; 0: all
	Variants  []Variant        `yaml:"variants"` // other functions that can serve the stage

	variantOf string // name of the stage that this function can serve too; empty: it is no variant
}

// Variant is a function that can serve a stage. A stage's variants inherit nothing from the stage's
// own function.
type Variant struct {
	Name       string `yaml:"name"`
	Answers    `yaml:",inline"`
	Service    Service `yaml:"service"`
	Start      Start   `yaml:"start"`
	Batching   `yaml:",inline"`
	Slots      int           `yaml:"slots"` // concurrent batches per replica
	QueueLimit int           `yaml:"queueLimit"`
	Min        int           `yaml:"min"`
	Max        int           `yaml:"max"`
	Zero       bool          `yaml:"zero"` // may scale to zero
	ZeroAge    time.Duration `yaml:"zeroAge"`
	CPU        Milli         `yaml:"cpu"` // CPU request per replica
	// CPU limit per replica; 0: the one with which its profile or Service.Mean was measured
	CPULimit Milli `yaml:"cpuLimit"`
	Memory   Bytes `yaml:"memory"` // memory per replica
	// memory of its zygote; 0: no zygote, and no parameters to load
	Parameters Bytes         `yaml:"parameters"`
	GPU        int           `yaml:"gpu"`       // devices per replica
	GPUMemory  Bytes         `yaml:"gpuMemory"` // device memory per device; 0: all of it
	DiesEvery  time.Duration `yaml:"diesEvery"` // mean life of a replica, exponential; 0: unlimited
	Accuracy   float64       `yaml:"accuracy"`  // of its answers, above 0 and at most 1; 0: 1
	MaxLength  int           `yaml:"maxLength"` // of its inputs; 0: any
}

// Answers says how many items the answers have. One of both is given.
type Answers struct {
	Items   int    `yaml:"items"`   // of each answer
	Outputs Length `yaml:"outputs"` // random numbers of items; a list may have zeros
}

// Batching says how calls form batches.
type Batching struct {
	Batch     int           `yaml:"batch"`     // largest batch
	AutoBatch bool          `yaml:"autoBatch"` // the batch is chosen from the profile, up to Batch
	BatchWait time.Duration `yaml:"batchWait"` // how long a call may wait for its batch to fill
}

// Service is how long a batch keeps its slot.
//
// Per batch, one random time is drawn. Its mean is Mean, plus PerLength times the length of the
// longest input. It is multiplied by two factors:
//
//   - 1 + BatchCost·(b − 1), where b is the number of calls in the batch
//   - (1 − CPUShare) + CPUShare·q₀/q, where q is the replica's CPU quota, and q₀ the quota with
//     which Mean was measured
//
// With a Profile, the mean comes from its points instead of Mean and the factors. It is linear in b
// and in 1/q, between the points and beyond them. BatchCost is used only for a quota with a single
// point. PerLength is added to it.
type Service struct {
	Dist Dist          `yaml:"dist"`
	Mean time.Duration `yaml:"mean"`
	CV   *float64      `yaml:"cv"` // of gamma and lognormal; nil: 1
	// what each further call adds, as a part of the first; nil: 1, so batches save nothing
	BatchCost *float64 `yaml:"batchCost"`
	CPUShare  float64  `yaml:"cpuShare"` // the part of the time that depends on the CPU quota
	// what each unit of the length of the batch's longest input adds to the mean; 0: nothing
	PerLength time.Duration `yaml:"perLength"`
	Profile   []Point       `yaml:"profile"` // measured times; policies see them, too
	// ProfileFile names a file that replaces Profile: the output of `stagecoach profile FUNCTION
	// --show --json`. Only points for inputs of Length are used.
	ProfileFile string `yaml:"profileFile"`
	Length      int    `yaml:"length"`
}

// Dist is a distribution of service times.
type Dist string

// The distributions.
const (
	Deterministic Dist = "deterministic"
	Exponential   Dist = "exponential"
	Gamma         Dist = "gamma"
	Lognormal     Dist = "lognormal"
)

// Point is the measured service time of a batch.
type Point struct {
	CPU   Milli         `yaml:"cpu"`
	Batch int           `yaml:"batch"`
	Mean  time.Duration `yaml:"mean"`
	CV    float64       `yaml:"cv"`
}

// Start is how long a replica takes from its order until it is ready, by start path. A cold start
// loads the parameters into a zygote on the node. Later replicas fork from the zygote, until it is
// evicted.
type Start struct {
	Cold time.Duration `yaml:"cold"`
	Fork time.Duration `yaml:"fork"` // 0: as Cold, and no replica forks
	// start in a child that waits on the device; 0: no child waits
	Parked time.Duration `yaml:"parked"`
}
