package quart

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/bench/chart"
	"github.com/stagecoach-serving/stagecoach/sim/study"
)

// drawing is a result, prepared for figures.
type drawing struct {
	*study.Result
	ours string // its name in figures
	// the compared contenders, ours first; the index is the contender's style in all figures
	rivals []study.ContendInfo
	groups []string // groups of settings on which they are compared: CVs, then traces
}

// figure is a figure before it is drawn.
type figure struct {
	name string
	chart.Figure
}

// draw draws figures like the paper's 2, 6, 7 and 8, and the other figures of the comparison. It
// leaves out figures for which the result has no numbers.
func draw(r *study.Result) ([]study.Figure, error) {
	d := newDrawing(r)
	all := slices.Concat(d.traceFigures(), d.cvFigures(), d.queueFigures(), d.observations(), d.versus(), d.sweep(), d.ablations())
	var out []study.Figure
	for _, f := range all {
		one, err := f.write()
		if err != nil {
			return nil, err
		}
		out = append(out, one)
	}
	return out, nil
}

func (f figure) write() (study.Figure, error) {
	var b bytes.Buffer
	if err := f.WriteSVG(&b); err != nil {
		return study.Figure{}, fmt.Errorf("quart: figure %s: %w", f.name, err)
	}
	return study.Figure{Name: "quart-" + f.name, Title: f.Title, SVG: b.Bytes()}, nil
}

func newDrawing(r *study.Result) *drawing {
	d := &drawing{Result: r}
	for _, s := range r.Settings {
		if s.Group != observed && !slices.Contains(d.groups, s.Group) {
			d.groups = append(d.groups, s.Group)
		}
	}
	slices.SortStableFunc(d.groups, func(a, b string) int {
		return slices.Index([]bool{true, false}, isCV(a)) - slices.Index([]bool{true, false}, isCV(b))
	})
	for _, c := range r.Contenders {
		compared := slices.ContainsFunc(r.Settings, func(s study.SettingInfo) bool {
			return s.Group != observed && r.Outcome(s.Name, c.Name) != nil
		})
		switch {
		case c.Name == r.Ours:
			d.ours = c.Title
			if compared {
				d.rivals = slices.Insert(d.rivals, 0, c)
			}
		case compared && c.Like == "":
			d.rivals = append(d.rivals, c)
		}
	}
	return d
}

func isCV(group string) bool { return strings.HasPrefix(group, "cv=") }

// axisLabel returns the name of a group on an axis.
func axisLabel(group string) string { return strings.Replace(group, "cv=", "CV ", 1) }

// of returns the settings of some groups and of a model, or of all models if model is empty.
func (d *drawing) of(model string, groups ...string) []study.SettingInfo {
	var out []study.SettingInfo
	for _, s := range d.Settings {
		if slices.Contains(groups, s.Group) && (model == "" || s.Model == model) {
			out = append(out, s)
		}
	}
	return out
}

// modelsOf returns the models of settings, in their order.
func modelsOf(settings []study.SettingInfo) []string {
	var out []string
	for _, s := range settings {
		if !slices.Contains(out, s.Model) {
			out = append(out, s.Model)
		}
	}
	return out
}

// group returns the groups that are CVs, or those that are not.
func (d *drawing) group(cv bool) []string {
	return slices.DeleteFunc(slices.Clone(d.groups), func(g string) bool { return isCV(g) != cv })
}

// notes returns where the numbers come from, and what the marks mean.
func (d *drawing) notes(more ...string) []string {
	return append([]string{d.from() + whiskers + " Latencies are of all requests: a failed one has taken its timeout of 30 s. † more than 0.1 % of the requests failed. ‡ not tuned: its defaults. n/a: not run."}, more...)
}

const whiskers = " Whiskers are 95 % confidence intervals of means over seeds; one without an end goes on."

// from returns where the numbers come from.
func (d *drawing) from() string {
	return fmt.Sprintf("Simulated, with the code of production: %d GPUs, a mean load of %d, %s.", gpus, work, seeds(d.Seeds))
}

func seeds(s study.Seeds) string {
	if s.N <= 1 {
		return fmt.Sprintf("seed %d", s.First)
	}
	return fmt.Sprintf("seeds %d to %d", s.First, s.First+uint64(s.N)-1)
}

// shown is what a bar shows.
type shown struct {
	study.Interval
	mark string
}

var unknown = shown{Interval: study.Interval{Value: math.NaN(), Low: math.NaN(), High: math.NaN()}}

// bars returns a panel with one bar per contender in each group. Its axis is logarithmic if the
// values differ much.
func bars(title, unit string, groups []string, of []study.ContendInfo, style int, at func(contender string, group int) shown) chart.Bars {
	p := chart.Bars{Title: title, Unit: unit, Groups: groups}
	least, most := math.Inf(1), 0.0
	for k, c := range of {
		s := chart.BarSeries{Name: c.Title, Style: style + k}
		for i := range groups {
			v := at(c.Name, i)
			s.Values = append(s.Values, v.Value)
			s.Ends = append(s.Ends, chart.Ends{Low: v.Low, High: v.High})
			s.Notes = append(s.Notes, v.mark)
			if v.Value > 0 {
				least, most = min(least, v.Value), max(most, v.Value)
			}
		}
		p.Series = append(p.Series, s)
	}
	if most > 15*least {
		p.Log, p.Unit = true, unit+" (logarithmic)"
	}
	return p
}

