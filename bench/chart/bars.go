package chart

import (
	"fmt"
	"math"
	"strings"
)

// Bars is a panel of bars in groups: a bar of each series in every group. Values are at least 0; what is not known is NaN and shown as n/a.
type Bars struct {
	Title  string
	Unit   string // what the values are: "mean latency, s"
	Groups []string
	Series []BarSeries
	Log    bool
	Top    float64 // the axis reaches up to it at least
	Guides []Mark  // across the panel; Vertical is not used
}

// BarSeries has a value a group.
type BarSeries struct {
	Name   string
	Style  int
	Values []float64
	Ends   []Ends   // of whiskers; nil: none. One that goes on beyond the axis has no end there
	Notes  []string // put behind each value: "†"; nil: none
}

// Ends are those of an interval around a value; NaN: there is none.
type Ends struct{ Low, High float64 }

const (
	barsPlotH = 185
	barShare  = .86 // of a group's width
	leastTurn = 11  // pixels that a label needs to stand on its end
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

// height has room for the names of groups at their highest.
func (p Bars) height(width float64) float64 {
	g := p.geometry(box{w: width})
	return headHeight(p.Title, p.Unit, width) + barsPlotH + g.namesH
}

// barGeometry is where things are in a panel of bars.
type barGeometry struct {
	plot         box // of the bars, labels above them included
	y            scale
	group, bar   float64 // widths
	turned       bool    // labels of bars stand on their ends
	labels       bool
	names        [][]string // of groups, in lines; nil: turned
	namesH, room float64    // for names below the plot; for labels above the highest bar
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
	s.hi = max(s.hi, min(ends, 2*s.hi)) // intervals of few values may be many times as long as bars
	for _, g := range p.Guides {
		s.see(g.At, p.Log)
	}
	s.see(p.Top, p.Log)
	low := 0.0
	if p.Log {
		low = s.lo / 1.3 // the least bar is seen, too
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

// groupNames breaks names into lines that fit below their groups; where a word does not, all are turned, and names is nil.
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

// everyNth of turned names has space, a group being so wide.
func everyNth(width float64) int { return max(int(math.Ceil(13/width)), 1) }

// label is what is written at bar i.
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
	each(p.label) // over all else
	for i := range p.Groups {
		p.name(c, g, i)
	}
}

// bar draws bar i of a series at x, and its whisker.
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

// label writes the value of bar i of a series above it, in as far as there is space.
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
	if e.High <= y.greatest() { // else it goes on
		c.line("w", x-tick, high, x+tick, high)
	}
	if low < y.from {
		c.line("w", x-tick, low, x+tick, low)
	}
}

// name writes the name of group i below it; of groups that are narrower than a line, as many as fit.
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
