package chart

import (
	"fmt"
	"math"
	"strings"
)

// Bars is a panel of grouped bars, with one bar of each series per group. Values are at least 0.
// NaN means unknown, and is shown as n/a.
type Bars struct {
	Title  string
	Unit   string // of the values: "mean latency, s"
	Groups []string
	Series []BarSeries
	Log    bool
	Top    float64 // the axis ends here or above
	Guides []Mark  // lines across the panel; Vertical is not used
}

// BarSeries is a series with one value per group.
type BarSeries struct {
	Name   string
	Style  int
	Values []float64
	Ends   []Ends   // of whiskers; nil: none. A whisker beyond the axis is drawn without its end
	Notes  []string // text after each value: "†"; nil: none
}

// Ends are the ends of an interval around a value. NaN means that there is none.
type Ends struct{ Low, High float64 }

const (
	barsPlotH = 185
	barShare  = .86 // of a group's width
	leastTurn = 11  // width in pixels that a turned label needs
)

func (p Bars) check() error {
	for _, s := range p.Series {
		for _, l := range []struct {
			what string
			n    int
			need bool
		}{{"values", len(s.Values), true}, {"intervals", len(s.Ends), s.Ends != nil}, {"notes", len(s.Notes), s.Notes != nil}} {
			if l.need && l.n != len(p.Groups) {
				return fmt.Errorf("bars %q: series %q has %d %s, want one for each of %d groups", p.Title, s.Name, l.n, l.what, len(p.Groups))
			}
		}
		for i, v := range s.Values {
			if v < 0 {
				return fmt.Errorf("bars %q: series %q, group %q: %g, want at least 0", p.Title, s.Name, p.Groups[i], v)
			}
		}
	}
	return nil
}

func (p Bars) keys() []key {
	var out []key
	missing := false
	for _, s := range p.Series {
		out = append(out, key{s.Name, s.Style, ofBars})
		for i := range s.Values {
			missing = missing || !known(s.Values[i])
		}
	}
	if missing {
		out = append(out, key{"n/a", 0, ofMissing})
	}
	return out
}

// height leaves room for the highest possible names of groups.
func (p Bars) height(width float64) float64 {
	g := p.geometry(box{w: width})
	return headHeight(p.Title, p.Unit, width) + barsPlotH + g.namesH
}

// barGeometry holds the positions in a panel of bars.
type barGeometry struct {
	plot         box // of the bars, with the labels above them
	y            scale
	group, bar   float64 // widths
	turned       bool    // labels of bars are turned
	labels       bool
	names        [][]string // of groups, by line; nil: turned
	namesH, room float64    // height for names below the plot, and for labels above the highest bar
}

func (p Bars) geometry(at box) barGeometry {
	s, ends := span{1e300, 0}, 0.0
	for _, r := range p.Series {
		for i, v := range r.Values {
			s.see(v, p.Log)
			if r.Ends != nil && known(v) && known(r.Ends[i].High) {
				ends = max(ends, r.Ends[i].High)
			}
		}
	}
	// an interval of few values may be many times as long as its bar
	s.hi = max(s.hi, min(ends, 2*s.hi))
	for _, g := range p.Guides {
		s.see(g.At, p.Log)
	}
	s.see(p.Top, p.Log)
	low := 0.0
	if p.Log {
		low = s.lo / 1.3 // so that the smallest bar is visible
	}
	var g barGeometry
	y := axis(low, s.hi, p.Log, 1, 0)
	left, right := y.labelWidth(), 0.0
	for _, m := range p.Guides {
		right = max(right, textWidth(m.Name, 11)+8)
	}
	g.plot = box{at.x + left, at.y, at.w - left - right, barsPlotH}
	g.group = g.plot.w / float64(max(len(p.Groups), 1))
	g.bar = g.group * barShare / float64(max(len(p.Series), 1))
	var labels []string
	for _, r := range p.Series {
		for i := range r.Values {
			labels = append(labels, r.label(i))
		}
	}
	need := widest(labels, 10)
	g.turned = need+2 > g.bar
	g.labels = !g.turned || g.bar >= leastTurn
	g.room = 14
	if g.labels {
		g.room = 16
		if g.turned {
			g.room = need + 8
		}
	}
	y.from, y.to = at.y+barsPlotH, at.y+g.room
	g.y = y
	g.names, g.namesH = groupNames(p.Groups, g.group)
	return g
}

