package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/stagecoach-serving/stagecoach/bench/chart"
	"github.com/stagecoach-serving/stagecoach/sim"
)

// table writes the rows in Markdown.
func table(out io.Writer, rows []row) error {
	var b strings.Builder
	b.WriteString("| price | mean latency | p99 | replica-seconds per second | paid per second of latency saved |\n|---|---|---|---|---|\n")
	for _, r := range rows {
		paid := ""
		if r.known {
			paid = fmt.Sprintf("%.2g", r.paid)
		}
		fmt.Fprintf(&b, "| %g | %s ms | %s ms | %s | %s |\n", r.price, plusMinus(r.latency, 1e3, 1), plusMinus(r.p99, 1e3, 0), plusMinus(r.replicas, 1, 2), paid)
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// plusMinus returns an estimate times unit, with this many digits behind the point.
func plusMinus(e sim.Estimate, unit float64, digits int) string {
	return fmt.Sprintf("%.*f ± %.*f", digits, e.Mean*unit, digits, e.CI*unit)
}

// figure draws latency and replicas over the price. A price of 0 has no place on a logarithmic
// axis, so it is a guide.
func figure(rows []row, seeds int) chart.Figure {
	panel := func(title, unit string, style int, factor float64, of func(row) sim.Estimate) chart.Scatter {
		p := chart.Points{Name: title, Style: style, Join: chart.Joined}
		for _, r := range rows[1:] {
			e := of(r)
			p.X, p.Y = append(p.X, r.price), append(p.Y, e.Mean*factor)
			p.Ends = append(p.Ends, chart.Ends{Low: (e.Mean - e.CI) * factor, High: (e.Mean + e.CI) * factor})
		}
		return chart.Scatter{
			YTitle: unit, XTitle: "price: replica-seconds per second of latency", LogX: true, Series: []chart.Points{p},
			Guides: []chart.Mark{{Name: "no price", At: of(rows[0]).Mean * factor}},
		}
	}
	return chart.Figure{
		Title: "What a price of latency buys", Columns: 2,
		Notes: []string{fmt.Sprintf("Three stages of 60, 180 and 90 ms, 30 requests per second of CV 2, starts of 1 s, objective 3 s. %d seeds; whiskers are 95 %% intervals. make bench-price", seeds)},
		Panels: []chart.Panel{
			panel("mean latency", "ms", 0, 1e3, func(r row) sim.Estimate { return r.latency }),
			panel("replicas on average", "replica-seconds per second", 1, 1, func(r row) sim.Estimate { return r.replicas }),
		},
	}
}
