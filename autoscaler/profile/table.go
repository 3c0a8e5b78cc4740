package profile

import (
	"fmt"
	"strconv"
	"time"
)

// Head returns the column heads of [Profile.Rows].
func Head() []string {
	return []string{"CPU", "BATCH", "LENGTH", "MEAN", "± 95 %", "CV", "BATCHES", "NOTE"}
}

// Rows returns the points as the rows of a table.
func (p Profile) Rows() [][]string {
	var out [][]string
	for _, g := range p.Groups() {
		for _, pt := range g.Points {
			note := ""
			if pt.Loose {
				note = fmt.Sprintf("wider than %.3g %%", 100*p.Relative)
			}
			out = append(out, []string{
				fmt.Sprintf("%dm", pt.CPUMilli), strconv.Itoa(pt.Batch), length(pt.Length), short(pt.Mean), short(pt.Err),
				fmt.Sprintf("%.2f", pt.CV), strconv.Itoa(pt.N), note,
			})
		}
	}
	return out
}

func length(n int) string {
	if n == 0 {
		return "-"
	}
	return strconv.Itoa(n)
}

// short formats a duration with about three digits.
func short(seconds float64) string {
	d := duration(seconds)
	unit := time.Nanosecond
	for unit*1000 <= d {
		unit *= 10
	}
	return d.Round(unit).String()
}

// Name describes the group.
func (g Group) Name() string {
	name := fmt.Sprintf("batch %d", g.Batch)
	if g.Length > 0 {
		name += fmt.Sprintf(", length %d", g.Length)
	}
	return name
}

// Say describes the line; "" if there is none.
func (g Group) Say() string {
	l, ok := g.Line()
	if !ok {
		return ""
	}
	return fmt.Sprintf("%s: %.3g ms + %.3g ms / cores (R² %.3f)", g.Name(), 1000*l.A, 1000*l.B, l.R2)
}
