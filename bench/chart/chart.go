// Package chart draws measurements as SVG that is readable on light and dark backgrounds:
//
//   - A [Figure] has panels of bars, points and matrices of ratios.
//   - A [Plot] has lines.
//   - A [Chart] has time series, one above the other. They share a time axis but no scale, because
//     some are queue lengths and others are replica counts.
package chart

import (
	"fmt"
	"html"
	"io"
	"math"
	"strings"
)

// Series is one quantity over time.
type Series struct {
	Name   string
	Values []float64 // one per X of the chart
}

// Chart is a drawing of time series.
type Chart struct {
	Title string
	X     []float64 // seconds, ascending
	Steps bool      // values hold until the next one; otherwise lines join them
	Rows  []Series
}

const (
	width   = 760
	left    = 110
	right   = 20
	top     = 40
	rowH    = 90
	rowGap  = 24
	bottom  = 34
	palette = "#2f6fde #d9822b #2e9e6b #b0457b"
)

const style = `<style>
text{font:12px system-ui,sans-serif;fill:#24292f}.t{font-size:15px;font-weight:600}.a{stroke:#8c959f;stroke-width:1}.g{stroke:#d0d7de;stroke-width:1;stroke-dasharray:2 3}.m{fill:#57606a}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.a{stroke:#8b949e}.g{stroke:#30363d}.m{fill:#8b949e}}
</style>`

// WriteSVG draws c. It returns an error if a row does not have one value per X.
func (c Chart) WriteSVG(w io.Writer) error {
	for _, r := range c.Rows {
		if len(r.Values) != len(c.X) {
			return fmt.Errorf("chart %q: row %q has %d values, want one for each of %d instants", c.Title, r.Name, len(r.Values), len(c.X))
		}
	}
	var b strings.Builder
	height := top + len(c.Rows)*(rowH+rowGap) - rowGap + bottom
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" aria-label="%s">%s`, width, height, width, height, html.EscapeString(c.Title), style)
	fmt.Fprintf(&b, `<text class="t" x="%d" y="22">%s</text>`, left, html.EscapeString(c.Title))
	for i, r := range c.Rows {
		c.row(&b, r, top+i*(rowH+rowGap), strings.Fields(palette)[i%4])
	}
	c.axis(&b, height-bottom)
	b.WriteString("</svg>\n")
	_, err := io.WriteString(w, b.String())
	return err
}

func (c Chart) x(t float64) float64 {
	if len(c.X) < 2 {
		return left
	}
	first, last := c.X[0], c.X[len(c.X)-1]
	return left + (t-first)/(last-first)*(width-left-right)
}

func (c Chart) row(b *strings.Builder, r Series, y0 int, color string) {
	most := 0.0
	for _, v := range r.Values {
		most = math.Max(most, v)
	}
	scale := niceCeil(most)
	y := func(v float64) float64 { return float64(y0) + rowH*(1-v/scale) }
	fmt.Fprintf(b, `<text x="%d" y="%d" text-anchor="end">%s</text>`, left-34, y0+rowH/2+4, html.EscapeString(r.Name))
	for _, v := range []float64{0, scale} {
		fmt.Fprintf(b, `<line class="g" x1="%d" y1="%.1f" x2="%d" y2="%.1f"/><text class="m" x="%d" y="%.1f" text-anchor="end">%g</text>`, left, y(v), width-right, y(v), left-6, y(v)+4, v)
	}
	fmt.Fprintf(b, `<polyline fill="none" stroke="%s" stroke-width="2" stroke-linejoin="round" points="`, color)
	for i, v := range r.Values {
		if c.Steps && i > 0 {
			fmt.Fprintf(b, "%.1f,%.1f ", c.x(c.X[i]), y(r.Values[i-1]))
		}
		fmt.Fprintf(b, "%.1f,%.1f ", c.x(c.X[i]), y(v))
	}
	b.WriteString(`"/>`)
}

func (c Chart) axis(b *strings.Builder, y int) {
	fmt.Fprintf(b, `<line class="a" x1="%d" y1="%d" x2="%d" y2="%d"/>`, left, y+4, width-right, y+4)
	if len(c.X) == 0 {
		return
	}
	first, last := c.X[0], c.X[len(c.X)-1]
	step := niceCeil((last - first) / 8)
	for t := math.Ceil(first/step) * step; t <= last; t += step {
		fmt.Fprintf(b, `<text class="m" x="%.1f" y="%d" text-anchor="middle">%g s</text>`, c.x(t), y+20, t)
	}
}

// niceCeil returns the smallest of 1, 2 or 5 times a power of ten that is at least v. It returns 1
// if v is not positive.
func niceCeil(v float64) float64 {
	if v <= 0 {
		return 1
	}
	p := math.Pow(10, math.Floor(math.Log10(v)))
	for _, m := range []float64{1, 2, 5} {
		if m*p >= v {
			return m * p
		}
	}
	return 10 * p
}
