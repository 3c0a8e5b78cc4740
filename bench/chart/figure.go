package chart

import (
	"errors"
	"fmt"
	"html"
	"io"
	"slices"
	"strings"
)

// Figure is a file with several panels: a title, one legend for all panels, and notes.
//
// Series with equal Name and Style in several panels have one entry in the legend. A style is a
// number from 0. It selects a colour, a shape for points and a hatching for bars. 50 consecutive
// styles all look different. Two styles that are close to each other differ in more than their
// colour.
type Figure struct {
	Title   string
	Notes   []string // below the panels: the source of the numbers
	Columns int      // panels per row; 0: 1
	Panels  []Panel
}

// Panel is a drawing in a Figure: [Bars], [Scatter] or [Heat].
type Panel interface {
	check() error // checks that lengths match
	keys() []key  // its entries in the legend
	height(width float64) float64
	draw(c *canvas, at box)
}

// key is an entry of a legend.
type key struct {
	name  string
	style int
	kind  keyKind
}

type keyKind int

const (
	ofBars keyKind = iota
	ofPoints
	ofLines
	ofMissing // a cross: no value
)

type box struct{ x, y, w, h float64 }

const (
	figureW   = 900
	figurePad = 10
	panelGap  = 16
)

// WriteSVG draws f. It returns an error if lengths in a panel do not match.
func (f Figure) WriteSVG(w io.Writer) error {
	var errs []error
	for i, p := range f.Panels {
		if err := p.check(); err != nil {
			errs = append(errs, fmt.Errorf("figure %q: panel %d: %w", f.Title, i+1, err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	keys := f.keys()
	var c canvas
	y := c.title(f.Title)
	y = c.legend(keys, y)
	y = f.panels(&c, y)
	for _, n := range f.Notes {
		for _, l := range wrap(n, figureW-2*figurePad, 11) {
			y += 15
			c.text("m n", figurePad, y-3, "start", l)
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %.0f" width="%d" height="%.0f" role="img" aria-label="%s">`, figureW, y+figurePad, figureW, y+figurePad, html.EscapeString(f.Title))
	b.WriteString("\n" + figureStyle() + patterns(keys) + c.String() + "</svg>\n")
	_, err := io.WriteString(w, b.String())
	return err
}

// keys returns the entries of all panels, each once.
func (f Figure) keys() []key {
	var out []key
	for _, p := range f.Panels {
		for _, k := range p.keys() {
			same := func(o key) bool {
				return o.name == k.name && o.style == k.style && (o.kind == ofBars) == (k.kind == ofBars)
			}
			if k.name != "" && !slices.ContainsFunc(out, same) {
				out = append(out, k)
			}
		}
	}
	return out
}

// panels draws the rows of panels below y, and returns the y below them.
func (f Figure) panels(c *canvas, y float64) float64 {
	columns := max(f.Columns, 1)
	w := (figureW - 2*figurePad - float64(columns-1)*panelGap) / float64(columns)
	for row := range slices.Chunk(f.Panels, columns) {
		h := 0.0
		for _, p := range row {
			h = max(h, p.height(w))
		}
		for i, p := range row {
			p.draw(c, box{figurePad + float64(i)*(w+panelGap), y, w, h})
		}
		y += h + panelGap
	}
	return y
}

// title draws the title at the top, and returns the y below it.
func (c *canvas) title(s string) float64 {
	y := 8.0
	for _, l := range wrap(s, (figureW-2*figurePad)/1.1, 15) { // 1.1 because it is bold
		y += 18
		c.text("t", figurePad, y-4, "start", l)
	}
	return y + 4
}

// legend draws entries in as many lines as they need, and returns the y below them.
func (c *canvas) legend(keys []key, y float64) float64 {
	if len(keys) == 0 {
		return y + 4
	}
	x := float64(figurePad)
	for _, k := range keys {
		w := 36 + textWidth(k.name, 12)
		if x > figurePad && x+w > figureW {
			x, y = figurePad, y+19
		}
		c.symbol(k, x, y)
		c.text("", x+22, y+11, "start", k.name)
		x += w
	}
	return y + 28
}

// symbol draws a series' symbol in the legend, in a field of 18 by 14 pixels.
func (c *canvas) symbol(k key, x, y float64) {
	switch k.kind {
	case ofBars:
		c.bar(k.style, box{x, y, 18, 14}, "")
	case ofPoints:
		c.point(k.style, x+9, y+7, 5, "f", "")
	case ofLines:
		c.stroke(k.style, x, y+7, x+18, y+7)
		c.point(k.style, x+9, y+7, 4.5, "f", "")
	case ofMissing:
		c.cross(x+9, y+7)
	}
}
