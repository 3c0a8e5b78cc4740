package quart

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/bench/chart"
	"github.com/stagecoach-serving/stagecoach/sim/study"
)

// axisLabels returns the names of groups on axes.
func axisLabels(groups []string) []string {
	var out []string
	for _, g := range groups {
		out = append(out, axisLabel(g))
	}
	return out
}

// cvFigures returns figures like Figures 7 and 8a: the effect of burstiness, on all models together
// and on each.
func (d *drawing) cvFigures() []figure {
	groups := d.group(true)
	if len(groups) == 0 {
		return nil
	}
	all := modelsOf(d.of("", groups...))
	objective := slices.Index(d.Multiples, d.Objective)
	pool := func(title, unit string, geometric bool, figure func(*study.Outcome, study.SettingInfo, int) float64) chart.Bars {
		return bars(title, unit, axisLabels(groups), d.rivals, 0, func(c string, i int) shown { return d.pooled(d.of("", groups[i]), c, geometric, figure) })
	}
	inTime := pool(fmt.Sprintf("Answered within %g T", d.Objective), "% of requests, mean over models", false, func(o *study.Outcome, _ study.SettingInfo, seed int) float64 {
		return 100 * o.InTime[objective].Seeds[seed]
	})
	inTime.Top = 100
	for _, s := range inTime.Series {
		for i := range s.Ends {
			s.Ends[i].High = min(s.Ends[i].High, 100)
		}
	}
	cost := pool("GPUs", "on average over time and models", false, func(o *study.Outcome, _ study.SettingInfo, seed int) float64 { return o.GPUs.Seeds[seed] })
	cost.Guides = []chart.Mark{{Name: "budget", At: d.Budget}}
	of := d.notes("Models: " + strings.Join(all, ", ") + ". T is a model's latency without waits. Gaps between requests are gamma distributed.")
	together := figure{"cv", chart.Figure{Title: "Latency, requests in time and GPUs, by the CV of the gaps between requests, of all models (after QUART's Figure 7)", Notes: of, Panels: []chart.Panel{
		pool("Mean latency", "multiples of T, geometric mean over models", true, inMultiples(meanLatency)), inTime, cost,
	}}}
	lat := figure{"cv-latency", chart.Figure{Title: "Mean latency by model and CV of the gaps between requests (after QUART's Figure 7a)", Notes: of, Columns: 2}}
	good := figure{"cv-goodput", chart.Figure{Title: fmt.Sprintf("Goodput by model and CV of the gaps between requests: answered within %g T (after QUART's Figure 7b)", d.Objective), Notes: of, Columns: 2}}
	for _, m := range all {
		lat.Panels = append(lat.Panels, bars(m, "seconds", axisLabels(groups), d.rivals, 0, func(c string, i int) shown { return latency(d.one(m, groups[i], c), meanLatency) }))
		good.Panels = append(good.Panels, bars(m, "requests/s", axisLabels(groups), d.rivals, 0, func(c string, i int) shown {
			o := d.one(m, groups[i], c)
			if o == nil {
				return unknown
			}
			return show(o, o.Goodput, 1)
		}))
	}
	quantiles := figure{"cv-quantiles", chart.Figure{Title: "Latency quantiles by the CV of the gaps between requests, of all models (after QUART's Figure 8a)", Notes: of, Columns: 2}}
	which := []func(*study.Outcome) study.Sample{p50, p75, p99}
	for _, g := range groups {
		quantiles.Panels = append(quantiles.Panels, bars(axisLabel(g), "multiples of T, geometric mean over models", []string{"p50", "p75", "p99"}, d.rivals, 0, func(c string, i int) shown {
			return d.pooled(d.of("", g), c, true, inMultiples(which[i]))
		}))
	}
	return []figure{together, lat, good, quantiles}
}

// one returns the outcome of a contender on the setting of a model in a group, or nil.
func (d *drawing) one(model, group, contender string) *study.Outcome {
	for _, s := range d.of(model, group) {
		return d.Outcome(s.Name, contender)
	}
	return nil
}

// waiting returns how many calls wait in all stages, on average over time, in the run of a seed.
func waiting(o *study.Outcome, _ study.SettingInfo, seed int) float64 {
	sum := 0.0
	for _, s := range o.Stages {
		sum += s.Queue.Seeds[seed]
	}
	return sum
}

