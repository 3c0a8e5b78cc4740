package baseline

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// The defaults of CocktailConfig. Except for Smooth, they are those of the authors' code,
// modules/constants.py and modules/scheduler.py.
const (
	CocktailPeriod   = time.Minute // PREDICTOR_PARAM
	CocktailHeadroom = 1.2         // Times
	CocktailKeep     = 6           // results that the authors' scheduler takes into account
	CocktailSmooth   = 0.5
	cocktailWindow   = 5 * time.Second // PREDICTOR_WINDOW
	cocktailReact    = 5 * time.Second // ReactiveController's interval
	cocktailTrend    = 0.1
	cocktailForget   = 0.5 // factor per round for what is known of visits
)

// CocktailConfig has the settings that Cocktail leaves open. A zero field means its default.
//
//	knob       default  searched     what it is
//	Period     1 min    5 s to 1 min time between forecasts
//	Headroom   1.2      1 to 3       factor of a forecast
//	Keep       6        1 to 6       latest periods; a count is the largest of their results
//	Smooth     0.5      0.1 to 1     weight of the latest period in the forecast's level
type CocktailConfig struct {
	Period           time.Duration
	Headroom, Smooth float64
	Keep             int
}

// Cocktail is a plan.Allocator after the resource management of Cocktail (Gunasekaran et al.,
// Cocktail: A Multidimensional Optimization for Model Serving in Cloud, NSDI'22;
// github.com/jashwantraj92/cocktail). The stages of a pipeline take the place of the models of an
// ensemble, as for QUART's authors ("we integrate it with the pipeline").
//
// Forecast: load is measured in windows of 5 s. A period's sample is the load of its fullest
// window. The load of the next period is forecast from the samples, and multiplied by Headroom.
//
// Weights: each pool gets instances in proportion to its weight. In the paper, a pool serves one
// model. Its weight is the model's share of the requests, divided by the number of requests that an
// instance packs. Here, a pool is a stage. Its weight comes from its visits per request, its
// service time and its slots. A count is the largest result of the latest Keep periods. Instances
// beyond this count end here. The authors' code ends none, because its call that would end them is
// commented out.
//
// Reaction: if more than 2 % (SLA_BOUND) of a pool's answers are late, its count is raised until
// the next forecast. The raised count serves the arrivals, and drains the waiting tasks within 5 s,
// the time to the next check. If a waiting task is late and no instance is starting, the count
// rises by at least one.
//
// Differences:
//
//   - The paper forecasts with DeepAR, which needs weeks of a trace and hours of training. Here
//     Holt's linear smoothing (double exponential: Holt 1957, Hyndman and Athanasopoulos,
//     Forecasting) forecasts the same samples, with a trend weight of 0.1. The authors' scheduler
//     uses the largest sample ever, times 1.2.
//   - Before the first sample, only the reaction changes counts.
//   - Answers count as late if the 99th percentile of waits is longer than a stage's part of the
//     objective allows. Snapshots do not have the 98th percentile.
//   - The load of a window is the largest Demand.Rate in it.
//   - The selection of models, kinds of machines and prices does not apply to a pipeline.
//
// Build it with [NewCocktail].
type Cocktail struct{ cfg CocktailConfig }

// NewCocktail returns a Cocktail.
func NewCocktail(cfg CocktailConfig) Cocktail {
	if cfg.Period <= 0 {
		cfg.Period = CocktailPeriod
	}
	if !(cfg.Headroom > 0) {
		cfg.Headroom = CocktailHeadroom
	}
	if cfg.Keep <= 0 {
		cfg.Keep = CocktailKeep
	}
	cfg.Keep = min(cfg.Keep, 100)
	if !(cfg.Smooth > 0 && cfg.Smooth <= 1) {
		cfg.Smooth = CocktailSmooth
	}
	return Cocktail{cfg}
}

// CocktailMemory is what Cocktail remembers, by function.
type CocktailMemory map[string]CocktailPast

// CocktailPast is what Cocktail remembers of one function.
type CocktailPast struct {
	At, Began    time.Time // latest decision; start of the period
	Peak         float64   // largest rate of the period
	Level, Trend float64   // of the forecast, at the start of the period
	Periods      int       // number of periods in the forecast
	Seen         float64   // faded sum of rates, for visits
	Results      []int     // what the forecasts of the latest periods asked for, the newest first
	Standby      int       // count that waits have asked for since the period began
	Reacted      time.Time // when Standby was set
}

// Merge joins the memories of two domains that have become one.
func (Cocktail) Merge(a, b CocktailMemory) CocktailMemory { return merged(a, b) }