// show returns a figure of one outcome for a bar, multiplied by times.
func show(o *study.Outcome, s study.Sample, times float64) shown {
	return shown{study.Interval{Value: s.Mean * times, Low: max(s.Mean-s.CI, 0) * times, High: (s.Mean + s.CI) * times, N: len(s.Seeds)}, marks(o)}
}

// latency returns a latency for a bar. It is unknown if the contender was not run.
func latency(o *study.Outcome, s func(*study.Outcome) study.Sample) shown {
	if o == nil {
		return unknown
	}
	return show(o, s(o), 1)
}

func marks(outcomes ...*study.Outcome) string {
	out := ""
	if slices.ContainsFunc(outcomes, (*study.Outcome).Fails) {
		out += "†"
	}
	if slices.ContainsFunc(outcomes, func(o *study.Outcome) bool { return o.Untuned }) {
		out += "‡"
	}
	return out
}

// pooled summarizes a figure over settings: the mean over settings for each seed, then Student's
// interval over the seeds. It returns unknown if the figure is NaN for any setting or seed.
func (d *drawing) pooled(settings []study.SettingInfo, contender string, geometric bool, figure func(o *study.Outcome, s study.SettingInfo, seed int) float64) shown {
	sums := make([]float64, max(d.Seeds.N, 1))
	var outcomes []*study.Outcome
	for _, s := range settings {
		o := d.Outcome(s.Name, contender)
		if o == nil {
			return unknown
		}
		outcomes = append(outcomes, o)
		for seed := range sums {
			v := figure(o, s, seed)
			if geometric {
				v = math.Log(v)
			}
			if math.IsNaN(v) || math.IsInf(v, 0) {
				return unknown
			}
			sums[seed] += v / float64(len(settings))
		}
	}
	if len(outcomes) == 0 {
		return unknown
	}
	if !geometric {
		return shown{study.Mean(sums), marks(outcomes...)}
	}
	for i := range sums {
		sums[i] = math.Exp(sums[i])
	}
	return shown{study.GeometricMean(sums), marks(outcomes...)}
}

// The latencies in figures.
func meanLatency(o *study.Outcome) study.Sample { return o.Mean }
func p50(o *study.Outcome) study.Sample         { return o.P50 }
func p75(o *study.Outcome) study.Sample         { return o.P75 }
func p99(o *study.Outcome) study.Sample         { return o.P99 }

// inMultiples returns a seed's latency in multiples of T.
func inMultiples(of func(*study.Outcome) study.Sample) func(*study.Outcome, study.SettingInfo, int) float64 {
	return func(o *study.Outcome, s study.SettingInfo, seed int) float64 { return of(o).Seeds[seed] / s.Service }
}

// traceFigures returns figures like Figure 6: one for the trace that is played to all models, and
// one for the other traces together.
func (d *drawing) traceFigures() []figure {
	var out []figure
	var rest []string
	for _, g := range d.group(false) {
		if s := d.of("", g); len(s) < 3 {
			rest = append(rest, g)
		} else {
			out = append(out, d.traceFigure(g, "the trace "+g, s, func(s study.SettingInfo) string { return s.Model })...)
		}
	}
	if s := d.of("", rest...); len(s) > 0 {
		out = append(out, d.traceFigure("traces", "further traces", s, func(s study.SettingInfo) string { return s.Name })...)
	}
	return out
}

func (d *drawing) traceFigure(name, title string, settings []study.SettingInfo, label func(study.SettingInfo) string) []figure {
	var labels, sources []string
	for _, s := range settings {
		labels = append(labels, label(s))
		for _, t := range traces() {
			if source := s.Group + ": " + t.Source + "."; t.Name == s.Group && !slices.Contains(sources, source) {
				sources = append(sources, source)
			}
		}
	}
	notes := d.notes("Scaled to the same mean load; each seed has a window of its own, as far as there are that many. " + strings.Join(sources, " "))
	f := figure{name + "-latency", chart.Figure{Title: "Latency under " + title + " (after QUART's Figure 6a, c, d)", Notes: notes}}
	in := figure{name + "-in-time", chart.Figure{Title: "Requests answered in time under " + title + ", by objective (after QUART's Figure 6b)", Notes: notes, Columns: 3}}
	for _, q := range []struct {
		title string
		of    func(*study.Outcome) study.Sample
	}{{"Mean latency", meanLatency}, {"75th percentile", p75}, {"99th percentile", p99}} {
		f.Panels = append(f.Panels, bars(q.title, "seconds", labels, d.rivals, 0, func(c string, i int) shown {
			return latency(d.Outcome(settings[i].Name, c), q.of)
		}))
	}
	for i, s := range settings {
		in.Panels = append(in.Panels, d.inTime(labels[i], s))
	}
	return []figure{f, in}
}

// inTime returns the share of requests that each contender answered within multiples of T.
func (d *drawing) inTime(title string, s study.SettingInfo) chart.Scatter {
	p := chart.Scatter{
		Title: title, XTitle: fmt.Sprintf("objective, multiples of T = %g ms", math.Round(1000*s.Service)), YTitle: "% of requests", XMarks: d.Multiples, TopY: 100,
	}
	for k, c := range d.rivals {
		o := d.Outcome(s.Name, c.Name)
		if o == nil {
			continue
		}
		line := chart.Points{Name: c.Title, Style: k, Join: chart.Joined, X: d.Multiples}
		for _, in := range o.InTime {
			v := show(o, in, 100)
			line.Y = append(line.Y, v.Value)
			line.Ends = append(line.Ends, chart.Ends{Low: v.Low, High: min(v.High, 100)})
		}
		p.Series = append(p.Series, line)
	}
	return p
}
