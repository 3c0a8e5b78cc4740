package chart

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
)

// Scatter is a panel of points.
type Scatter struct {
	Title          string
	XTitle, YTitle string // with units
	LogX, LogY     bool
	XMarks         []float64 // labels of the horizontal axis; nil: at round values
	TopY           float64   // the vertical axis ends here or above
	Series         []Points
	Guides         []Mark
}

// Points are the points of one series. A point is left out if one of its values is NaN, or if it is
// not positive on a logarithmic axis.
type Points struct {
	Name   string
	Style  int
	X, Y   []float64
	Ends   []Ends   // of whiskers around each Y; nil: none
	Strong []int    // points that stand out, larger and with an edge; then the others are pale
	Tips   []string // text while the pointer is on a point; nil: none
	Join   Join
}

// Join selects the line through points.
type Join int

// The values of Join.
const (
	Loose  Join = iota // none
	Joined             // from each to the next
	// Front is the Pareto front, drawn as stairs. On both axes, less is better, so no point is below
	// the front.
	Front
)

const scatterPlotH = 220

func (p Scatter) check() error {
	for _, s := range p.Series {
		for _, l := range []struct {
			what string
			n    int
			need bool
		}{{"Y", len(s.Y), true}, {"intervals", len(s.Ends), s.Ends != nil}, {"tips", len(s.Tips), s.Tips != nil}} {
			if l.need && l.n != len(s.X) {
				return fmt.Errorf("scatter %q: series %q has %d %s, want one for each of %d X", p.Title, s.Name, l.n, l.what, len(s.X))
			}
		}
		for _, i := range s.Strong {
			if i < 0 || i >= len(s.X) {
				return fmt.Errorf("scatter %q: series %q: point %d stands out, want one of %d", p.Title, s.Name, i, len(s.X))
			}
		}
	}
	return nil
}

func (p Scatter) keys() []key {
	var out []key
	for _, s := range p.Series {
		k := key{s.Name, s.Style, ofPoints}
		if s.Join == Joined {
			k.kind = ofLines
		}
		out = append(out, k)
	}
	return out
}

func (p Scatter) height(width float64) float64 {
	return headHeight(p.Title, p.YTitle, width) + 14*float64(len(p.upright())) + scatterPlotH + 40
}

// upright returns the vertical guides.
func (p Scatter) upright() []Mark {
	return slices.DeleteFunc(slices.Clone(p.Guides), func(m Mark) bool { return !m.Vertical })
}

func (p Scatter) level() []Mark {
	return slices.DeleteFunc(slices.Clone(p.Guides), func(m Mark) bool { return m.Vertical })
}

func (p Scatter) draw(c *canvas, at box) {
	top := c.head(p.Title, p.YTitle, at) + 14*float64(len(p.upright()))
	x, y := p.axes(at, top)
	c.grid(y, x.from, x.to)
	c.line("a", x.from, y.from, x.to, y.from)
	p.below(c, x, y)
	for i, m := range p.upright() {
		px := x.at(m.At)
		c.line("k", px, top-4, px, y.from)
		half := textWidth(m.Name, 11) / 2
		c.text("m n", max(min(px, at.x+at.w-half), at.x+half), top-8-14*float64(len(p.upright())-1-i), "middle", m.Name)
	}
	c.across(p.level(), y, x.from, x.to)
	for _, s := range p.Series {
		s.lines(c, x, y)
	}
	for _, s := range p.Series {
		s.points(c, x, y, false)
	}
	for _, s := range p.Series { // above everything else
		s.points(c, x, y, true)
	}
}

