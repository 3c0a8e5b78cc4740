package baseline

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// The defaults of CocktailConfig: those of the authors' code, modules/constants.py and modules/scheduler.py, but for Smooth.
const (
	CocktailPeriod   = time.Minute // PREDICTOR_PARAM
	CocktailHeadroom = 1.2         // Times
	CocktailKeep     = 6           // results that a scheduler's round goes by
	CocktailSmooth   = 0.5
	cocktailWindow   = 5 * time.Second // PREDICTOR_WINDOW
	cocktailReact    = 5 * time.Second // ReactiveController's interval
	cocktailTrend    = 0.1
	cocktailForget   = 0.5 // of what is known of visits, a round
)

// CocktailConfig is what Cocktail leaves to be set. A zero field means its default.
//
//	knob       default  searched     what it is
//	Period     1 min    5 s to 1 min from forecast to forecast
//	Headroom   1.2      1 to 2       what a forecast is multiplied by
//	Keep       6        1 to 6       periods: a count is the largest that so many of them asked for
//	Smooth     0.5      0.1 to 1     the weight of the latest period in the forecast's level
type CocktailConfig struct {
	Period           time.Duration
	Headroom, Smooth float64
	Keep             int
}

// Cocktail is a plan.Allocator after the resource management of Cocktail (Gunasekaran et al., Cocktail: A Multidimensional Optimization for
// Model Serving in Cloud, NSDI'22; github.com/jashwantraj92/cocktail), with a pipeline's stages in the place of an ensemble's
// models, as QUART's authors have it ("we integrate it with the pipeline").
//
// Forecast: requests are counted in windows of 5 s; each period the largest of its windows is the sample, and the load of the next one
// is forecast, times a headroom.
//
// Weighted: each pool gets instances in proportion to its weight. There it is the part of requests that a model serves, by
// how many an instance packs; here the visits that a request pays a stage, by its service time and slots. A count is the largest of the
// latest results, as what the authors' scheduler would end; the call that ends it is commented out in their code, and nothing ever is.
//
// Reactive: when more than SLA_BOUND, 2 %, of the answers of a pool are late, instances on standby are added until the next forecast: as
// many as serve what comes, and what waits until it looks again, 5 s later; one more at least while a late one waits.
//
// Where it differs: DeepAR is trained on weeks of a trace with hours to learn from; in its place is Holt's linear smoothing (double
// exponential: Holt 1957, Hyndman and Athanasopoulos, Forecasting) of the same samples, with a trend's weight of 0.1, and until
// there is a period's sample nothing but reaction. (The authors' scheduler goes by the largest sample ever, times 1.2.) Late is when the
// 99th percentile of waits passes what a stage's part of the objective leaves to wait, as there is no 98th. Selection of models, kinds
// of machines and their prices are not about a pipeline. A window's rate is the largest that Demand had in it. Build it with [NewCocktail].
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
	At, Began    time.Time // latest decision; of the period
	Peak         float64   // the largest rate of the period
	Level, Trend float64   // of the forecast, as of the period's beginning
	Periods      int       // that are in it
	Seen         float64   // sum of rates, faded, for visits
	Results      []int     // what the latest periods' forecasts asked for, this one's first
	Standby      int       // count that waits asked for since the period began
	Reacted      time.Time // when they did
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

// sample takes f's rate into the period, and says whether that is a new one.
func (c Cocktail) sample(past CocktailPast, f *plan.Function, now time.Time) (CocktailPast, bool) {
	ready, starting := f.Current()
	if past.At.IsZero() || past.At.After(now) { // a clock that was set back begins anew
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

// forecast is what is expected a second, 0 while nothing is.
func (c Cocktail) forecast(past *CocktailPast) float64 {
	if past.Periods == 0 {
		return 0
	}
	return max(past.Level+past.Trend, 0) * c.cfg.Headroom
}

// visits are how often a request comes to a stage.
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
	t := batchTime(f, line.Batch) / (float64(line.Batch) * float64(max(f.Slots, 1))) // of a replica, a call
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
