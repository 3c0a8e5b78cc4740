package profile

import (
	"slices"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// Line is a function's service time by CPU quota: A + B/q, with q in cores (Amdahl). It is a line
// in 1/q. A is the time that no quota makes shorter, and B is the CPU time of a batch. Neither is
// negative. QUART's compensator uses the line to find the quota for a wanted time.
type Line struct {
	A, B float64 // seconds, core seconds
	R2   float64 // share of the variance that the line explains; 1 if all times are equal
}

// fewestQuotas is the number of distinct quotas that a line needs. Any two points have a line
// through them.
const fewestQuotas = 3

// Fit returns the line through points that differ only in their quota. It uses least squares,
// weighted by the points' numbers of batches. It skips points without a quota or a time, and
// returns false for fewer than three quotas.
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
	if !(xx > 0) {
		return Line{}, false
	}
	l := Line{B: max(xy/xx, 0), R2: 1}
	if l.A = my - l.B*mx; l.A < 0 { // the best line among those through 0
		l.A, l.B = 0, (xy+n*mx*my)/(xx+n*mx*mx)
	}
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

// At returns the service time in seconds with a quota in thousandths of a core.
func (l Line) At(quota int) float64 { return l.A + 1000*l.B/float64(max(quota, 1)) }

// Group is the points of one batch size and length, sorted by quota.
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
