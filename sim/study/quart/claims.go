package quart

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/sim/study"
)

// judge compares a result with the paper's claims, Q1 to Q13. The rules were decided before there
// were results:
//
//   - A comparison uses runs paired by seed, with Student's 95 % interval. A claim "holds" if the
//     interval excludes "no difference" and reaches the paper's value or a better one. It holds
//     "partly" if the interval only excludes "no difference". Otherwise the verdict is "no".
//   - Claims on the paper's trace are tested on all available traces.
//   - If the study has no published opponent, but those with eight cores, they are compared.
//   - A claim is "not measured" if the paper's value is an input of this simulation, if it needs
//     the paper's hardware, or if there is one seed and no interval.
//   - GPU-seconds are in no verdict, because the paper does not report them. They are among the
//     circumstances.
//
// Where the paper averages over models and loads, judge uses the kind of average that favours ours
// less:
//
//   - A reduction of latency is an arithmetic mean of ratios, as in the paper. A geometric mean
//     would show a larger reduction.
//   - A multiple of goodput is a geometric mean. An arithmetic mean would depend on the few
//     settings where the other contender has almost none. The ratio of the mean figures is given
//     beside it.
//   - For requests in time (Q3), both sides are summed over all settings before they are compared,
//     as for the paper's 47.5 %.
func judge(r *study.Result) []study.Claim {
	r, twins := withTwins(r)
	j := &judged{Result: r, twins: twins}
	for _, section := range []func(){j.q1, j.q2, j.q3, j.q4, j.q5, j.q6, j.q7, j.q8, j.q9, j.inputs, j.q13} {
		section()
	}
	for i := range j.claims {
		c := &j.claims[i]
		if r := reasons[c.ID]; r.why != "" && r.verdict == c.Verdict && !strings.Contains(c.With, againstTwins) {
			c.Why = r.why
		}
	}
	return j.claims
}

// judged is a result while it is judged.
type judged struct {
	*study.Result
	twins  bool // the paper's opponents are those with eight cores: see [withTwins]
	claims []study.Claim
}

// settings returns the names of the settings of a group and a model. "" stands for any group or
// model, "cv" for all groups of gamma loads, and "trace" for all groups of traces.
func (j *judged) settings(group, model string) []string {
	var out []string
	for _, s := range j.Settings {
		cv := strings.HasPrefix(s.Group, "cv=")
		in := s.Group == group || group == "cv" && cv || group == "trace" && !cv && s.Group != observed
		if in && (model == "" || s.Model == model) {
			out = append(out, s.Name)
		}
	}
	return out
}

// add adds a claim about a ratio. claimed is the paper's ratio. neutral is the ratio that means no
// difference. format writes ratios as text.
func (j *judged) add(c study.Claim, name string, got study.Interval, claimed, neutral float64, format func(study.Interval) string) {
	c.Ours, c.Verdict = format(got), verdict(got, claimed, neutral)
	c.Values = append([]study.Value{{Name: name, Interval: got}}, c.Values...)
	j.claims = append(j.claims, c)
}

// missing adds a claim that the settings at hand cannot test.
func (j *judged) missing(c study.Claim) {
	c.Verdict = study.NotMeasured
	j.claims = append(j.claims, c)
}

// verdict applies the rule of [judge].
func verdict(got study.Interval, claimed, neutral float64) study.Verdict {
	if claimed < neutral {
		got = study.Interval{Value: -got.Value, Low: -got.High, High: -got.Low, N: got.N}
		claimed, neutral = -claimed, -neutral
	}
	switch {
	case got.N == 1:
		return study.NotMeasured
	case !(got.Low > neutral): // also NaN
		return study.No
	case got.High >= claimed:
		return study.Holds
	}
	return study.Partly
}

// change formats a ratio as a change: 0.6 is −40 %.
func change(i study.Interval) string {
	p := func(v float64) string { return strings.Replace(fmt.Sprintf("%+.1f", 100*(v-1)), "-", "−", 1) }
	return fmt.Sprintf("%s %% (%s to %s)", p(i.Value), p(i.Low), p(i.High))
}

// times formats a ratio.
func times(i study.Interval) string {
	return fmt.Sprintf("%.2f× (%.2f to %.2f)", i.Value, i.Low, i.High)
}

// share formats a share.
func share(i study.Interval) string {
	return fmt.Sprintf("%.1f %% (%.1f to %.1f)", 100*i.Value, 100*i.Low, 100*i.High)
}

