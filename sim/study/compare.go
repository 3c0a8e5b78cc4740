package study

import (
	"cmp"
	"math"
	"slices"
)

// BestBaseline names, in comparisons, the best baseline of each setting: see [Result.BestBaseline].
const BestBaseline = "best baseline"

// overBudget is by how much a baseline may exceed the budget and still be the best one: it was tuned on other loads.
const overBudget = 1.05

// Comparison is how one contender does to another, from pairs of runs on the same seeds: for each seed the mean over settings, of
// logarithms where it is a ratio, and then Student's interval over the seeds. It is about chance in loads and work, not about which
// settings were asked.
type Comparison struct {
	Of         string   `json:"of"`
	To         string   `json:"to"`
	Settings   []string `json:"settings"` // that both were evaluated on
	Mean       Interval `json:"mean"`     // ratios: 0.5 is half of the latency
	P99        Interval `json:"p99"`
	Goodput    Interval `json:"goodput"` // no good request counts as one in the run
	GPUSeconds Interval `json:"gpu_s"`
	InTime     Interval `json:"in_time"` // a difference of parts: 0.1 is ten points more
}

// tiny stands for 0 in ratios.
const tiny = 1e-9

// Outcome returns what came of a contender on a setting, or nil. Of [BestBaseline] and [MostInTime] it is that one's.
func (r *Result) Outcome(setting, contender string) *Outcome {
	switch contender {
	case BestBaseline:
		contender = r.BestBaseline(setting)
	case MostInTime:
		contender = r.mostInTime(setting)
	}
	i := slices.IndexFunc(r.Outcomes, func(o Outcome) bool { return o.Setting == setting && o.Contender == contender })
	if i < 0 {
		return nil
	}
	return &r.Outcomes[i]
}

// MostInTime names, in comparisons, who answers the most requests within the objective: of those that know what no policy can, whatever they
// take, and of those that may be the best baseline. For what knows the future need not be good.
const MostInTime = "most in time"

// mostInTime is the contender that [MostInTime] names on a setting. Empty: there is none that knows what no policy can.
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

// baseline says whether a contender's outcome may be that of the best baseline.
func (r *Result) baseline(c ContendInfo, o *Outcome) bool {
	own := r.Outcome(o.Setting, r.Ours)
	return !c.Oracle && !c.Ours && (!r.OverBudget(o) || own != nil && o.GPUs.Mean <= own.GPUs.Mean)
}

// BestBaseline is, of the contenders that are neither ours nor know what no policy can, and that have on average at most the study's budget
// of GPUs and a twentieth more on this setting, or no more than ours has there, the one with the least mean latency. It is chosen with the
// results known, which favours it. Empty: none keeps to that.
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

// mayFail is the part of requests that may fail without a mark.
const mayFail = 0.001

// Fails says that more than a thousandth of the requests failed.
func (o *Outcome) Fails() bool { return o.Failed.Mean > mayFail }

// OverBudget says that an outcome had on average more than the budget of GPUs, its setting's or else the study's, and a twentieth more.
func (r *Result) OverBudget(o *Outcome) bool {
	budget := r.Budget
	if i := slices.IndexFunc(r.Settings, func(s SettingInfo) bool { return s.Name == o.Setting }); i >= 0 {
		budget = cmp.Or(r.Settings[i].Budget, budget)
	}
	return o.GPUs.Mean > overBudget*budget
}

// Compare compares a contender with another on settings, all there are if none is named; each may be [BestBaseline] or [MostInTime]. False says that there
// is no setting that both were evaluated on.
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

// objective is the index of it among the multiples.
func (r *Result) objective() int { return slices.Index(r.Multiples, r.Objective) }

// paired is the mean over settings of what a pair of runs differs in, with its interval over the seeds.
func paired(pairs [][2]*Outcome, change func(a, b *Outcome, seed int) float64) Interval {
	seeds := make([]float64, len(pairs[0][0].Mean.Seeds))
	for i := range seeds {
		for _, p := range pairs {
			seeds[i] += change(p[0], p[1], i) / float64(len(pairs))
		}
	}
	return Mean(seeds)
}
