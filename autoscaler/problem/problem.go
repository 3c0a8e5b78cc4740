package problem

import (
	"io"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/internal/yamlfile"
)

// Problem is a cluster at one instant, and the policies that decide about it. A zero field means
// its default. Build one with [Read].
type Problem struct {
	Name     string       `yaml:"name"`
	Policies policy.Names `yaml:"policies"` // those of `stagecoach up`
	// most replicas of all functions together; 0: what the nodes hold
	Budget    int           `yaml:"budget"`
	Tick      time.Duration `yaml:"tick"` // time between decisions; 0: one second
	Nodes     []Node        `yaml:"nodes"`
	Pipelines []Pipeline    `yaml:"pipelines"`
	Stages    []Stage       `yaml:"stages"`

	snapshot plan.Snapshot
	rates    map[string]map[string]float64 // calls per second, by pipeline and stage
	stages   map[string][]string           // functions that serve each stage, its own first
	lengths  map[string]int                // by pipeline
}

// Node is a machine, or Count equal ones.
type Node struct {
	Name      string         `yaml:"name"`
	Count     int            `yaml:"count"` // 0: 1
	Memory    yamlfile.Bytes `yaml:"memory"`
	CPU       yamlfile.Milli `yaml:"cpu"`
	GPUs      int            `yaml:"gpus"`
	GPUMemory yamlfile.Bytes `yaml:"gpuMemory"` // of each
}

// Pipeline is a pipeline, its objective and its load.
type Pipeline struct {
	Name string        `yaml:"name"`
	SLO  time.Duration `yaml:"slo"`  // 0: no objective
	Rate float64       `yaml:"rate"` // requests per second
	CV   float64       `yaml:"cv"`   // of the times between requests; 0: unknown, as for 1
	// Length of its items, in the unit of MaxLength; 0: unknown. Only the prediction needs it.
	Length int `yaml:"length"`
	// policies of its domain, as annotations of its entry stage choose them; empty: Problem.Policies
	Allocator string `yaml:"allocator"`
	Rank      string `yaml:"rank"`
	Route     string `yaml:"route"`
}

// Stage is a function of one or more pipelines.
type Stage struct {
	Name      string   `yaml:"name"`
	Pipelines []string `yaml:"pipelines"` // empty: all pipelines
	Next      []string `yaml:"next"`
	Each      bool     `yaml:"each"` // one call per item
	Join      int      `yaml:"join"` // number of predecessors that it waits for; 0: all
	// Demand replaces the demand that follows from the pipelines' rates.
	Demand   *Demand `yaml:"demand"`
	Function `yaml:",inline"`
	Variants []Variant `yaml:"variants"` // other functions that can serve the stage
}

// Variant is a function that can serve a stage too. It inherits nothing from the stage.
type Variant struct {
	Name     string `yaml:"name"`
	Function `yaml:",inline"`
}

// Function is what is known of a stage's function: how it was declared, and what was measured.
type Function struct {
	Declared `yaml:",inline"`
	Measured `yaml:",inline"`
}

// Declared is how a function was declared.
type Declared struct {
	Accuracy  float64        `yaml:"accuracy"`  // of its answers, above 0 and at most 1; 0: 1
	MaxLength int            `yaml:"maxLength"` // of its inputs; 0: any
	Batch     int            `yaml:"batch"`     // largest batch; 0: 1
	Slots     int            `yaml:"slots"`     // concurrent batches per replica; 0: 1
	Min       int            `yaml:"min"`       // replicas; 0: 1, unless Zero
	Max       int            `yaml:"max"`       // replicas; 0: 20, or Min if that is more
	Zero      bool           `yaml:"zero"`      // may scale to zero
	ZeroAge   time.Duration  `yaml:"zeroAge"`   // idle time before it scales to zero; 0: 15 minutes
	CPU       yamlfile.Milli `yaml:"cpu"`       // CPU request per replica; 0: none
	CPULimit  yamlfile.Milli `yaml:"cpuLimit"`  // CPU limit per replica; 0: none
	Memory    yamlfile.Bytes `yaml:"memory"`    // per replica; 0: unknown
	GPU       int            `yaml:"gpu"`       // devices per replica
	GPUMemory yamlfile.Bytes `yaml:"gpuMemory"` // per device; 0: all of it
}