// Allocate implements plan.Allocator.
func (c Cocktail) Allocate(s plan.Snapshot, d plan.Domain, m CocktailMemory) (plan.Alloc, CocktailMemory, error) {
	all, err := functions(&s, d)
	if err != nil {
		return nil, m, err
	}
	pasts, turned := make([]CocktailPast, len(all)), make([]bool, len(all))
	for i, f := range all {
		pasts[i], turned[i] = c.sample(m[f.Name], f, s.At)
	}
	loads := make([]float64, len(all))
	for _, e := range entries(&s, d) {
		for _, i := range e.stages {
			loads[i] += c.forecast(&pasts[e.of]) * visits(&pasts[i], &pasts[e.of])
		}
	}
	out, next := make(plan.Alloc, len(all)), make(CocktailMemory, len(all))
	slos := objectives(&s, d, all)
	for i, f := range all {
		out[i], next[f.Name] = c.decide(&s, f, pasts[i], turned[i], loads[i], slos[i])
	}
	return out, next, nil
}

// sample takes f's rate into the period, and reports whether a new period has begun.
func (c Cocktail) sample(past CocktailPast, f *plan.Function, now time.Time) (CocktailPast, bool) {
	ready, starting := f.Current()
	if past.At.IsZero() || past.At.After(now) { // a clock that was set back starts over
		past = CocktailPast{Began: now, Results: []int{max(ready+starting, 1)}}
	}
	rate, since := arriving(f), min(now.Sub(past.At), cocktailWindow)
	if past.At.IsZero() {
		since = 0
	}
	past.At = now
	turned := now.Sub(past.Began) >= c.cfg.Period
	if turned {
		level := past.Peak
		if past.Periods > 0 {
			level = c.cfg.Smooth*past.Peak + (1-c.cfg.Smooth)*(past.Level+past.Trend)
			past.Trend = cocktailTrend*(level-past.Level) + (1-cocktailTrend)*past.Trend
		}
		past.Level, past.Peak, past.Began = level, 0, now
		past.Periods = min(past.Periods+1, math.MaxInt32)
		past.Seen *= cocktailForget
	}
	past.Peak = max(past.Peak, rate)
	past.Seen += rate * since.Seconds()
	return past, turned
}

// forecast returns the expected rate per second. It returns 0 before the first sample.
func (c Cocktail) forecast(past *CocktailPast) float64 {
	if past.Periods == 0 {
		return 0
	}
	return max(past.Level+past.Trend, 0) * c.cfg.Headroom
}

// visits returns how many tasks of a stage there are per request.
func visits(stage, first *CocktailPast) float64 {
	if stage == first || !(first.Seen > 0) || !(stage.Seen > 0) {
		return 1
	}
	return stage.Seen / first.Seen
}

func (c Cocktail) decide(s *plan.Snapshot, f *plan.Function, past CocktailPast, turned bool, load, slo float64) (plan.Line, CocktailPast) {
	ready, starting := f.Current()
	_, most := f.Bounds()
	line := plan.Line{Function: f.Name, Batch: max(f.Batch, 1)}
	// of a replica, per call
	t := batchTime(f, line.Batch) / (float64(line.Batch) * float64(max(f.Slots, 1)))
	if t == 0 {
		line.Count = bounded(s, f, max(ready+starting, 1))
		line.Why = fmt.Sprintf("service time unknown: %d, as there are", line.Count)
		return line, past
	}
	results := append(make([]int, 0, c.cfg.Keep), past.Results...)
	if turned {
		results = append([]int{min(ceil(load*t), most)}, results[:min(len(results), c.cfg.Keep-1)]...)
		past.Standby = 0
	}
	line.Why = fmt.Sprintf("%.4g/s are forecast, %.4g/s a replica", load, 1/t)
	left := max(slo-batchTime(f, 1), 0)
	wait := max(f.Wait.Oldest, 0)
	if f.Wait.Known {
		wait = max(wait, f.Wait.P99)
	}
	if wait.Seconds() > left && s.At.Sub(past.Reacted) >= cocktailReact {
		standby := ceil((arriving(f) + float64(max(f.Waiting, 0))/cocktailReact.Seconds()) * t)
		if f.Wait.Oldest.Seconds() > left && starting == 0 {
			standby = max(standby, ready+1)
		}
		if standby > ready+starting {
			past.Reacted = s.At
		}
		past.Standby = max(past.Standby, min(standby, most))
		line.Why += fmt.Sprintf(", waits of %v where %v are left: %d", wait.Round(time.Millisecond), time.Duration(left*1e9).Round(time.Millisecond), standby)
	}
	past.Results = results
	highest := slices.Max(results)
	line.Count = bounded(s, f, max(highest, past.Standby))
	line.Why += fmt.Sprintf(", %d is the most of %d periods, %d by waits; was %d", highest, len(results), past.Standby, ready+starting)
	return line, past
}
