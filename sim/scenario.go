package sim

import (
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/bench/load/arrivals"
)

// Scenario is a simulation as users write it, or as a study fills it in. docs/howto-simulate.md has all fields with their defaults,
// which stand for what is zero.
type Scenario struct {
	Name      string         `yaml:"name"`
	Duration  time.Duration  `yaml:"duration"` // of the arrivals; 0: the longest of the rates' segments and traces
	Warmup    time.Duration  `yaml:"warmup"`   // requests that arrive before it are not counted
	Seed      uint64         `yaml:"seed"`     // the first one
	Seeds     int            `yaml:"seeds"`    // how many, one after another
	Tick      time.Duration  `yaml:"tick"`     // of control
	Hop       *time.Duration `yaml:"hop"`      // of a task to its line, and of a reply back; nil: 50 µs
	Budget    int            `yaml:"budget"`   // replicas that all functions together may have; 0: as many as the nodes hold
	Policies  []Policy       `yaml:"policies"`
	Nodes     []Node         `yaml:"nodes"`
	Pipelines []Pipeline     `yaml:"pipelines"`
	Stages    []Stage        `yaml:"stages"`
}

// Policy is what is compared: a policy of each level, under a name.
type Policy struct {
	Name         string `yaml:"name"`
	policy.Names `yaml:",inline"`

	// Make, if it is not nil, makes the policies of each run in place of Names: those of studies, that have no name, or that must know
	// the run. It is called before the run begins, by several goroutines at a time.
	Make func(Run) (policy.Set, error) `yaml:"-"`
}

// Run is what a policy may know of its run before it begins.
type Run struct {
	Seed uint64
	// Arrivals returns when all requests of a pipeline will come, ascending, counted from the beginning: what only an oracle knows.
	Arrivals func(pipeline string) ([]time.Duration, error)
}

// Node is a machine, or Count alike.
type Node struct {
	Name      string `yaml:"name"`
	Count     int    `yaml:"count"`
	Memory    Bytes  `yaml:"memory"`
	CPU       Milli  `yaml:"cpu"`
	GPUs      int    `yaml:"gpus"`
	GPUMemory Bytes  `yaml:"gpuMemory"`
}

// Pipeline is what requests are for.
type Pipeline struct {
	Name     string        `yaml:"name"`
	SLO      time.Duration `yaml:"slo"`
	Timeout  time.Duration `yaml:"timeout"` // of a request
	Items    int           `yaml:"items"`   // that a request has
	Arrivals Arrivals      `yaml:"arrivals"`
}

// Arrivals say when requests come: one of Rate, MMPP, Trace and Make.
type Arrivals struct {
	Rate  string   `yaml:"rate"` // see arrivals.ParseProfile
	CV    *float64 `yaml:"cv"`   // of the gaps at a constant rate; nil: 1, Poisson
	MMPP  string   `yaml:"mmpp"` // see arrivals.ParseStates
	Trace Trace    `yaml:"trace"`

	// Make makes the source of a run's requests from its seed, in studies. It is called by several goroutines at a time.
	Make func(seed uint64) (arrivals.Source, error) `yaml:"-"`
}

// Trace says which part of which recorded load is played, and how.
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

// Stage is a function of one or more pipelines.
type Stage struct {
	Name       string        `yaml:"name"`
	Pipelines  []string      `yaml:"pipelines"` // none: all there are
	Next       []string      `yaml:"next"`
	Each       bool          `yaml:"each"`  // a call an item
	Join       int           `yaml:"join"`  // predecessors that it waits for; 0: all
	Items      int           `yaml:"items"` // that an answer has
	Service    Service       `yaml:"service"`
	Start      Start         `yaml:"start"`
	Batch      int           `yaml:"batch"` // largest
	Slots      int           `yaml:"slots"` // batches a replica takes at a time
	QueueLimit int           `yaml:"queueLimit"`
	Min        int           `yaml:"min"`
	Max        int           `yaml:"max"`
	Zero       bool          `yaml:"zero"` // may sleep
	ZeroAge    time.Duration `yaml:"zeroAge"`
	CPU        Milli         `yaml:"cpu"`        // that a replica is promised
	CPULimit   Milli         `yaml:"cpuLimit"`   // that it may use; 0: what its profile or Service.Mean was measured with
	Memory     Bytes         `yaml:"memory"`     // that a replica adds
	Parameters Bytes         `yaml:"parameters"` // that its zygote holds; 0: it has none, and no parameters to load
	GPU        int           `yaml:"gpu"`        // devices a replica needs
	GPUMemory  Bytes         `yaml:"gpuMemory"`  // of each; 0: all of it
	DiesEvery  time.Duration `yaml:"diesEvery"`  // mean life of a replica, exponential; 0: it does not die
}

// Service is how long a batch keeps its slot.
//
// A batch of b calls on a quota of q takes the draw of its first call, times 1 + BatchCost·(b − 1), times (1 − CPUShare) +
// CPUShare·q₀/q, where q₀ is the quota that Mean was measured with. With a Profile both factors are read from its points instead:
// linear in the batch, and in 1/q.
type Service struct {
	Dist      Dist          `yaml:"dist"`
	Mean      time.Duration `yaml:"mean"`
	CV        *float64      `yaml:"cv"`        // of gamma and lognormal; nil: 1
	BatchCost *float64      `yaml:"batchCost"` // what each further call adds, in parts of the first; nil: 1, batches save nothing
	CPUShare  float64       `yaml:"cpuShare"`  // the part that a processor's share speeds up
	Profile   []Point       `yaml:"profile"`   // as measured; policies see it, too
	// ProfileFile is what `stagecoach profile FUNCTION --show --json` prints, in place of Profile: its points with inputs of Length.
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

// Point is a measured service time of a batch.
type Point struct {
	CPU   Milli         `yaml:"cpu"`
	Batch int           `yaml:"batch"`
	Mean  time.Duration `yaml:"mean"`
	CV    float64       `yaml:"cv"`
}

// Start is what it takes from the order of a replica until it is ready, by path. A cold start loads the parameters; they stay on the
// node as a zygote's, from which later ones fork, until it is evicted.
type Start struct {
	Cold   time.Duration `yaml:"cold"`
	Fork   time.Duration `yaml:"fork"`   // 0: as Cold, and nothing forks
	Parked time.Duration `yaml:"parked"` // of a child that waits on the device; 0: none does
}
