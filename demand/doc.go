// Package demand learns from the timings of ended calls what applications ask of their stages. It
// learns how long an item takes, per function that serves the stage and per batch size. It also
// learns how long inputs are, which stages follow, and how many items each next stage receives.
//
// A [Learner] is a pure core: time is an argument. It forgets in two ways. The weight of a call
// halves with each [Limits.HalfLife] of time. And its memory is bounded per application and in all:
// the least recently used applications, and the least recently used parts of one application, are
// forgotten first. [Limits] has the bounds.
//
// Quantiles are those of package sketch, so their relative error is at most sketch.Error. What an
// owner has learned can be encoded, decoded and merged with what another owner has learned.
package demand

import "time"

// Limits bound what a [Learner] remembers.
type Limits struct {
	Apps     int           // applications
	Bytes    int           // memory of all applications
	AppBytes int           // memory of one application
	HalfLife time.Duration // time in which the weight of a call halves
}

// DefaultLimits are the limits that `stagecoach up` uses: 1,000 applications, 16 MiB in all and 64
// KiB per application. A stage with one function and one batch size takes about 1 KiB.
func DefaultLimits() Limits {
	return Limits{Apps: 1000, Bytes: 16 << 20, AppBytes: 64 << 10, HalfLife: time.Hour}
}

// Call is one answered call of a stage.
type Call struct {
	Stage    string        // the stage's name within its application
	Function string        // function whose replica ran it, as pipeline.Key in text
	Batch    int           // calls in its batch; below 2: it ran alone
	Work     time.Duration // time on the replica
	Given    int           // items of its input; below 1: counted as 1
	Returned int           // items of its output
	Length   int           // of its input, in the unit of the stages' max-length; 0: unknown
}

// Edge says that a stage's output is for another stage.
type Edge struct{ From, To string }

// Ended is what a [Learner] learns from a request that has ended.
type Ended struct {
	App   string // the pipeline or function that the client invoked, as pipeline.Key in text
	Calls []Call // only answered calls
	// Edges of the application's graph. A request that failed leaves them empty, because it did not
	// reach all stages.
	Edges []Edge
	// All stages that were to run have answered, so the request counts for factors, probabilities
	// and calls per request.
	Complete bool
}
