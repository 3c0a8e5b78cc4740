package autoscaler

import (
	"fmt"
	"math"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// Terms are what the model takes from a function's measurements, and its prediction for the
// replicas that are ready now. An operator can check the prediction against the measurement.
type Terms struct {
	Load   float64       // λ·service/servers, also called ρ; 0: unknown
	Batch  time.Duration // how long a task stays in its batch, on average; 0: unknown
	Stay   time.Duration // predicted mean sojourn, without a line at its begin; 0: none
	Stayed time.Duration // measured mean sojourn of about 15 s; 0: unknown
	// NoStay says why there is no prediction; empty: there is one.
	NoStay string
	// Bounded says which measurements the model replaces by a bound; empty: none.
	Bounded []string
}

// Error returns by which part of the prediction tasks stayed longer than predicted. It is negative
// if they stayed shorter. ok is false if the prediction or the measurement is missing.
func (t Terms) Error() (part float64, ok bool) {
	if t.Stay <= 0 || t.Stayed <= 0 {
		return 0, false
	}
	return float64(t.Stayed)/float64(t.Stay) - 1, true
}

// NewTerms returns the terms of f. The prediction is that of [Sojourn] and of whole batches, as the
// corrector uses it, for the replicas that are ready, and at least the wait for a batch to fill. It
// is for the present rate, not for the rate to expect. It has no term for the tasks that wait now,
// because the measured mean is of the past.
func NewTerms(f *plan.Function) Terms {
	g := newStage(f)
	g.waiting, g.lambda = 0, 0
	if f.Demand.Known && f.Demand.Rate > 0 { // not NaN
		g.lambda = min(f.Demand.Rate, math.MaxInt32)
	}
	out := Terms{Bounded: replaced(f)}
	ready, _ := f.Current()
	if g.known {
		out.Batch = toDuration(g.latency)
		if f.Wait.Known && f.Wait.Mean >= 0 {
			out.Stayed = f.Wait.Mean + out.Batch
		}
		if ready > 0 {
			out.Load = g.lambda / (g.mu * float64(g.servers(ready)))
		}
	}
	switch {
	case !g.known:
		out.NoStay = "the service time is not known yet"
	case !f.Demand.Known:
		out.NoStay = "the rate is not known yet"
	case !(g.lambda > 0):
		out.NoStay = "nothing arrives"
	case ready == 0:
		out.NoStay = "no replica is ready"
	case out.Load > saturated:
		out.NoStay = fmt.Sprintf("overloaded: the line grows at a load above %.0f %%", 100*saturated)
	default:
		// A task waits for its batch and for a replica at the same time.
		out.Stay = max(g.sojourn(ready), out.Batch+toDuration(fillWait(f, g.lambda)))
	}
	return out
}

// replaced describes the measurements of f that the model replaces: see squared.
func replaced(f *plan.Function) (out []string) {
	of := func(what string, cv float64) {
		switch used := math.Sqrt(squared(cv)); {
		case cv == 0: // unknown
		case !(cv > 0):
			out = append(out, fmt.Sprintf("the CV of %s is no positive number, and counts as 1", what))
		case used < cv:
			out = append(out, fmt.Sprintf("the CV of %s is %.3g, and counts as %.3g, the largest that the model uses", what, cv, used))
		}
	}
	if f.Demand.Known && !(f.Demand.Rate >= 0) {
		out = append(out, "the rate is no number, or negative, and counts as 0")
	}
	of("the times between arrivals", f.Demand.CV)
	of("service times", f.Service.CV)
	if falls := f.FallingBatch(); falls > 0 && f.AutoBatch == 0 && len(f.Service.Batches) == 0 {
		out = append(out, plan.Falls(falls))
	}
	return out
}