// circumstances returns a text with what a comparison of ours with another contender does not show:
// the GPU-seconds of both, and the failed requests of both.
func (j *judged) circumstances(to string, settings []string) string {
	c, _ := j.Compare(oursName, to, settings...)
	failed := func(name string) float64 {
		sum, n := 0.0, 0
		for _, s := range settings {
			if o := j.Outcome(s, name); o != nil {
				sum, n = sum+o.Failed.Mean, n+1
			}
		}
		return 100 * sum / float64(max(n, 1))
	}
	out := fmt.Sprintf("%d settings; %s of %s's GPU-seconds; failed %.2g %% of ours, %.2g %% of its requests", len(c.Settings), times(c.GPUSeconds), to, failed(oursName), failed(to))
	ofOPT := slices.Concat(j.settings("cv", opt), j.settings("trace", opt))
	if rest := slices.DeleteFunc(slices.Clone(settings), func(s string) bool { return slices.Contains(ofOPT, s) }); to == inflessName && len(rest) > 0 && len(rest) < len(settings) {
		if c, ok := j.Compare(oursName, to, rest...); ok {
			out += fmt.Sprintf("; without %s, of which a whole one takes longer to start than a run warms up: latency %s, goodput %s", opt, change(c.Mean), times(c.Goodput))
		}
	}
	return out + j.means()
}

// three has the contenders that the paper compares with, in its order.
var three = []string{inflessName, inferlineName, cocktailName}

// latency adds a claim on mean latency against each of the three.
func (j *judged) latency(id, what string, settings []string, paper [3]float64) {
	for i, to := range three {
		c := study.Claim{ID: id + string(rune('a'+i)), What: what + " against " + to, Paper: fmt.Sprintf("−%.1f %%", 100*paper[i])}
		is, ok := j.Compare(oursName, to, settings...)
		if !ok || len(settings) == 0 {
			j.missing(c)
			continue
		}
		c.With = j.circumstances(to, settings)
		j.reduction(c, to, settings, is.Mean, 1-paper[i])
	}
}

// reduction adds a claim about the ratio of our latency to another contender's. The ratio is
// averaged over settings for each seed, and then over seeds.
func (j *judged) reduction(c study.Claim, to string, settings []string, geometric study.Interval, claimed float64) {
	sum, n := []float64(nil), 0
	for _, s := range settings {
		a, b := j.Outcome(s, oursName), j.Outcome(s, to)
		if a == nil || b == nil {
			continue
		}
		if n++; sum == nil {
			sum = make([]float64, len(a.Mean.Seeds))
		}
		for i := range sum {
			sum[i] += a.Mean.Seeds[i] / b.Mean.Seeds[i]
		}
	}
	for i := range sum {
		sum[i] /= float64(n)
	}
	c.Values = []study.Value{{Name: "geometric mean over settings", Interval: geometric}}
	c.With += "; geometric mean " + change(geometric)
	j.add(c, "latency, ours/"+to, study.Mean(sum), claimed, 1, change)
}

func (j *judged) q1() {
	j.latency("Q1", "mean latency on traces", j.settings("trace", ""), [3]float64{0.871, 0.705, 0.367})
}

func (j *judged) q2() {
	paper := map[string]float64{bert: 0.162, llama: 0.091, whisper: 0.102, opt: 0.612, resnet: 0.41}
	for i, m := range []string{bert, llama, whisper, opt, resnet} {
		c := study.Claim{ID: "Q2" + string(rune('a'+i)), What: "mean latency on traces against " + cocktailName + ", " + m, Paper: fmt.Sprintf("−%.1f %%", 100*paper[m])}
		settings := j.settings("trace", m)
		is, ok := j.Compare(oursName, cocktailName, settings...)
		if !ok || len(settings) == 0 {
			j.missing(c)
			continue
		}
		c.With = j.circumstances(cocktailName, settings)
		j.reduction(c, cocktailName, settings, is.Mean, 1-paper[m])
	}
}

// tight is the multiple of the model's time for Q3.
const tight = 1.5