// groupNames breaks names into lines that fit below their groups. If a word does not fit, all names
// are turned, and names is nil.
func groupNames(groups []string, width float64) (names [][]string, height float64) {
	lines := 1
	for _, n := range groups {
		l := wrap(n, width-6, 12)
		if widest(l, 12) > width-4 {
			return nil, widest(groups, 12) + 14
		}
		lines = max(lines, len(l))
		names = append(names, l)
	}
	return names, 15*float64(lines) + 8
}

// everyNth returns n if every n-th turned name has space, for groups of this width in pixels.
func everyNth(width float64) int { return max(int(math.Ceil(13/width)), 1) }

// label returns the text at bar i.
func (s BarSeries) label(i int) string {
	text := "n/a"
	if known(s.Values[i]) {
		text = short(s.Values[i])
	}
	if s.Notes != nil {
		text += s.Notes[i]
	}
	return text
}

func (p Bars) draw(c *canvas, at box) {
	top := c.head(p.Title, p.Unit, at)
	g := p.geometry(box{at.x, top, at.w, at.h - (top - at.y)})
	right := g.plot.x + g.plot.w
	c.grid(g.y, g.plot.x, right)
	each := func(draw func(c *canvas, g barGeometry, s BarSeries, i int, x float64)) {
		for i := range p.Groups {
			x := g.plot.x + (float64(i)+(1-barShare)/2)*g.group
			for k, s := range p.Series {
				draw(c, g, s, i, x+float64(k)*g.bar)
			}
		}
	}
	each(p.bar)
	c.line("a", g.plot.x, g.y.from, right, g.y.from)
	c.across(p.Guides, g.y, g.plot.x, right)
	each(p.label) // above everything else
	for i := range p.Groups {
		p.name(c, g, i)
	}
}

// bar draws bar i of a series at x, with its whisker.
func (p Bars) bar(c *canvas, g barGeometry, s BarSeries, i int, x float64) {
	v := s.Values[i]
	if !g.y.shown(v) {
		return
	}
	tip := fmt.Sprintf("%s, %s: %s", s.Name, p.Groups[i], s.label(i))
	if s.Ends != nil && known(s.Ends[i].Low) && known(s.Ends[i].High) {
		tip += fmt.Sprintf(" (%s to %s)", short(s.Ends[i].Low), short(s.Ends[i].High))
	}
	c.bar(s.Style, box{x + .5, g.y.at(v), max(g.bar-1, .5), g.y.from - g.y.at(v)}, tip)
	if s.Ends != nil {
		c.whisker(x+g.bar/2, min(3, g.bar/3), g.y, s.Ends[i])
	}
}

// label writes the value of bar i of a series above it, if there is space.
func (p Bars) label(c *canvas, g barGeometry, s BarSeries, i int, x float64) {
	v, middle, end := s.Values[i], x+g.bar/2, g.y.from
	if g.y.shown(v) {
		end = g.y.at(v)
		if s.Ends != nil && g.y.shown(s.Ends[i].High) {
			end = min(end, g.y.at(s.Ends[i].High))
		}
	}
	switch class := "s o"; {
	case !g.labels && !known(v):
		c.cross(middle, end-6)
	case !g.labels && (s.Notes == nil || textWidth(s.Notes[i], 10) > g.bar):
	case !g.labels:
		c.text(class, middle, end-3, "middle", s.Notes[i])
	case g.turned:
		c.turned(class, middle+3.5, end-4, "start", s.label(i))
	default:
		c.text(class, middle, end-4, "middle", s.label(i))
	}
}

// whisker draws an interval on a vertical scale.
func (c *canvas) whisker(x, tick float64, y scale, e Ends) {
	if !known(e.Low) || !y.shown(e.High) || e.Low == e.High {
		return
	}
	low, high := y.from, y.at(e.High)
	if y.shown(e.Low) {
		low = y.at(e.Low)
	}
	c.line("w", x, low, x, high)
	if e.High <= y.greatest() { // otherwise the whisker continues beyond the axis
		c.line("w", x-tick, high, x+tick, high)
	}
	if low < y.from {
		c.line("w", x-tick, low, x+tick, low)
	}
}

// name writes the name of group i below it. If groups are narrower than a line, it writes as many
// names as fit.
func (p Bars) name(c *canvas, g barGeometry, i int) {
	x := g.plot.x + (float64(i)+.5)*g.group
	if g.names == nil {
		if i%everyNth(g.group) == 0 {
			c.turned("", x+4, g.y.from+7, "end", strings.TrimSpace(p.Groups[i]))
		}
		return
	}
	for k, l := range g.names[i] {
		c.text("", x, g.y.from+16+15*float64(k), "middle", l)
	}
}
