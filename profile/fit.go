package profile

import (
	"slices"

	"github.com/stagecoach-serving/stagecoach/plan"
)

// Line is service time as a line in the inverse of the quota: a + b/q with q in cores. A is what no quota makes shorter, B is the
// CPU time that a batch takes: QUART's compensator inverts it.
type Line struct {
	A, B float64 // seconds, core seconds
	R2   float64 // share of the variance that the line explains; 1 where all times are the same
}

// fewestQuotas is how many distinct quotas a line needs that is more than the two points it goes through.
const fewestQuotas = 3

// Fit returns the line through points that differ in their quota alone, by least squares weighted with the points' batches, as the
// autoscaler does it; false for fewer than three quotas.
func Fit(points []plan.Point) (Line, bool) {
	var quotas []int
	var x, y, weight []float64
	for _, p := range points {
		if p.CPUMilli <= 0 || p.Mean <= 0 {
			continue
		}
		if !slices.Contains(quotas, p.CPUMilli) {
			quotas = append(quotas, p.CPUMilli)
		}
		x, y, weight = append(x, 1000/float64(p.CPUMilli)), append(y, p.Mean.Seconds()), append(weight, float64(max(p.N, 1)))
	}
	if len(quotas) < fewestQuotas {
		return Line{}, false
	}
	var n, mx, my float64
	for i, w := range weight {
		n, mx, my = n+w, mx+w*x[i], my+w*y[i]
	}
	mx, my = mx/n, my/n
	var xx, xy float64
	for i, w := range weight {
		xx, xy = xx+w*(x[i]-mx)*(x[i]-mx), xy+w*(x[i]-mx)*(y[i]-my)
	}
	l := Line{B: xy / xx, R2: 1}
	l.A = my - l.B*mx
	var left, all float64
	for i, w := range weight {
		e := y[i] - l.A - l.B*x[i]
		left, all = left+w*e*e, all+w*(y[i]-my)*(y[i]-my)
	}
	if all > 0 {
		l.R2 = 1 - left/all
	}
	return l, true
}

// Group is the points of a batch size and a length, in the order of their quotas.
type Group struct {
	Batch, Length int
	Points        []Point
}

// Groups splits p by batch and length, sorted by both.
func (p Profile) Groups() []Group {
	points := slices.Clone(p.Points)
	slices.SortFunc(points, func(a, b Point) int {
		return Cell{a.Batch, a.Length, a.CPUMilli}.compare(Cell{b.Batch, b.Length, b.CPUMilli})
	})
	var out []Group
	for _, pt := range points {
		if last := len(out) - 1; last < 0 || out[last].Batch != pt.Batch || out[last].Length != pt.Length {
			out = append(out, Group{Batch: pt.Batch, Length: pt.Length})
		}
		g := &out[len(out)-1]
		g.Points = append(g.Points, pt)
	}
	return out
}

// Line fits the group.
func (g Group) Line() (Line, bool) { return Fit(Profile{Points: g.Points}.Plan()) }
