package chart

import (
	"cmp"
	"math"
	"slices"
)

// axis returns a scale for values from lo to hi. The values at the scale's ends are round. The last
// two arguments are the positions of the low end and of the high end.
func axis(lo, hi float64, log bool, from, to float64) scale {
	if !log {
		return fit(lo, hi, false, true, from, to)
	}
	if lo > hi { // no values
		lo, hi = 1, 10
	}
	lo, hi = niceFloor(lo), niceCeil(hi)
	for hi < 4.9*lo { // at least a factor of 5
		hi = niceCeil(hi * 1.01)
	}
	return scale{math.Log10(lo), math.Log10(hi), true, from, to}
}

// niceFloor returns the largest of 1, 2 or 5 times a power of ten that is at most v. v must be
// positive.
func niceFloor(v float64) float64 { return 1 / niceCeil(1/v) }

// marks returns about this many round values in the scale. On a logarithmic scale of up to about
// three powers of ten, they are 1, 2 and 5 times each power.
func (s scale) marks(about int) []float64 {
	if !s.log || s.hi-s.lo <= 2 || s.hi-s.lo > 3.2 {
		return s.ticks(about)
	}
	var out []float64
	for e := math.Floor(s.lo); e <= math.Ceil(s.hi); e++ {
		for _, d := range []float64{1, 2, 5} {
			if l := e + math.Log10(d); l >= s.lo-1e-9 && l <= s.hi+1e-9 {
				out = append(out, d*math.Pow(10, e))
			}
		}
	}
	return out
}

// greatest returns the value at the scale's end.
func (s scale) greatest() float64 {
	if s.log {
		return math.Pow(10, s.hi) * (1 + 1e-9)
	}
	return s.hi
}

// shown reports whether v has a place on the scale.
func (s scale) shown(v float64) bool { return known(v) && (v > 0 || !s.log) }

func known(v float64) bool { return !math.IsNaN(v) && !math.IsInf(v, 0) }

// span holds the smallest and the largest of the values that have a place.
type span struct{ lo, hi float64 }

func (s *span) see(v float64, log bool) {
	if known(v) && (v > 0 || !log) {
		s.lo, s.hi = min(s.lo, v), max(s.hi, v)
	}
}

// grid draws the lines of a vertical scale, and labels to the left of them. Labels need labelWidth.
func (c *canvas) grid(y scale, left, right float64) {
	for _, v := range y.marks(5) {
		c.line("g", left, y.at(v), right, y.at(v))
		c.text("m n", left-5, y.at(v)+4, "end", short(v))
	}
}

// labelWidth returns the width that the labels of a vertical scale need.
func (s scale) labelWidth() float64 {
	w := 0.0
	for _, v := range s.marks(5) {
		w = max(w, textWidth(short(v), 11))
	}
	return w + 8
}

// head draws a panel's title and its unit, and returns the y below them.
func (c *canvas) head(title, unit string, at box) float64 {
	y := at.y
	for _, l := range wrap(title, at.w/1.1, 13) {
		y += 17
		c.text("p", at.x, y-3, "start", l)
	}
	for _, l := range wrap(unit, at.w, 11) {
		y += 15
		c.text("m n", at.x, y-3, "start", l)
	}
	return y + 8
}

func headHeight(title, unit string, width float64) float64 {
	return 17*float64(len(wrap(title, width/1.1, 13))) + 15*float64(len(wrap(unit, width, 11))) + 8
}

// across draws horizontal marks from left to right, with their names at the right end. Names do not
// overlap.
func (c *canvas) across(marks []Mark, y scale, left, right float64) {
	below := math.Inf(-1)
	sorted := slices.Clone(marks)
	slices.SortStableFunc(sorted, func(a, b Mark) int { return cmp.Compare(y.at(a.At), y.at(b.At)) })
	for _, m := range sorted {
		c.line("k", left, y.at(m.At), right, y.at(m.At))
		below = max(y.at(m.At)+4, below+13)
		c.text("m n", right+4, below, "start", m.Name)
	}
}
