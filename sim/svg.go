package sim

import (
	"fmt"
	"io"

	"github.com/stagecoach-serving/stagecoach/bench/chart"
)

// WriteSVG draws the run on the first seed over time: the offered load, and each policy's latency,
// waiting tasks and replicas.
func (r Result) WriteSVG(w io.Writer) error {
	plots := []chart.Plot{
		{Title: "offered, requests/s"}, {Title: "latency, mean in s", LogY: true}, {Title: "waiting tasks"}, {Title: "replicas"},
	}
	for i, p := range r.Policies {
		s := p.Series
		waiting, replicas := make([]float64, len(s.T)), make([]float64, len(s.T))
		for k := range s.T {
			waiting[k] = float64(s.Waiting[k])
			for _, of := range s.Replicas {
				replicas[k] += float64(of[k])
			}
		}
		if i == 0 {
			plots[0].Lines = []chart.Line{{X: s.T, Y: s.Offered, Color: -1}}
		}
		for k, values := range [][]float64{s.Latency, waiting, replicas} {
			plots[k+1].Lines = append(plots[k+1].Lines, chart.Line{Name: p.Name, Color: i, X: s.T, Y: values, Steps: k == 2})
		}
	}
	for _, p := range r.Pipelines {
		if p.SLO > 0 && len(r.Pipelines) == 1 {
			plots[1].Marks = []chart.Mark{{Name: "objective", At: p.SLO}}
		}
	}
	for i := range plots {
		plots[i].XUnit = func(v float64) string { return fmt.Sprintf("%g s", v) }
	}
	return chart.WriteColumn(w, plots...)
}
