package chart

import (
	"fmt"
	"html"
	"io"
	"math"
	"strconv"
	"strings"
)

// Line is a quantity over another. NaN in Y is a gap.
type Line struct {
	Name  string
	Color int // index in Palette; below 0: grey
	X, Y  []float64
	Steps bool // values hold until the next one
	Area  bool // filled down to 0
}

// Mark is a dashed line across a plot.
type Mark struct {
	Name     string
	At       float64
	Vertical bool
}

// Plot draws several lines over common axes, with a legend. It is embedded in an HTML page, which
// needs the style [PlotStyle].
type Plot struct {
	Title      string
	Unit       func(float64) string // of Y; nil: plain numbers
	XUnit      func(float64) string
	LogX, LogY bool
	TopY       float64 // largest Y of the axis; 0: that of the values
	Lines      []Line
	Marks      []Mark
	Tips       []Tip
}

// Tip is a text that appears while the pointer is over [From, To) of X.
type Tip struct {
	From, To float64
	Text     string
}

// Palette has the colours of lines. They differ on light and dark backgrounds, and for people with
// any kind of colour vision.
var Palette = [...]string{"#3b82f6", "#e08a1e", "#20a46b", "#c0508f", "#8a6fe0", "#159aa8", "#d6544a", "#8a8f2a", "#7d8590", "#a0622d"}

// PlotStyle is the style sheet of plots.
const PlotStyle = `
.plot text{font:12px system-ui,sans-serif;fill:var(--muted)}.plot .t{font-size:14px;font-weight:600;fill:var(--text)}
.plot .g{stroke:var(--line);stroke-width:1}.plot .mark{stroke:var(--muted);stroke-width:1.2;stroke-dasharray:5 4}.plot .tip:hover{fill:var(--muted);fill-opacity:.12}
`

const (
	plotW, plotH                      = 560, 270
	plotL, plotR, plotTop, plotBottom = 58, 16, 56, 32
)

// scale maps values of an axis to positions.
type scale struct {
	lo, hi   float64 // on a logarithmic axis, their logarithms
	log      bool
	from, to float64
}

func (s scale) at(v float64) float64 {
	if s.log {
		v = math.Log10(v)
	}
	v = min(max(v, s.lo), s.hi)
	return s.from + (v-s.lo)/(s.hi-s.lo)*(s.to-s.from)
}

// ticks returns about this many round values in the scale.
func (s scale) ticks(about int) []float64 {
	var out []float64
	if !s.log {
		step := niceCeil((s.hi - s.lo) / float64(about))
		for i := math.Ceil(s.lo/step - 1e-9); i*step <= s.hi*(1+1e-9); i++ {
			out = append(out, i*step+0) // +0 avoids -0
		}
		return out
	}
	digits := []float64{1}
	if s.hi-s.lo <= 2 {
		digits = []float64{1, 2, 5}
	}
	for e := math.Floor(s.lo); e <= math.Ceil(s.hi); e++ {
		for _, d := range digits {
			if l := e + math.Log10(d); l >= s.lo-1e-9 && l <= s.hi+1e-9 {
				out = append(out, d*math.Pow(10, e))
			}
		}
	}
	return out
}

// scales fits both axes to the lines and marks.
func (p Plot) scales() (x, y scale) {
	loX, hiX, loY, hiY := math.Inf(1), math.Inf(-1), math.Inf(1), math.Inf(-1)
	see := func(vx, vy float64) {
		if !math.IsNaN(vx) && (vx > 0 || !p.LogX) {
			loX, hiX = min(loX, vx), max(hiX, vx)
		}
		if !math.IsNaN(vy) && (vy > 0 || !p.LogY) {
			loY, hiY = min(loY, vy), max(hiY, vy)
		}
	}
	for _, l := range p.Lines {
		for i := range l.X {
			see(l.X[i], l.Y[i])
		}
	}
	for _, m := range p.Marks {
		if m.Vertical {
			see(m.At, math.NaN())
		} else {
			see(math.NaN(), m.At)
		}
	}
	return fit(loX, hiX, p.LogX, false, plotL, plotW-plotR), fit(loY, max(hiY, p.TopY), p.LogY, p.TopY == 0, plotH-plotBottom, plotTop)
}

func fit(lo, hi float64, log, round bool, from, to float64) scale {
	if lo > hi { // no values
		lo, hi = 1, 10
	}
	if log {
		lo, hi = math.Log10(lo), math.Log10(hi)
		if round || hi-lo < 0.5 {
			lo, hi = math.Floor(lo), math.Ceil(hi)
		}
		if lo == hi {
			hi++
		}
		return scale{lo, hi, true, from, to}
	}
	if round {
		lo = min(lo, 0)
		step := niceCeil((hi - lo) / 4)
		hi = math.Ceil(hi/step-1e-9) * step
	}
	if lo >= hi {
		hi = lo + 1
	}
	return scale{lo, hi, false, from, to}
}

// plotColors sets the colours to which PlotStyle refers, in a separate file.
const plotColors = `svg{--text:#24292f;--muted:#57606a;--line:#d0d7de}@media (prefers-color-scheme:dark){svg{--text:#e6edf3;--muted:#8b949e;--line:#30363d}}`

// WriteFile draws p as a separate file, for any background.
func (p Plot) WriteFile(w io.Writer) error {
	return p.draw(w, "<style>"+plotColors+PlotStyle+"</style>")
}

// WriteColumn draws plots one above the other as a separate file.
func WriteColumn(w io.Writer, plots ...Plot) error {
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%[1]d" height="%[2]d"><style>%s</style>`,
		plotW, len(plots)*plotH, plotColors+PlotStyle)
	for i, p := range plots {
		var one strings.Builder
		if err := p.WriteSVG(&one); err != nil {
			return err
		}
		b.WriteString(strings.Replace(one.String(), "<svg ", fmt.Sprintf(`<svg y="%d" width="%d" height="%d" `, i*plotH, plotW, plotH), 1))
	}
	b.WriteString("</svg>\n")
	_, err := io.WriteString(w, b.String())
	return err
}

