package quart

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/bench/chart"
	"github.com/stagecoach-serving/stagecoach/sim/study"
)

// versus is the comparison in a cell. Its ratios are another contender's figures divided by ours.
// Above 1, ours is better.
type versus struct {
	other         string // empty: nothing to compare
	latency, gpus study.Interval
}

// compareBounds compares ours with the contender other. If other is empty, it compares ours with
// the contender that has the smallest mean latency. A failed request counts with its timeout.
// Contenders above the budget are left out. If ours is above the budget, or no other contender is
// left, the result is empty.
func compareBounds(r *study.Result, setting, other string) versus {
	own := r.Outcome(setting, byStages)
	if own == nil || r.OverBudget(own) {
		return versus{}
	}
	var best *study.Outcome
	for _, c := range r.Contenders {
		o := r.Outcome(setting, c.Name)
		if o == nil || c.Ours || r.OverBudget(o) || other != "" && c.Name != other {
			continue
		}
		if best == nil || o.Mean.Mean < best.Mean.Mean {
			best = o
		}
	}
	if best == nil {
		return versus{}
	}
	return versus{best.Contender, over(best.Mean.Seeds, own.Mean.Seeds), over(best.GPUSeconds.Seeds, own.GPUSeconds.Seeds)}
}

func over(a, b []float64) study.Interval {
	out := make([]float64, len(a))
	for i := range a {
		out[i] = a[i] / b[i]
	}
	return study.GeometricMean(out)
}

// question is a panel of a map.
type question struct {
	title, below, above string
	other               string // empty: the best
	gpus                bool   // compare GPUs instead of latency
}

var questions = []question{
	{"Mean latency: the best other over stage by stage", "stage by stage is slower", "it is faster", "", false},
	{"GPU-seconds: the same other over stage by stage", "stage by stage takes more", "it takes fewer", "", true},
	{"Mean latency: whole pipelines over stage by stage", "stage by stage is slower", "it is faster", byPipelines, false},
	{"Mean latency: the model as one function over stage by stage", "stage by stage is slower", "it is faster", byModel, false},
}

// cell returns the ratio that answers a question, or NaN if there is none, and the note behind it:
// the best contender's letter, and ~ if the interval includes 1.
func (m *shownMap) cell(q question, row, column axis) (float64, string) {
	v := compareBounds(m.result, m.at(row, column), q.other)
	if v.other == "" {
		return math.NaN(), ""
	}
	i, note := v.latency, ""
	if q.gpus {
		i = v.gpus
	}
	if q.other == "" {
		note = " " + boundsLetter(v.other)
	}
	if i.Low <= 1 && 1 <= i.High {
		note += "~"
	}
	return i.Value, note
}

// shownMap is the part of a map that a result has.
type shownMap struct {
	boundsMap
	result *study.Result
}

func shownMaps(r *study.Result) []shownMap {
	var out []shownMap
	for _, m := range boundsMaps() {
		has := func(row, column axis) bool { return r.Outcome(m.at(row, column), byStages) != nil }
		s := shownMap{m, r}
		s.rows = slices.DeleteFunc(slices.Clone(m.rows), func(row axis) bool {
			return !slices.ContainsFunc(m.columns, func(column axis) bool { return has(row, column) })
		})
		s.columns = slices.DeleteFunc(slices.Clone(m.columns), func(column axis) bool {
			return !slices.ContainsFunc(m.rows, func(row axis) bool { return has(row, column) })
		})
		if len(s.rows) > 0 {
			out = append(out, s)
		}
	}
	return out
}

func labels(all []axis) []string {
	var out []string
	for _, a := range all {
		out = append(out, a.label)
	}
	return out
}

// drawBounds draws a figure of each map.
func drawBounds(r *study.Result) ([]study.Figure, error) {
	var out []study.Figure
	for _, m := range shownMaps(r) {
		f := figure{m.name, chart.Figure{Title: m.title + ": does scaling stage by stage pay?", Columns: 2, Notes: boundsNotes(r)}}
		for _, q := range questions {
			p := chart.Heat{
				Title: q.title, XTitle: m.columnTitle, YTitle: m.rowTitle, Rows: labels(m.rows), Columns: labels(m.columns), Below: q.below, Above: q.above,
			}
			for _, row := range m.rows {
				var values []float64
				var notes []string
				for _, column := range m.columns {
					v, note := m.cell(q, row, column)
					values, notes = append(values, v), append(notes, note)
				}
				p.Values, p.Notes = append(p.Values, values), append(p.Notes, notes)
			}
			f.Panels = append(f.Panels, p)
		}
		one, err := f.write()
		if err != nil {
			return nil, err
		}
		one.Name = "bounds-" + m.name
		out = append(out, one)
	}
	return out, nil
}

func boundsNotes(r *study.Result) []string {
	var letters []string
	for _, c := range r.Contenders {
		if l := boundsLetter(c.Name); l != "" {
			letters = append(letters, l+" "+c.Title)
		}
	}
	return []string{
		fmt.Sprintf("Simulated: %s, runs in pairs. All may have twice the work in GPUs, and are tuned by %d configurations each. The best other: %s; it is chosen with the results known. ",
			seeds(r.Seeds), r.Tuned.Candidates, strings.Join(letters, ", ")),
		"~ the 95 % confidence interval has 1. n/a: stage by stage, or the other, takes more than the budget.",
	}
}

// WriteBounds writes the maps as tables, then the outcome of every contender in each cell.
func WriteBounds(r *study.Result, w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "# %s\n\n%s\n", r.Title, strings.Join(boundsNotes(r), ""))
	for _, m := range shownMaps(r) {
		fmt.Fprintf(&b, "\n## %s\n", m.title)
		for _, q := range questions {
			m.table(&b, q)
		}
	}
	objective := slices.Index(r.Multiples, r.Objective)
	b.WriteString("\n## Everyone\n\nMean latency in T, where a failed request takes its timeout; requests within 2 T; GPUs on average.\n\n| cell |")
	for _, c := range r.Contenders {
		fmt.Fprintf(&b, " %s |", c.Title)
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(r.Contenders)) + "\n")
	for _, s := range r.Settings {
		fmt.Fprintf(&b, "| %s |", s.Name)
		for _, c := range r.Contenders {
			o := r.Outcome(s.Name, c.Name)
			if o == nil {
				b.WriteString(" |")
				continue
			}
			fmt.Fprintf(&b, " %.3g, %.3g %%, %.3g |", o.Mean.Mean/s.Service, 100*o.InTime[objective].Mean, o.GPUs.Mean)
		}
		b.WriteString("\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// table writes a panel as a table.
func (m *shownMap) table(b *strings.Builder, q question) {
	fmt.Fprintf(b, "\n%s.\n\n| %s \\ %s |", q.title, m.rowTitle, m.columnTitle)
	for _, c := range m.columns {
		fmt.Fprintf(b, " %s |", c.label)
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(m.columns)) + "\n")
	for _, row := range m.rows {
		fmt.Fprintf(b, "| %s |", row.label)
		for _, column := range m.columns {
			if v, note := m.cell(q, row, column); note != "" || !math.IsNaN(v) {
				fmt.Fprintf(b, " %.2f%s |", v, note)
			} else {
				b.WriteString(" n/a |")
			}
		}
		b.WriteString("\n")
	}
}
