// Package report draws the result of a load as one HTML page with figures, SVG charts and tables.
// The page loads nothing from the network, and follows the reader's light or dark scheme.
package report

import (
	"bytes"
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench/chart"
	"github.com/stagecoach-serving/stagecoach/bench/load"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

//go:embed page.html
var page string

// Write writes the page.
func Write(w io.Writer, r load.Result) error {
	t, err := template.New("page").Funcs(template.FuncMap{
		"dur": duration, "maybe": maybe, "percent": percent, "num": number, "share": func(part, of int64) string { return percent(float64(part) / float64(max(of, 1))) },
	}).Parse(page)
	if err != nil {
		return err
	}
	all := r.Targets
	if len(all) > 1 {
		all = append([]load.Figures{r.Total}, all...)
	}
	v := view{Result: r, All: all, Style: template.CSS(chart.PlotStyle), Title: title(r), When: r.Started.UTC().Format("2 January 2006, 15:04:05 MST")}
	for _, f := range r.Functions {
		for _, s := range f.Samples {
			v.Replicas = max(v.Replicas, s.Replicas)
		}
	}
	for _, p := range plots(r) {
		var b bytes.Buffer
		if err := p.WriteSVG(&b); err != nil {
			return err
		}
		//nolint:gosec // made above, with its texts escaped
		v.Charts = append(v.Charts, template.HTML(b.String()))
	}
	for _, f := range r.Targets {
		v.Stages = append(v.Stages, stages(f)...)
		for _, k := range f.Errors {
			v.Errors = append(v.Errors, failure{f.Name, k, 100 * float64(k.Count) / float64(max(f.Offered, 1))})
		}
	}
	return t.Execute(w, v)
}

type view struct {
	load.Result
	All      []load.Figures
	Title    string
	When     string
	Style    template.CSS
	Charts   []template.HTML
	Stages   []stage
	Errors   []failure
	Replicas int
}

type failure struct {
	Target string
	load.Kind
	Percent float64 // of the target's requests
}

// stage is a row with two bars. Their widths are percentages of the target's longest row.
type stage struct {
	Target string
	load.Stage
	WaitWidth, ServiceWidth float64
}

func stages(f load.Figures) []stage {
	longest := 0.0
	for _, s := range f.Stages {
		longest = max(longest, s.Wait.Mean+s.Service.Mean)
	}
	var out []stage
	for _, s := range f.Stages {
		out = append(out, stage{f.Name, s, 100 * s.Wait.Mean / max(longest, 1e-9), 100 * s.Service.Mean / max(longest, 1e-9)})
	}
	return out
}

func title(r load.Result) string {
	var names []string
	for _, t := range r.Targets {
		names = append(names, t.Name)
	}
	if len(names) > 4 {
		names = append(names[:3], fmt.Sprintf("%d more", len(names)-3))
	}
	return "Load on " + strings.Join(names, ", ")
}

func plots(r load.Result) []chart.Plot {
	sec := func(v float64) string { return fmt.Sprintf("%g s", v) }
	rate := chart.Plot{Title: "Requests per second", XUnit: sec}
	quantiles := chart.Plot{Title: "Latency of the requests due in each second", Unit: duration, XUnit: sec, LogY: true}
	offered, answered, good, failed := chart.Line{Name: "offered", Color: -1, Area: true, Steps: true}, chart.Line{Name: "answered", Color: 0}, chart.Line{Name: "good", Color: 2}, chart.Line{Name: "failed", Color: 6}
	p50, p99 := chart.Line{Name: "p50", Color: 0}, chart.Line{Name: "p99", Color: 1}
	bad := false
	for _, s := range r.Total.Seconds {
		t := float64(s.T)
		offered.X, offered.Y = append(offered.X, t), append(offered.Y, float64(s.Offered))
		for line, v := range map[*chart.Line]float64{
			&answered: float64(s.Answered), &good: float64(s.Good), &failed: float64(s.Failed + s.NotSent), &p50: s.P50, &p99: s.P99,
		} {
			// At the middle of the second.
			line.X, line.Y = append(line.X, t+0.5), append(line.Y, v)
		}
		bad = bad || s.Failed+s.NotSent > 0
		rate.Tips = append(rate.Tips, chart.Tip{From: t, To: t + 1, Text: fmt.Sprintf("second %d: %d offered, %d answered, %d good, %d failed, %d not sent", s.T, s.Offered, s.Answered, s.Good, s.Failed, s.NotSent)})
		quantiles.Tips = append(quantiles.Tips, chart.Tip{From: t, To: t + 1, Text: fmt.Sprintf("second %d: p50 %s, p99 %s", s.T, duration(s.P50), duration(s.P99))})
	}
	if n := len(offered.X); n > 0 { // draws the last second at full width
		offered.X, offered.Y = append(offered.X, offered.X[n-1]+1), append(offered.Y, offered.Y[n-1])
	}
	rate.Lines = []chart.Line{offered, answered, good}
	if bad {
		rate.Lines = append(rate.Lines, failed)
	}
	quantiles.Lines = []chart.Line{p50, p99}
	cdf := chart.Plot{Title: "Share of answers within a latency", Unit: percent, XUnit: duration, LogX: true, TopY: 1}
	for i, f := range r.Targets {
		l := chart.Line{Name: f.Name, Color: i}
		for _, s := range f.Distribution {
			l.X, l.Y = append(l.X, s.Latency), append(l.Y, s.Share)
		}
		cdf.Lines = append(cdf.Lines, l)
	}
	if slo := common(r.Targets); slo > 0 {
		quantiles.Marks = append(quantiles.Marks, chart.Mark{Name: "objective", At: slo})
		cdf.Marks = append(cdf.Marks, chart.Mark{Name: "objective", At: slo, Vertical: true})
	}
	out := []chart.Plot{rate, quantiles}
	if len(r.Functions) > 0 {
		out = append(out, overTime("Requests that wait for a replica", r, sec, func(s load.Sample) float64 { return float64(s.Waiting) }),
			overTime("Replicas that are ready", r, sec, func(s load.Sample) float64 { return float64(s.Replicas) }))
		for i := range out[3].Lines {
			out[3].Lines[i].Steps = true
		}
	}
	return append(out, cdf)
}

// common returns the objective that all targets share; 0: none, or different ones.
func common(all []load.Figures) float64 {
	slo := 0.0
	for i, f := range all {
		if i > 0 && f.SLO != slo {
			return 0
		}
		slo = f.SLO
	}
	return slo
}

func overTime(title string, r load.Result, sec func(float64) string, value func(load.Sample) float64) chart.Plot {
	p := chart.Plot{Title: title, XUnit: sec}
	for i, f := range r.Functions {
		l := chart.Line{Name: pipeline.ParseKey(f.Function).Short(), Color: i}
		for _, s := range f.Samples {
			l.X, l.Y = append(l.X, s.T), append(l.Y, value(s))
		}
		p.Lines = append(p.Lines, l)
	}
	return p
}

// duration formats with at most three digits, without trailing zeros.
func duration(seconds float64) string {
	d := time.Duration(seconds * float64(time.Second))
	switch {
	case d <= 0:
		return "0"
	case d < time.Millisecond:
		return number(float64(d)/1e3) + " µs"
	case d < time.Second:
		return number(float64(d)/1e6) + " ms"
	}
	return number(seconds) + " s"
}

// number formats with three digits, or more above 1000.
func number(v float64) string {
	if v >= 999.5 {
		return fmt.Sprintf("%.0f", v)
	}
	// parses what FormatFloat wrote.
	short, _ := strconv.ParseFloat(strconv.FormatFloat(v, 'g', 3, 64), 64)
	return strconv.FormatFloat(short, 'f', -1, 64)
}

func maybe(seconds *float64) string {
	if seconds == nil {
		return "–"
	}
	return duration(*seconds)
}

// percent adds a decimal only if it matters.
func percent(share float64) string {
	return strings.TrimSuffix(fmt.Sprintf("%.1f", share*100), ".0") + " %"
}
