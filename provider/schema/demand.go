package schema

import "time"

// Demand is the answer of GET /system/demand/NAME: what was learned about an application's stages.
// Times are in seconds. Numbers of calls and requests are weighted by age: the weight halves per
// hour.
type Demand struct {
	App      string        `json:"app"`           // the pipeline or function that clients invoke
	Last     time.Time     `json:"last,omitzero"` // end of its latest request; zero: none is known
	Requests float64       `json:"requests"`
	Bytes    int           `json:"bytes"` // memory that it takes
	Notes    []string      `json:"notes"` // what the operator should know first
	Stages   []DemandStage `json:"stages"`
}

// DemandStage is a stage of a [Demand].
type DemandStage struct {
	Name string `json:"name"`
	// calls per successful request; 0: none has succeeded
	PerRequest float64            `json:"perRequest"`
	Work       DemandDistribution `json:"work"`            // seconds on a replica per item
	Length     DemandDistribution `json:"length,omitzero"` // of its inputs, in the unit of max-length
	Lanes      []DemandLane       `json:"lanes"`           // sorted by function, then batch size
	Next       []DemandNext       `json:"next,omitempty"`  // sorted by stage
}

// DemandLane is what was learned about the calls that one function ran in batches of about one
// size.
type DemandLane struct {
	Function string             `json:"function"` // its key
	Batch    float64            `json:"batch"`    // mean number of calls in a batch
	Given    float64            `json:"given"`    // items received per call
	Returned float64            `json:"returned"` // items returned per call
	Work     DemandDistribution `json:"work"`     // seconds on a replica per item
	Last     time.Time          `json:"last"`     // end of the latest of these calls
}

// DemandNext is an edge of the application's graph.
type DemandNext struct {
	Stage       string  `json:"stage"`
	Probability float64 `json:"probability"` // that it runs if the stage before it runs
	// items that it receives per item that the stage before it receives
	Factor   float64        `json:"factor"`
	Variants []DemandFactor `json:"variants"` // the same per function that serves the stage before it
}

// DemandFactor is how many items a next stage receives per item that one function received.
type DemandFactor struct {
	Function string    `json:"function"` // its key
	Factor   float64   `json:"factor"`
	Calls    float64   `json:"calls"`
	Last     time.Time `json:"last"` // end of the latest of these calls
}

// DemandDistribution is a distribution of values. It has no values if Calls is 0.
type DemandDistribution struct {
	Calls   float64        `json:"calls"`
	Mean    float64        `json:"mean"`
	CV      float64        `json:"cv"` // coefficient of variation
	P50     float64        `json:"p50"`
	P95     float64        `json:"p95"`
	P99     float64        `json:"p99"`
	Buckets []DemandBucket `json:"buckets"` // sorted by value; their shares sum to 1
}

// DemandBucket is a part of a distribution.
type DemandBucket struct {
	Value float64 `json:"value"` // within 1.6 % of the values that it stands for
	Share float64 `json:"share"` // of all values
}