func (p Scatter) axes(at box, top float64) (x, y scale) {
	sx, sy := span{1e300, -1e300}, span{1e300, -1e300}
	for _, s := range p.Series {
		for i := range s.X {
			if known(s.X[i]) && known(s.Y[i]) && (s.X[i] > 0 || !p.LogX) && (s.Y[i] > 0 || !p.LogY) {
				sx.see(s.X[i], p.LogX)
				sy.see(s.Y[i], p.LogY)
				if s.Ends != nil {
					sy.see(s.Ends[i].High, p.LogY)
					sy.see(s.Ends[i].Low, p.LogY)
				}
			}
		}
	}
	right := 10.0
	for _, m := range p.Guides {
		if m.Vertical {
			sx.see(m.At, p.LogX)
		} else {
			sy.see(m.At, p.LogY)
			right = max(right, textWidth(m.Name, 11)+8)
		}
	}
	for _, v := range p.XMarks {
		sx.see(v, p.LogX)
	}
	if p.TopY > 0 {
		sy.see(p.TopY, p.LogY)
	}
	y = axis(sy.lo, sy.hi, p.LogY, top+scatterPlotH, top)
	left := at.x + y.labelWidth()
	if p.XMarks == nil {
		return axis(sx.lo, sx.hi, p.LogX, left, at.x+at.w-right), y
	}
	const edge = 14 // keeps points off the vertical axis
	x = fit(sx.lo, sx.hi, false, false, left+edge, at.x+at.w-right-edge)
	if p.LogX {
		x = scale{math.Log10(sx.lo), max(math.Log10(sx.hi), math.Log10(sx.lo)+.1), true, x.from, x.to}
	}
	part := (x.hi - x.lo) * edge / (x.to - x.from)
	x.lo, x.hi, x.from, x.to = x.lo-part, x.hi+part, left, at.x+at.w-right
	return x, y
}

// below draws the title of the horizontal axis, and as many of its labels as fit.
func (p Scatter) below(c *canvas, x, y scale) {
	ticks := p.XMarks
	if ticks == nil {
		ticks = x.marks(7)
	}
	end := math.Inf(-1)
	for _, v := range ticks {
		px, half := x.at(v), textWidth(short(v), 11)/2
		c.line("a", px, y.from, px, y.from+4)
		if px-half > end+4 {
			c.text("m n", px, y.from+17, "middle", short(v))
			end = px + half
		}
	}
	c.text("m n", (x.from+x.to)/2, y.from+33, "middle", p.XTitle)
}

// lines draws the line through the points, and their whiskers.
func (s Points) lines(c *canvas, x, y scale) {
	var at []string
	flush := func() {
		if len(at) > 1 {
			fmt.Fprintf(c, `<polyline fill="none" stroke="%s" stroke-width="1.8" stroke-linejoin="round" points="%s"/>`+"\n", styleColor(s.Style), strings.Join(at, " "))
		}
		at = nil
	}
	add := func(px, py float64) { at = append(at, fmt.Sprintf("%.1f,%.1f", px, py)) }
	for i := range s.X {
		if !x.shown(s.X[i]) || !y.shown(s.Y[i]) {
			flush()
			continue
		}
		px := x.at(s.X[i])
		if s.Join == Joined {
			add(px, y.at(s.Y[i]))
		}
		if s.Ends != nil && known(s.Ends[i].Low) && y.shown(s.Ends[i].High) {
			low := y.from
			if y.shown(s.Ends[i].Low) {
				low = y.at(s.Ends[i].Low)
			}
			c.stroke(s.Style, px, low, px, y.at(s.Ends[i].High))
		}
	}
	flush()
	if s.Join != Front {
		return
	}
	front := s.front(x, y)
	for k, i := range front {
		if k > 0 {
			add(x.at(s.X[i]), y.at(s.Y[front[k-1]]))
		}
		add(x.at(s.X[i]), y.at(s.Y[i]))
	}
	flush()
}

// front returns the points that have no other point below and left of them, from left to right.
func (s Points) front(x, y scale) []int {
	var order, out []int
	for i := range s.X {
		if x.shown(s.X[i]) && y.shown(s.Y[i]) {
			order = append(order, i)
		}
	}
	slices.SortStableFunc(order, func(a, b int) int {
		return cmp.Or(cmp.Compare(s.X[a], s.X[b]), cmp.Compare(s.Y[a], s.Y[b]))
	})
	for _, i := range order {
		if len(out) == 0 || s.Y[i] < s.Y[out[len(out)-1]] {
			out = append(out, i)
		}
	}
	return out
}

// points draws the points that stand out, or the others.
func (s Points) points(c *canvas, x, y scale, strong bool) {
	for i := range s.X {
		if slices.Contains(s.Strong, i) != strong || !x.shown(s.X[i]) || !y.shown(s.Y[i]) {
			continue
		}
		tip := ""
		if s.Tips != nil {
			tip = s.Tips[i]
		}
		r, class := 4.5, "f"
		if strong {
			r, class = 7, "w"
		} else if s.Strong != nil {
			r, class = 4, "q"
		}
		c.point(s.Style, x.at(s.X[i]), y.at(s.Y[i]), r, class, tip)
	}
}
