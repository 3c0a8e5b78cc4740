package schema

import (
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
)

// Explanation is the answer of GET /system/pipelines/NAME/explain: why each stage of a pipeline has
// its number of replicas.
type Explanation struct {
	Pipeline string    `json:"pipeline"`      // its key, or that of a function alone
	At       time.Time `json:"at"`            // of the decision; zero: there is none yet
	SLO      string    `json:"slo,omitempty"` // a Go duration, as the other times here
	// mean time on the slowest path; empty: a stage has no data
	Measured string `json:"measured,omitempty"`
	// Measured is within SLO; nil if SLO or Measured is empty
	Met *bool `json:"met,omitempty"`
	// those that decide about the pipeline's domain
	Policies policy.Names `json:"policies"`
	// most replicas of all functions together; 0: no bound
	Budget int `json:"budget,omitempty"`
	// replicas that all functions together should have
	Wanted int              `json:"wanted"`
	Notes  []string         `json:"notes"`  // what the operator should know first
	Stages []ExplainedStage `json:"stages"` // in topological order
}

// ExplainedStage is a stage of an [Explanation]. Unknown values are left out; they are not zero.
type ExplainedStage struct {
	Name     string `json:"name"`
	Ready    int    `json:"ready"`    // replicas
	Starting int    `json:"starting"` // replicas
	Wanted   int    `json:"wanted"`   // replicas that have a place
	Min      int    `json:"min"`
	Max      int    `json:"max"`
	Key      bool   `json:"key"` // a key stage
	// per replica, in thousandths of a core; 0: as declared
	CPUMilli int `json:"cpuMilli,omitempty"`
	ExplainedLoad
	ExplainedModel
	// the decision: each term, the change, and what bounds it
	Why     string         `json:"why"`
	Short   string         `json:"short,omitempty"`   // why fewer replicas have a place
	Failing *FailingStarts `json:"failing,omitempty"` // nil: starts do not fail
	Barred  string         `json:"barred,omitempty"`  // devices that are not tried for now

	ExplainedVariants
}

// ExplainedLoad is what a stage has to do, and how long that takes. Unknown values are left out.
type ExplainedLoad struct {
	Rate *float64 `json:"rate,omitempty"` // requests per second
	// time of the latest change of the rate, or of the first request; nil: unknown
	RateSince *time.Time `json:"rateSince,omitempty"`
	// coefficient of variation of the times between requests
	CV      *float64 `json:"cv,omitempty"`
	Wait    string   `json:"wait,omitempty"`    // mean
	Oldest  string   `json:"oldest,omitempty"`  // wait of the first task in the line
	Service string   `json:"service,omitempty"` // mean
	Busy    *float64 `json:"busy,omitempty"`    // share of the time, 0 to 1
	Waiting int      `json:"waiting"`           // tasks
	Running int      `json:"running"`           // tasks
}

// ExplainedModel is how long tasks stay at a stage, by the model and as measured. The model's
// prediction is for the replicas that are ready now. Unknown values are left out.
type ExplainedModel struct {
	Batch     int    `json:"batch,omitempty"`     // largest batch
	BatchTime string `json:"batchTime,omitempty"` // mean time of a task's batch
	// rate times service time, per replica and slot
	Load *float64 `json:"load,omitempty"`
	// mean sojourns: from a task's arrival to its end
	Predicted string `json:"predicted,omitempty"`
	Stayed    string `json:"measuredSojourn,omitempty"`
	// part of Predicted by which Stayed is longer; negative: shorter
	Error        *float64 `json:"error,omitempty"`
	NoPrediction string   `json:"noPrediction,omitempty"` // why Predicted is left out
	Bounded      []string `json:"bounded,omitempty"`      // inputs that the model replaces
	// nil: the last minute cannot be judged
	LastMinute *ExplainedError `json:"lastMinute,omitempty"`
}

// ExplainedError compares prediction and measurement over the last minute.
type ExplainedError struct {
	Tasks     uint64  `json:"tasks"`
	Predicted string  `json:"predicted"` // mean sojourn
	Stayed    string  `json:"measured"`  // mean sojourn
	Error     float64 `json:"error"`     // as ExplainedModel.Error
	Off       bool    `json:"off"`       // they differ by more than half of the prediction
}

// ExplainedVariants is what a stage's functions are to each other.
type ExplainedVariants struct {
	// Of a stage with variants: requests per second, whichever function serves them. Rate is of
	// those that the stage's own function gets.
	Arriving *float64 `json:"arriving,omitempty"`
	// The variants of a stage, sorted by name. A variant has none.
	Variants  []ExplainedStage `json:"variants,omitempty"`
	Accuracy  float64          `json:"accuracy,omitempty"`  // of a variant; 0: not declared
	MaxLength int              `json:"maxLength,omitempty"` // of a variant; 0: any

	// order of the line: fair or least-slack; empty: fifo
	Rank string `json:"rank,omitempty"`
	// where tasks go, if several functions serve the stage; nil: there is no choice
	Table *ExplainedTable `json:"table,omitempty"`
}

// ExplainedTable says to which functions the tasks of a stage go.
type ExplainedTable struct {
	Version uint64         `json:"version"` // grows with each change
	Rows    []ExplainedRow `json:"rows"`
}

// ExplainedRow has the lanes for tasks of some sources: names of functions, "client" or "join".
type ExplainedRow struct {
	From   []string         `json:"from"`
	Levels []ExplainedLevel `json:"levels"` // by length
}

// ExplainedLevel has the lanes for tasks up to a length.
type ExplainedLevel struct {
	MaxLength int `json:"maxLength,omitempty"` // 0: any
	// part of the stage's tasks that are of this length; nil: unknown
	Part     *float64         `json:"part,omitempty"`
	Shares   []ExplainedShare `json:"shares"`
	Backups  []string         `json:"backups,omitempty"`  // by preference
	Overflow string           `json:"overflow,omitempty"` // empty: tasks wait in their lane
}

// ExplainedShare is the part of tasks that a function gets, above 0 and at most 1.
type ExplainedShare struct {
	Lane string  `json:"lane"`
	Part float64 `json:"part"`
}

// FailingStarts says that replicas of a stage do not start.
type FailingStarts struct {
	Count int       `json:"count"` // in a row
	Until time.Time `json:"until"` // time of the next try
	Cause string    `json:"cause"` // of the latest failure
}
