package schema

import (
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// Top is the answer of GET /system/top: all that `stagecoach top` shows. Times are in seconds,
// sizes in bytes.
type Top struct {
	At time.Time `json:"at"`
	// sorted by name, with the functions that were lately called by themselves
	Pipelines []TopPipeline `json:"pipelines"`
	Functions []TopFunction `json:"functions"` // sorted by name, variants after their stage's function
	Nodes     []TopNode     `json:"nodes"`
	Events    []TopEvent    `json:"events"` // the latest events, in order
}

// TopPipeline summarizes the last 15 seconds of a pipeline.
type TopPipeline struct {
	Name   string  `json:"name"` // its key
	Rate   float64 `json:"rate"` // ended requests per second
	P50    float64 `json:"p50"`
	P99    float64 `json:"p99"`
	SLO    float64 `json:"slo,omitempty"`
	Within float64 `json:"within"` // share of all requests that were good within the objective
	// share of all requests that failed through no fault of the client
	Failed   float64 `json:"failed"`
	InFlight int     `json:"inFlight"`
	Fault    string  `json:"fault,omitempty"` // why it cannot be invoked
}

// TopFunction is the present state of a function.
type TopFunction struct {
	Name        string  `json:"name"`                // its key
	VariantOf   string  `json:"variantOf,omitempty"` // its stage's key; empty: it is no variant
	Rate        float64 `json:"rate"`                // arriving tasks per second
	CV          float64 `json:"cv"`                  // of the times between arrivals
	Waiting     int     `json:"waiting"`
	Running     int     `json:"running"`
	Wait        float64 `json:"wait"`        // of the latest tasks in the line
	Service     float64 `json:"service"`     // mean per task
	Utilisation float64 `json:"utilisation"` // Rate * Service / tasks that can run at a time
	Ready       int     `json:"ready"`       // replicas, as the three below
	Starting    int     `json:"starting"`
	Draining    int     `json:"draining"`
	Wanted      int     `json:"wanted"`
	Why         string  `json:"why"` // of the last decision, or why replicas do not start
}

// TopNode is the present state of a node.
type TopNode struct {
	Name       string `json:"name"`
	Memory     int64  `json:"memory"`
	MemoryUsed int64  `json:"memoryUsed"`
	Zygotes    int    `json:"zygotes"`
	Replicas   int    `json:"replicas"`
}

// TopEvent is an event of the cluster, as GET /system/events streams it.
type TopEvent struct {
	At time.Time `json:"at"`
	// For example replica.ready, function.deployed, function.scaled, request.dead, zygote.evicted.
	Kind     string       `json:"kind"`
	Function pipeline.Key `json:"function,omitzero"`
	Replica  string       `json:"replica,omitempty"`
	Node     string       `json:"node,omitempty"`
	Call     string       `json:"call,omitempty"` // X-Call-Id
	// how a replica started: fork, cold or process
	Path   string            `json:"path,omitempty"`
	Phases map[string]string `json:"phases,omitempty"` // duration of each phase of a start
	From   *int              `json:"from,omitempty"`   // replicas before a function was scaled
	To     *int              `json:"to,omitempty"`
	Why    string            `json:"why,omitempty"`
}
