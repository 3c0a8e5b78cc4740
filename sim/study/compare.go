package study

import (
	"cmp"
	"math"
	"slices"
)

// BestBaseline stands for the best baseline of each setting in comparisons: see
// [Result.BestBaseline].
const BestBaseline = "best baseline"

// overBudget is the factor by which a baseline may exceed the budget and still be the best one.
// Baselines are tuned to the budget on other loads, so they may exceed it a little.
const overBudget = 1.05

// Comparison compares two contenders by pairs of runs with equal seeds. For each seed it averages
// over settings; a ratio is averaged in logarithms. The intervals are Student's over the seeds.
// They cover the chance in loads and work, but not the choice of settings.
type Comparison struct {
	Of         string   `json:"of"`
	To         string   `json:"to"`
	Settings   []string `json:"settings"` // on which both were evaluated
	Mean       Interval `json:"mean"`     // a ratio: 0.5 is half the latency
	P99        Interval `json:"p99"`
	Goodput    Interval `json:"goodput"` // a ratio; no good request counts as one per run
	GPUSeconds Interval `json:"gpu_s"`
	InTime     Interval `json:"in_time"` // a difference of shares: 0.1 is ten points more
}

// tiny replaces 0 in ratios.
const tiny = 1e-9

// Outcome returns the outcome of a contender on a setting, or nil. contender may be [BestBaseline],
// [MostInTime] or [Strongest].
func (r *Result) Outcome(setting, contender string) *Outcome {
	switch contender {
	case BestBaseline:
		contender = r.BestBaseline(setting)
	case MostInTime:
		contender = r.mostInTime(setting)
	case Strongest:
		i := slices.IndexFunc(r.Settings, func(s SettingInfo) bool { return s.Name == setting })
		if i < 0 {
			return nil
		}
		contender = strongest(r, r.Settings[i].Group)
	}
	i := slices.IndexFunc(r.Outcomes, func(o Outcome) bool { return o.Setting == setting && o.Contender == contender })
	if i < 0 {
		return nil
	}
	return &r.Outcomes[i]
}

// MostInTime stands, in comparisons, for the contender with the most requests within the objective
// on a setting. That is the best of all oracles, however many GPUs they use, and of the contenders
// that may be the best baseline. Baselines are included because an oracle may do worse than a
// baseline.
const MostInTime = "most in time"

// mostInTime returns the contender that [MostInTime] stands for on a setting. It returns "" if no
// oracle was evaluated there.
func (r *Result) mostInTime(setting string) string {
	var best *Outcome
	known := false
	for _, c := range r.Contenders {
		o := r.Outcome(setting, c.Name)
		if o == nil || !c.Oracle && !r.baseline(c, o) {
			continue
		}
		known = known || c.Oracle
		if best == nil || o.InTime[r.objective()].Mean > best.InTime[r.objective()].Mean {
			best = o
		}
	}
	if !known {
		return ""
	}
	return best.Contender
}

// baseline reports whether a contender's outcome may be that of the best baseline.
func (r *Result) baseline(c ContendInfo, o *Outcome) bool {
	own := r.Outcome(o.Setting, r.Ours)
	return !c.Oracle && !c.Ours && (!r.OverBudget(o) || own != nil && o.GPUs.Mean <= own.GPUs.Mean)
}

// BestBaseline returns the contender with the smallest mean latency on a setting, without oracles
// and our own contenders. On average, it must use at most 1.05 times the budget of GPUs, or no more
// GPUs than ours uses there. The choice is made with the results known, so it favours the baseline.
// BestBaseline returns "" if no contender qualifies.
func (r *Result) BestBaseline(setting string) string {
	var best *Outcome
	for _, c := range r.Contenders {
		o := r.Outcome(setting, c.Name)
		if o == nil || !r.baseline(c, o) {
			continue
		}
		if best == nil || o.Mean.Mean < best.Mean.Mean {
			best = o
		}
	}
	if best == nil {
		return ""
	}
	return best.Contender
}

// mayFail is the share of requests that may fail without a mark.
const mayFail = 0.001

// Fails reports whether more than a thousandth of the requests failed.
func (o *Outcome) Fails() bool { return o.Failed.Mean > mayFail }

// OverBudget reports whether an outcome used, on average, more than 1.05 times the budget of GPUs.
// The budget is the setting's if that is set, and otherwise the study's.
func (r *Result) OverBudget(o *Outcome) bool {
	budget := r.Budget
	if i := slices.IndexFunc(r.Settings, func(s SettingInfo) bool { return s.Name == o.Setting }); i >= 0 {
		budget = cmp.Or(r.Settings[i].Budget, budget)
	}
	return o.GPUs.Mean > overBudget*budget
}

// Compare compares the first contender with the second, on the named settings, or on all settings
// if none is named. Each of the two may be [BestBaseline], [MostInTime] or [Strongest]. Compare
// skips settings on which only one of the two was evaluated, and returns false if no setting is
// left.
func (r *Result) Compare(of, to string, settings ...string) (Comparison, bool) {
	c := Comparison{Of: of, To: to}
	var pairs [][2]*Outcome
	floor := map[*Outcome]float64{}
	for _, s := range r.Settings {
		a, b := r.Outcome(s.Name, of), r.Outcome(s.Name, to)
		if a == nil || b == nil || len(settings) > 0 && !slices.Contains(settings, s.Name) {
			continue
		}
		c.Settings = append(c.Settings, s.Name)
		pairs = append(pairs, [2]*Outcome{a, b})
		floor[a], floor[b] = 1/s.Seconds, 1/s.Seconds
	}
	if len(pairs) == 0 {
		return c, false
	}
	ratio := func(figure func(o *Outcome) Sample, least func(o *Outcome) float64) Interval {
		return paired(pairs, func(a, b *Outcome, seed int) float64 {
			return math.Log(max(figure(a).Seeds[seed], least(a)) / max(figure(b).Seeds[seed], least(b)))
		}).exp()
	}
	none := func(*Outcome) float64 { return tiny }
	c.Mean = ratio(func(o *Outcome) Sample { return o.Mean }, none)
	c.P99 = ratio(func(o *Outcome) Sample { return o.P99 }, none)
	c.Goodput = ratio(func(o *Outcome) Sample { return o.Goodput }, func(o *Outcome) float64 { return floor[o] })
	c.GPUSeconds = ratio(func(o *Outcome) Sample { return o.GPUSeconds }, none)
	objective := r.objective()
	c.InTime = paired(pairs, func(a, b *Outcome, seed int) float64 {
		return a.InTime[objective].Seeds[seed] - b.InTime[objective].Seeds[seed]
	})
	return c, true
}

// objective returns the index of the objective among the multiples.
func (r *Result) objective() int { return slices.Index(r.Multiples, r.Objective) }

// paired returns the mean of change over the pairs, with its interval over the seeds. For each
// seed, change compares the two runs of a pair.
func paired(pairs [][2]*Outcome, change func(a, b *Outcome, seed int) float64) Interval {
	seeds := make([]float64, len(pairs[0][0].Mean.Seeds))
	for i := range seeds {
		for _, p := range pairs {
			seeds[i] += change(p[0], p[1], i) / float64(len(pairs))
		}
	}
	return Mean(seeds)
}