// queueFigures returns figures like Figure 8b: how many calls wait, in all stages and at each.
func (d *drawing) queueFigures() []figure {
	groups := d.group(true)
	if len(groups) == 0 {
		return nil
	}
	first := d.of("", groups...)[0].Model
	var stageNames []string
	staged := slices.DeleteFunc(slices.Clone(d.rivals), func(c study.ContendInfo) bool {
		o := d.one(first, groups[0], c.Name)
		if o != nil && stageNames == nil { // of the first contender: ours
			for _, s := range o.Stages {
				stageNames = append(stageNames, s.Name)
			}
		}
		return o == nil || !slices.EqualFunc(o.Stages, stageNames, func(s study.StageOutcome, n string) bool { return s.Name == n })
	})
	f := figure{"cv-queues", chart.Figure{
		Title: "Calls that wait, on average over time, by the CV of the gaps between requests (after QUART's Figure 8b)",
		Notes: d.notes("Who serves whole models has one queue, and is in the first panel only."),
		Panels: []chart.Panel{bars("In all stages together", "calls, mean over models", axisLabels(groups), d.rivals, 0, func(c string, i int) shown {
			return d.pooled(d.of("", groups[i]), c, false, waiting)
		})},
	}}
	for _, g := range groups {
		p := bars(first+", "+axisLabel(g)+", at each stage", "calls", stageNames, staged, 0, func(c string, i int) shown {
			o := d.one(first, g, c)
			if o == nil || len(o.Stages) <= i {
				return unknown
			}
			return show(o, o.Stages[i].Queue, 1)
		})
		for i, c := range staged {
			p.Series[i].Style = slices.IndexFunc(d.rivals, func(r study.ContendInfo) bool { return r.Name == c.Name })
		}
		f.Panels = append(f.Panels, p)
	}
	return []figure{f}
}

// ratio compares two contenders on settings. It is unknown if one of them was not run.
func (d *drawing) ratio(of, to string, settings []study.SettingInfo, which func(study.Comparison) study.Interval) shown {
	var asked []string
	for _, s := range settings {
		asked = append(asked, s.Name)
	}
	c, ok := d.Compare(of, to, asked...)
	if !ok || len(asked) == 0 {
		return unknown
	}
	return shown{Interval: which(c)}
}

// observations returns a figure like Figure 2: how burstiness changes from stage to stage, and how
// many calls wait at each, with fixed replicas.
func (d *drawing) observations() []figure {
	var cvs, queues chart.Bars
	for i, s := range d.of("", observed) {
		o := d.Outcome(s.Name, oneEach)
		if o == nil {
			continue
		}
		cv, queue := chart.BarSeries{Name: s.Name, Style: i}, chart.BarSeries{Name: s.Name, Style: i}
		cvs.Groups = nil
		for _, st := range o.Stages {
			cvs.Groups = append(cvs.Groups, st.Name)
			for _, to := range []struct {
				s *chart.BarSeries
				v shown
			}{{&cv, show(o, st.CV, 1)}, {&queue, show(o, st.Queue, 1)}} {
				to.s.Values, to.s.Ends, to.s.Notes = append(to.s.Values, to.v.Value), append(to.s.Ends, chart.Ends{Low: to.v.Low, High: to.v.High}), append(to.s.Notes, to.v.mark)
			}
		}
		cvs.Series, queues.Series = append(cvs.Series, cv), append(queues.Series, queue)
	}
	if len(cvs.Series) == 0 {
		return nil
	}
	cvs.Title, cvs.Unit = "CV of the gaps between calls of a stage", "each stage with one replica"
	queues.Title, queues.Unit, queues.Groups = "Calls that wait at each stage", "on average over time", cvs.Groups
	return []figure{{"observed", chart.Figure{
		Title: "How burstiness goes through a pipeline whose replicas are given (after QUART's Figure 2)", Panels: []chart.Panel{cvs, queues},
		Notes: []string{fmt.Sprintf("Simulated: the slowest stage computes %g %% of the time; the paper does not say how many requests came. %s, %g minutes each.%s", 100*observedLoad, strings.ToUpper(seeds(d.Seeds)[:1])+seeds(d.Seeds)[1:], observedFor.Minutes(), whiskers)},
	}}}
}

// versus returns figures of ours against the best baseline of each setting.
func (d *drawing) versus() []figure {
	all := modelsOf(d.of("", d.groups...))
	if len(d.rivals) < 2 || len(all) == 0 {
		return nil
	}
	f := figure{"versus", chart.Figure{
		Title: d.ours + " against the best baseline, by model and load",
		Notes: []string{
			d.from() + " Numbers are ratios of runs on the same seeds; ~ their 95 % confidence interval has 1. n/a: not run.",
			fmt.Sprintf("The best baseline of a setting is the one with the least mean latency among those that have at most %g GPUs on average and a twentieth more, or no more than ours has there. It is chosen with the results known, which favours it.", d.Budget),
		},
	}}
	for _, q := range []struct {
		title, below, above string
		of                  func(study.Comparison) study.Interval
	}{
		{"Mean latency: ours over the best baseline's", "ours is faster", "ours is slower", func(c study.Comparison) study.Interval { return c.Mean }},
		{"p99: ours over the best baseline's", "ours is faster", "ours is slower", func(c study.Comparison) study.Interval { return c.P99 }},
		{"GPU-seconds: ours over the best baseline's", "ours takes fewer", "ours takes more", func(c study.Comparison) study.Interval { return c.GPUSeconds }},
	} {
		p := chart.Heat{Title: q.title, Rows: all, Columns: axisLabels(d.groups), Below: q.below, Above: q.above}
		for _, m := range all {
			var row []float64
			var notes []string
			for _, g := range d.groups {
				v, note := d.ratio(d.Ours, study.BestBaseline, d.of(m, g), q.of), ""
				if v.Low <= 1 && 1 <= v.High {
					note = " ~"
				}
				row, notes = append(row, v.Value), append(notes, note)
			}
			p.Values, p.Notes = append(p.Values, row), append(p.Notes, notes)
		}
		f.Panels = append(f.Panels, p)
	}
	return []figure{f}
}