// Measured is what was measured of a function.
type Measured struct {
	Service Service `yaml:"service"` // zero: from the profile, or unknown
	Profile []Point `yaml:"profile"`
	Items   float64 `yaml:"items"` // that a call returns; 0: unknown, as for 1
	// Part of the stage's calls that this function got lately. nil: what the others leave for a
	// stage's own function, 0 for a variant.
	Share    *float64 `yaml:"share"`
	Waiting  int      `yaml:"waiting"`  // tasks in the line
	Running  int      `yaml:"running"`  // tasks on replicas
	Expected int      `yaml:"expected"` // requests in earlier stages that will come
	Wait     Wait     `yaml:"wait"`
	// share of the time that slots were taken, 0 to 1; nil: unknown
	Busy     *float64       `yaml:"busy"`
	Starts   []Start        `yaml:"starts"`
	Replicas []Replica      `yaml:"replicas"`
	CPUNow   yamlfile.Milli `yaml:"cpuNow"` // CPU limit that an earlier plan has set; 0: as declared
	Target   Target         `yaml:"target"`
}

// Demand is how calls arrive at a stage.
type Demand struct {
	Rate float64 `yaml:"rate"` // per second
	CV   float64 `yaml:"cv"`   // of the times between calls; 0: unknown, as for 1
}

// Service is how long a call keeps its slot: its share of its batch's time.
type Service struct {
	Mean    time.Duration `yaml:"mean"`
	CV      float64       `yaml:"cv"` // 0: unknown, as for 1
	Batches []Batch       `yaml:"batches"`
}

// Batch is the measured mean time of batches of one size.
type Batch struct {
	Size int           `yaml:"size"`
	Mean time.Duration `yaml:"mean"` // per batch
	N    int           `yaml:"n"`    // batches measured; 0: 100
}

// Point is the profiled time of a batch, for one CPU limit and one length of inputs.
type Point struct {
	CPU    yamlfile.Milli `yaml:"cpu"`
	Batch  int            `yaml:"batch"`
	Length int            `yaml:"length"` // 0: unchanged inputs
	Mean   time.Duration  `yaml:"mean"`   // per batch
	Err    time.Duration  `yaml:"err"`    // half the width of the mean's 95 % confidence interval
	CV     float64        `yaml:"cv"`
	N      int            `yaml:"n"` // batches measured; 0: 100
}

// Wait is how long tasks waited in the line.
type Wait struct {
	Mean   time.Duration `yaml:"mean"` // with the others 0: unknown
	P50    time.Duration `yaml:"p50"`
	P95    time.Duration `yaml:"p95"`
	P99    time.Duration `yaml:"p99"`
	Oldest time.Duration `yaml:"oldest"` // wait of the task that waits longest
}

// Start is the mean time that replicas took to start on one path.
type Start struct {
	Path string        `yaml:"path"` // such as cold, fork or parked
	Mean time.Duration `yaml:"mean"`
	N    int           `yaml:"n"` // starts measured; 0: 1
}

// Replica is a running replica, or Count equal ones.
type Replica struct {
	Node   string `yaml:"node"`
	Device string `yaml:"device"` // such as gpu0; several are joined by commas
	Count  int    `yaml:"count"`  // 0: 1
	State  string `yaml:"state"`  // starting, ready or draining; empty: ready
}

// Target is OpenFaaS's scaling target, and the present load.
type Target struct {
	Type  string  `yaml:"type"`  // rps, capacity or cpu; empty: none
	Value float64 `yaml:"value"` // per replica
	Load  float64 `yaml:"load"`  // of all replicas
}

// Read reads a problem and checks it. Errors name the path of the wrong field, what was got and
// what was wanted. r holds YAML or JSON, 1 MiB at most.
func Read(r io.Reader) (*Problem, error) {
	var p Problem
	if err := yamlfile.Read(r, "problem", "a mapping with nodes, pipelines and stages", &p); err != nil {
		return nil, err
	}
	return p.checked()
}
