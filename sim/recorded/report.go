package recorded

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench/chart"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/sim"
)

// Schema is the version of the JSON of a Report.
const Schema = "stagecoach-sim-recorded/1"

// Report compares what really happened with what was simulated.
type Report struct {
	Schema    string     `json:"schema"`
	Notes     []string   `json:"notes"`
	Recorded  Outcome    `json:"recorded"`
	Simulated sim.Result `json:"simulated"`
}

// Report returns the comparison with a result of the run's scenario.
func (r *Run) Report(simulated sim.Result) Report {
	return Report{Schema: Schema, Notes: append([]string{}, r.Notes...), Recorded: r.Outcome, Simulated: simulated}
}

// WriteText writes a table with a row for the recorded run, and one per policy and pipeline.
func (r Report) WriteText(w io.Writer) error {
	for _, n := range r.Notes {
		fmt.Fprintf(w, "Note: %s\n", n)
	}
	if len(r.Notes) > 0 {
		fmt.Fprintln(w)
	}
	t := console.NewTable(w)
	fmt.Fprintln(t, "RUN\tPIPELINE\tREQUESTS\tIN TIME\tMEAN\tP50\tP95\tP99\tFAILED\tREPLICA-SECONDS")
	row := func(run, pipeline string, cells ...string) {
		fmt.Fprintf(t, "%s\t%s\t%s\n", run, pipeline, strings.Join(cells, "\t"))
	}
	for _, p := range r.Recorded.Pipelines {
		requests, cost := fmt.Sprint(p.Requests), fmt.Sprintf("%.0f", p.ReplicaSeconds)
		if !p.Counted {
			row("what happened", p.Name, requests, "-", "-", "-", "-", "-", "-", cost)
			continue
		}
		row("what happened", p.Name, requests, percent(p.InTime), took(p.Mean), took(p.P50), took(p.P95), took(p.P99), percent(p.Failed), cost)
	}
	for _, x := range r.Simulated.Policies {
		for i, p := range x.Pipelines {
			row("simulated "+x.Name, p.Name, fmt.Sprintf("%.0f", p.Offered.Mean), percent(p.Attainment.Mean), took(p.Mean.Mean), took(p.P50.Mean),
				took(p.P95.Mean), took(p.P99.Mean), percent(p.Failed.Mean), fmt.Sprintf("%.0f", r.cost(&x, r.Recorded.Pipelines[i].stages)))
		}
	}
	return t.Flush()
}

// cost returns the replica-seconds of some stages under a policy.
func (r *Report) cost(x *sim.PolicyResult, stages []string) (sum float64) {
	for _, s := range x.Stages {
		if slices.Contains(stages, s.Name) {
			sum += s.Replicas.Mean * r.Simulated.Duration
		}
	}
	return sum
}

func percent(v float64) string { return fmt.Sprintf("%.1f %%", 100*v) }

// took formats seconds with three digits.
func took(s float64) string {
	if s <= 0 {
		return "0s"
	}
	d := time.Duration(s * float64(time.Second))
	unit := time.Duration(math.Pow(10, math.Floor(math.Log10(float64(d)))-2))
	return d.Round(max(unit, time.Microsecond)).String()
}

// WriteSVG draws both over time: the load, the mean latency, and the replicas of each stage. The
// simulated lines are those of the first seed.
func (r Report) WriteSVG(w io.Writer) error {
	if len(r.Simulated.Policies) == 0 {
		return fmt.Errorf("no policy to draw, want one or more")
	}
	first := r.Simulated.Policies[0].Series
	plots := []chart.Plot{{Title: "requests/s, recorded and simulated", Lines: []chart.Line{{X: first.T, Y: first.Offered, Color: -1}}}}
	latency := chart.Plot{Title: "latency, mean in s", LogY: true}
	for _, p := range r.Recorded.Pipelines {
		if p.latencies != nil {
			latency.Lines = append(latency.Lines, chart.Line{Name: "recorded " + p.Name, Color: -1, X: r.Recorded.T, Y: gaps(p.latencies)})
		}
	}
	for i, p := range r.Simulated.Policies {
		latency.Lines = append(latency.Lines, chart.Line{Name: p.Name, Color: i, X: p.Series.T, Y: gaps(p.Series.Latency)})
	}
	plots = append(plots, latency)
	for _, s := range r.Recorded.Stages {
		plot := chart.Plot{Title: "replicas of " + s.Name, Lines: []chart.Line{{Name: "what happened", Color: -1, X: r.Recorded.T, Y: floats(s.Replicas), Steps: true}}}
		at := slices.Index(r.Simulated.Stages, s.Name)
		for i, p := range r.Simulated.Policies {
			if at >= 0 && at < len(p.Series.Replicas) {
				plot.Lines = append(plot.Lines, chart.Line{Name: p.Name, Color: i, X: p.Series.T, Y: floats(p.Series.Replicas[at]), Steps: true})
			}
		}
		plots = append(plots, plot)
	}
	for i := range plots {
		plots[i].XUnit = func(v float64) string { return fmt.Sprintf("%g s", v) }
	}
	return chart.WriteColumn(w, plots...)
}

func floats(values []int) []float64 {
	out := make([]float64, len(values))
	for i, v := range values {
		out[i] = float64(v)
	}
	return out
}

// gaps returns values with NaN in place of 0, which means that nothing was measured.
func gaps(values []float64) []float64 {
	out := slices.Clone(values)
	for i, v := range out {
		if v == 0 {
			out[i] = math.NaN()
		}
	}
	return out
}