// sweep returns figures of every configuration that was tried.
func (d *drawing) sweep() []figure {
	f := figure{"sweep", chart.Figure{
		Title: "Every configuration that was tried: GPUs against latency on the loads of the tuning", Columns: 2,
		Notes: []string{fmt.Sprintf(
			"Lines are Pareto fronts; large marks are what was chosen: the least latency within the budget of %g GPUs, else the fewest GPUs. At most %d configurations of each contender, %s; latency is the geometric mean over runs, in multiples of T, where a failed request has taken its timeout.",
			d.Tuned.Budget, d.Tuned.Candidates, seeds(d.Tuned.Seeds))},
	}}
	for _, g := range d.groups {
		p := chart.Scatter{
			Title: axisLabel(g), XTitle: "GPUs, on average over time", YTitle: "mean latency, multiples of T", LogX: true, LogY: true,
			Guides: []chart.Mark{{Name: fmt.Sprintf("budget: %g GPUs", d.Tuned.Budget), At: d.Tuned.Budget, Vertical: true}},
		}
		for k, c := range d.rivals {
			i := slices.IndexFunc(d.Tuned.Choices, func(t study.Choice) bool { return t.Group == g && t.Contender == c.Name })
			if i < 0 {
				continue
			}
			t := d.Tuned.Choices[i]
			s := chart.Points{Name: c.Title, Style: k, Join: chart.Front, Strong: []int{t.Chosen}}
			for _, at := range t.Points {
				s.X, s.Y = append(s.X, at.GPUs), append(s.Y, math.Exp(at.Score))
				tip := c.Title
				for n, knob := range t.Knobs {
					tip += fmt.Sprintf(", %s %.3g", knob, at.Knobs[n])
				}
				s.Tips = append(s.Tips, tip)
			}
			p.Series = append(p.Series, s)
		}
		if len(p.Series) > 0 {
			f.Panels = append(f.Panels, p)
		}
	}
	if len(f.Panels) == 0 {
		return nil
	}
	return []figure{f}
}

// ablations returns figures of ours without each of its parts, over ours.
func (d *drawing) ablations() []figure {
	without := slices.DeleteFunc(slices.Clone(d.Contenders), func(c study.ContendInfo) bool { return c.Like != d.Ours })
	groups := slices.DeleteFunc(slices.Clone(d.groups), func(g string) bool {
		return !slices.Contains(dissected, g) || !slices.ContainsFunc(d.of("", g), func(s study.SettingInfo) bool {
			return slices.ContainsFunc(without, func(c study.ContendInfo) bool { return d.Outcome(s.Name, c.Name) != nil })
		})
	})
	if len(groups) == 0 {
		return nil
	}
	f := figure{"ablations", chart.Figure{
		Title: d.ours + " without each of its parts: above 1, the part helps",
		Notes: []string{d.from() + whiskers + " Ratios are of runs on the same seeds. n/a: not run.", "The whole has the same configuration; geometric means over the models that it was tuned on."},
	}}
	for _, q := range []struct {
		title string
		of    func(study.Comparison) study.Interval
	}{
		{"Mean latency", func(c study.Comparison) study.Interval { return c.Mean }},
		{"99th percentile of latency", func(c study.Comparison) study.Interval { return c.P99 }},
		{"GPU-seconds", func(c study.Comparison) study.Interval { return c.GPUSeconds }},
	} {
		p := bars(q.title, "ratio to the whole", axisLabels(groups), without, 1, func(c string, i int) shown {
			return d.ratio(c, d.Ours, slices.DeleteFunc(d.of("", groups[i]), func(s study.SettingInfo) bool { return !tunedOn(Model{Name: s.Model}) }), q.of)
		})
		p.Guides = []chart.Mark{{Name: "whole", At: 1}}
		f.Panels = append(f.Panels, p)
	}
	return []figure{f}
}