func (j *judged) q3() {
	settings := j.settings("trace", "")
	at := slices.Index(j.Multiples, tight)
	c := study.Claim{ID: "Q3", What: fmt.Sprintf("requests within %g of the model's time, on traces", tight), Paper: "47.5 %"}
	paper := [3]float64{2.19, 2.37, 2.09}
	in := j.seeds(oursName, settings, func(o *study.Outcome, seed int) float64 { return o.InTime[at].Seeds[seed] })
	known := len(in) > 0
	if known {
		j.add(c, "in time, ours", study.Mean(in), 0.475, 0, share)
	} else {
		j.missing(c)
	}
	for i, to := range three {
		c := study.Claim{ID: "Q3" + string(rune('a'+i)), What: c.What + ", times " + to + "'s", Paper: fmt.Sprintf("%.2f×", paper[i])}
		if !known {
			j.missing(c)
			continue
		}
		theirs := j.seeds(to, settings, func(o *study.Outcome, seed int) float64 { return o.InTime[at].Seeds[seed] })
		if len(theirs) == 0 {
			j.missing(c)
			continue
		}
		c.With = j.circumstances(to, settings)
		j.add(c, "in time, ours/"+to, quotient(logs(in), logs(theirs)), paper[i], 1, times)
	}
}

func (j *judged) q4() {
	j.latency("Q4", "mean latency over all CVs", j.settings("cv", ""), [3]float64{0.698, 0.772, 0.478})
}

func (j *judged) q5() {
	for _, part := range []struct {
		id, what, group string
		paper           [3]float64
	}{{"Q5", "goodput over all CVs", "cv", [3]float64{13.5, 14.4, 2.3}}, {"Q5-8", "goodput at CV 8", "cv=8", [3]float64{17.9, 32.4, 3.9}}} {
		settings := j.settings(part.group, "")
		for i, to := range three {
			c := study.Claim{ID: part.id + string(rune('a'+i)), What: part.what + ", times " + to + "'s", Paper: fmt.Sprintf("%.1f×", part.paper[i])}
			is, ok := j.Compare(oursName, to, settings...)
			if !ok || len(settings) == 0 {
				j.missing(c)
				continue
			}
			all := j.ratioOfSums(oursName, to, settings)
			c.Values = []study.Value{{Name: "of all settings' goodput together, in parts of what was asked", Interval: all}}
			c.With = j.circumstances(to, settings) + "; in time of all together " + times(all)
			j.add(c, "goodput, ours/"+to, is.Goodput, part.paper[i], 1, times)
		}
	}
}

// seeds returns a figure of a contender per seed: the mean over settings.
func (j *judged) seeds(contender string, settings []string, figure func(o *study.Outcome, seed int) float64) []float64 {
	var out []float64
	n := 0
	for _, s := range settings {
		o := j.Outcome(s, contender)
		if o == nil {
			continue
		}
		if out == nil {
			out = make([]float64, len(o.Mean.Seeds))
		}
		for i := range out {
			out[i] += figure(o, i)
		}
		n++
	}
	for i := range out {
		out[i] /= float64(n)
	}
	return out
}

// ratio returns a figure of one contender divided by another's. For each seed, it is the geometric
// mean over settings.
func (j *judged) ratio(of, to string, settings []string, figure func(o *study.Outcome, seed int) float64) study.Interval {
	logs := func(name string) []float64 {
		return j.seeds(name, settings, func(o *study.Outcome, seed int) float64 { return math.Log(figure(o, seed)) })
	}
	return quotient(logs(of), logs(to))
}

// ratioOfSums returns the ratio of two contenders' requests within the objective. For each seed, it
// averages both over the settings before it divides.
func (j *judged) ratioOfSums(of, to string, settings []string) study.Interval {
	at := slices.Index(j.Multiples, j.Objective)
	in := func(name string) []float64 {
		return logs(j.seeds(name, settings, func(o *study.Outcome, seed int) float64 { return o.InTime[at].Seeds[seed] }))
	}
	return quotient(in(of), in(to))
}

// logs returns the logarithms of values. Values below a millionth count as a millionth.
func logs(values []float64) []float64 {
	out := make([]float64, len(values))
	for i, v := range values {
		out[i] = math.Log(max(v, 1e-6))
	}
	return out
}

// quotient returns the geometric mean of a/b over the seeds. a and b are logarithms.
func quotient(a, b []float64) study.Interval {
	out := make([]float64, min(len(a), len(b)))
	for i := range out {
		out[i] = math.Exp(a[i] - b[i])
	}
	if len(out) == 0 {
		return study.Interval{Value: math.NaN(), Low: math.NaN(), High: math.NaN()}
	}
	return study.GeometricMean(out)
}
