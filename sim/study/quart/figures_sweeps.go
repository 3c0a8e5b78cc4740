package quart

import (
	"fmt"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/bench/chart"
	"github.com/stagecoach-serving/stagecoach/sim/study"
)

// drawSweeps draws one figure of the sweeps, with a row per condition: mean latencies and GPUs.
func drawSweeps(r *study.Result) ([]study.Figure, error) {
	d := newDrawing(r)
	f := figure{"conditions", chart.Figure{
		Title: "Mean latency and GPUs with one condition changed", Columns: 2,
		Notes: d.notes(fmt.Sprintf("Model: %s, gaps with a CV of %d. T is its latency without waits.", bert, sweptCV)),
	}}
	for _, axis := range []struct{ groups, title string }{
		{sweepStarts, "time of a start, equal for all"},
		{sweepCores, "speed-up with cores"},
		{sweepGaps, "CV of the gaps"},
		{sweepLoad, "load"},
		{sweepShape, "shape of the load"},
		{sweepMemory, "memory per server"},
	} {
		var points []study.SettingInfo
		var labels []string
		for _, s := range d.Settings {
			if label, ok := strings.CutPrefix(s.Group, axis.groups); ok {
				points, labels = append(points, s), append(labels, label)
			}
		}
		if len(points) == 0 {
			continue
		}
		at := func(figure func(*study.Outcome, study.SettingInfo, int) float64) func(string, int) shown {
			return func(c string, i int) shown { return d.pooled(points[i:i+1], c, false, figure) }
		}
		cost := bars("GPUs by "+axis.title, "on average over time", labels, d.rivals, 0, at(func(o *study.Outcome, _ study.SettingInfo, seed int) float64 { return o.GPUs.Seeds[seed] }))
		if !slices.ContainsFunc(points, func(s study.SettingInfo) bool { return s.Budget != 0 }) {
			cost.Guides = []chart.Mark{{Name: "budget", At: d.Budget}}
		}
		f.Panels = append(f.Panels, bars("Mean latency by "+axis.title, "multiples of T", labels, d.rivals, 0, at(inMultiples(meanLatency))), cost)
	}
	if len(f.Panels) == 0 {
		return nil, nil
	}
	one, err := f.write()
	return []study.Figure{one}, err
}