// WriteSVG draws p.
func (p Plot) WriteSVG(w io.Writer) error { return p.draw(w, "") }

func (p Plot) draw(w io.Writer, style string) error {
	for _, l := range p.Lines {
		if len(l.X) != len(l.Y) {
			return fmt.Errorf("plot %q: line %q has %d values for %d places", p.Title, l.Name, len(l.Y), len(l.X))
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, `<svg class="plot" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" role="img" aria-label="%s">%s`, plotW, plotH, html.EscapeString(p.Title), style)
	fmt.Fprintf(&b, `<text class="t" x="8" y="18">%s</text>`, html.EscapeString(p.Title))
	x, y := p.scales()
	p.axes(&b, x, y)
	for _, l := range p.Lines {
		l.draw(&b, x, y)
	}
	for _, m := range p.Marks {
		if m.Vertical {
			fmt.Fprintf(&b, `<line class="mark" stroke="#808890" x1="%.1f" x2="%[1]f" y1="%d" y2="%d"/><text x="%.1f" y="%d" text-anchor="end">%s</text>`, x.at(m.At), plotTop, plotH-plotBottom, x.at(m.At)-4, plotTop+10, html.EscapeString(m.Name))
		} else {
			fmt.Fprintf(&b, `<line class="mark" stroke="#808890" x1="%d" x2="%d" y1="%.1f" y2="%[3]f"/><text x="%d" y="%.1f" text-anchor="end">%s</text>`, plotL, plotW-plotR, y.at(m.At), plotW-plotR-2, y.at(m.At)-4, html.EscapeString(m.Name))
		}
	}
	p.legend(&b)
	for _, t := range p.Tips {
		from, to := x.at(t.From), x.at(t.To)
		fmt.Fprintf(&b, `<rect class="tip" fill="none" pointer-events="all" x="%.1f" y="%d" width="%.1f" height="%d"><title>%s</title></rect>`, from, plotTop, max(to-from, 0), plotH-plotBottom-plotTop, html.EscapeString(t.Text))
	}
	b.WriteString("</svg>\n")
	_, err := io.WriteString(w, b.String())
	return err
}

func (p Plot) axes(b *strings.Builder, x, y scale) {
	show := func(f func(float64) string, v float64) string {
		if f == nil {
			return strconv.FormatFloat(v, 'g', 4, 64)
		}
		return html.EscapeString(f(v))
	}
	for _, v := range y.ticks(5) {
		fmt.Fprintf(b, `<line class="g" stroke="#808890" x1="%d" x2="%d" y1="%.1f" y2="%[3]f"/><text x="%d" y="%.1f" text-anchor="end">%s</text>`, plotL, plotW-plotR, y.at(v), plotL-6, y.at(v)+4, show(p.Unit, v))
	}
	for _, v := range x.ticks(7) {
		fmt.Fprintf(b, `<line class="g" stroke="#808890" x1="%.1f" x2="%[1]f" y1="%d" y2="%d"/><text x="%.1f" y="%d" text-anchor="middle">%s</text>`, x.at(v), plotH-plotBottom, plotH-plotBottom+4, x.at(v), plotH-plotBottom+18, show(p.XUnit, v))
	}
}

func color(i int) string {
	if i < 0 {
		return "var(--muted)"
	}
	return Palette[i%len(Palette)]
}

// draw draws the line, in one piece between each two gaps.
func (l Line) draw(b *strings.Builder, x, y scale) {
	var points []string
	last, begin := 0.0, 0.0
	flush := func() {
		if len(points) == 0 {
			return
		}
		if l.Area {
			fmt.Fprintf(b, `<polygon fill="%s" fill-opacity=".18" points="%.1f,%.1f %s %.1f,%[3]f"/>`, color(l.Color), begin, y.from, strings.Join(points, " "), last)
		}
		if len(points) == 1 {
			place, height, _ := strings.Cut(points[0], ",")
			fmt.Fprintf(b, `<circle cx="%s" cy="%s" r="2" fill="%s"/>`, place, height, color(l.Color))
		} else {
			fmt.Fprintf(b, `<polyline fill="none" stroke="%s" stroke-width="1.8" stroke-linejoin="round" points="%s"/>`, color(l.Color), strings.Join(points, " "))
		}
		points = nil
	}
	for i := range l.X {
		if math.IsNaN(l.Y[i]) || y.log && l.Y[i] <= 0 || x.log && l.X[i] <= 0 {
			flush()
			continue
		}
		if len(points) == 0 {
			begin = x.at(l.X[i])
		} else if l.Steps {
			points = append(points, fmt.Sprintf("%.1f,%.1f", x.at(l.X[i]), y.at(l.Y[i-1])))
		}
		last = x.at(l.X[i])
		points = append(points, fmt.Sprintf("%.1f,%.1f", last, y.at(l.Y[i])))
	}
	flush()
}

func (p Plot) legend(b *strings.Builder) {
	at := 8.0
	for _, l := range p.Lines {
		if l.Name == "" {
			continue
		}
		width := 30 + 6.6*float64(len([]rune(l.Name)))
		if at+width > plotW {
			fmt.Fprintf(b, `<text x="%.1f" y="40">…</text>`, at)
			return
		}
		fmt.Fprintf(b, `<rect x="%.1f" y="31" width="14" height="10" rx="2" fill="%s"/><text x="%.1f" y="40">%s</text>`, at, color(l.Color), at+19, html.EscapeString(l.Name))
		at += width
	}
}
