package chart

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Heat is a panel with a matrix of ratios. The colour of a cell shows how far its number is from
// Even, as a factor, and on which side.
type Heat struct {
	Title          string
	XTitle, YTitle string // titles of columns and rows
	Rows, Columns  []string
	Values         [][]float64 // one slice per row; above 0, or NaN for n/a
	Notes          [][]string  // text after each value; nil: none
	Even           float64     // the neutral ratio; 0: 1
	Below, Above   string      // meaning of ratios below and above Even, for the key
}

// heatSteps is the number of colours: one in the middle, and equally many on both sides.
const heatSteps = 9

// The colours of cells, from far below Even to far above it. Blue and orange look different with
// any kind of colour vision.
var (
	heatLight = [heatSteps]string{"#2166ac", "#4a90c9", "#8fbfe0", "#cfe3f1", "#f0f0f0", "#fbdcb8", "#f5b469", "#dd8326", "#b35806"}
	heatDark  = [heatSteps]string{"#5fb0f5", "#3f86c6", "#2c5f91", "#22405f", "#2a2f36", "#573a1b", "#875419", "#c0761c", "#f0a040"}
)

// heatStyle gives each cell the text colour with the best contrast.
func heatStyle(colors [heatSteps]string) string {
	var b strings.Builder
	for i, c := range colors {
		text := "#fff"
		if contrast(c, "#111111") > contrast(c, "#ffffff") {
			text = "#111"
		}
		fmt.Fprintf(&b, ".d%d{fill:%s}.e%d{fill:%s}", i, c, i, text)
	}
	return b.String() + ".dn{fill:none}.en{fill:#808890}"
}

// contrast returns the contrast of two colours, 1 to 21 (WCAG 2.1, contrast ratio).
func contrast(a, b string) float64 {
	x, y := luminance(a), luminance(b)
	return (max(x, y) + .05) / (min(x, y) + .05)
}

// luminance returns the luminance of #rrggbb, 0 to 1 (WCAG 2.1, relative luminance).
func luminance(color string) float64 {
	var rgb [3]uint8
	_, _ = fmt.Sscanf(color, "#%02x%02x%02x", &rgb[0], &rgb[1], &rgb[2]) // a colour of this package
	sum := 0.0
	for i, part := range []float64{.2126, .7152, .0722} {
		v := float64(rgb[i]) / 255
		if v <= .04045 {
			v /= 12.92
		} else {
			v = math.Pow((v+.055)/1.055, 2.4)
		}
		sum += part * v
	}
	return sum
}

func (p Heat) check() error {
	if len(p.Values) != len(p.Rows) {
		return fmt.Errorf("heat %q: %d rows of values, want one for each of %d", p.Title, len(p.Values), len(p.Rows))
	}
	if p.Notes != nil && len(p.Notes) != len(p.Rows) {
		return fmt.Errorf("heat %q: %d rows of notes, want one for each of %d", p.Title, len(p.Notes), len(p.Rows))
	}
	for i, row := range p.Values {
		if p.Notes != nil && len(p.Notes[i]) != len(p.Columns) {
			return fmt.Errorf("heat %q: row %q has %d notes, want one for each of %d columns", p.Title, p.Rows[i], len(p.Notes[i]), len(p.Columns))
		}
		if len(row) != len(p.Columns) {
			return fmt.Errorf("heat %q: row %q has %d values, want one for each of %d columns", p.Title, p.Rows[i], len(row), len(p.Columns))
		}
		for k, v := range row {
			if v <= 0 || math.IsInf(v, 0) {
				return fmt.Errorf("heat %q: row %q, column %q: %g, want a ratio above 0", p.Title, p.Rows[i], p.Columns[k], v)
			}
		}
	}
	if p.Even < 0 {
		return fmt.Errorf("heat %q: even at %g, want above 0", p.Title, p.Even)
	}
	return nil
}

func (p Heat) keys() []key { return nil }

const (
	cellH    = 28
	mostCell = 90
	heatKeyH = 52
)

func (p Heat) height(width float64) float64 {
	return headHeight(p.Title, "", width) + p.titleHeight() + p.namesHeight(width) + float64(len(p.Rows))*cellH + heatKeyH
}

// geometry returns where cells begin, and how wide each is.
func (p Heat) geometry(width float64) (left, cell float64) {
	left = max(widest(p.Rows, 12), textWidth(p.YTitle, 11)) + 10
	return left, min(max((width-left)/float64(max(len(p.Columns), 1)), 4), mostCell)
}

func (p Heat) namesHeight(width float64) float64 {
	_, cell := p.geometry(width)
	_, h := groupNames(p.Columns, cell)
	return h
}

func (p Heat) titleHeight() float64 {
	if p.XTitle == "" {
		return 0
	}
	return 18
}

func (p Heat) even() float64 {
	if p.Even == 0 {
		return 1
	}
	return p.Even
}

// reach returns how far from Even, as a factor, the last colour is. It is the distance of the
// farthest value, rounded up, and at least 1.25.
func (p Heat) reach() float64 {
	far := 0.0
	for _, row := range p.Values {
		for _, v := range row {
			if known(v) {
				far = max(far, math.Abs(math.Log(v/p.even())))
			}
		}
	}
	for _, r := range []float64{1.25, 1.5, 2, 3, 5, 10, 20, 50} {
		if math.Log(r) >= far-1e-9 {
			return r
		}
	}
	return 100
}

// step returns the colour of v. Within 2.5 % of Even, it is the middle one.
func (p Heat) step(v, reach float64) string {
	if !known(v) {
		return "n"
	}
	const side = heatSteps / 2
	far, step := math.Log(v/p.even()), side
	if n := int(math.Ceil(math.Abs(far)/math.Log(reach)*side - 1e-9)); math.Abs(far) > .025 {
		step += int(math.Copysign(float64(min(n, side)), far))
	}
	return strconv.Itoa(step)
}

func (p Heat) draw(c *canvas, at box) {
	top := c.head(p.Title, "", at)
	left, cell := p.geometry(at.w)
	names, namesH := groupNames(p.Columns, cell)
	x := at.x + left
	c.text("m n", x, top+11, "start", p.XTitle)
	top += p.titleHeight() + namesH
	c.text("m n", x-8, top-8, "end", p.YTitle)
	for k, name := range p.Columns {
		middle := x + (float64(k)+.5)*cell
		if names == nil {
			if k%everyNth(cell) == 0 {
				c.turned("", middle+4, top-6, "start", name)
			}
			continue
		}
		for l, line := range names[k] {
			c.text("", middle, top-8-15*float64(len(names[k])-1-l), "middle", line)
		}
	}
	reach := p.reach()
	for i, row := range p.Values {
		y := top + float64(i)*cellH
		c.text("", x-8, y+cellH/2+4, "end", p.Rows[i])
		for k, v := range row {
			note := ""
			if p.Notes != nil {
				note = p.Notes[i][k]
			}
			p.cell(c, box{x + float64(k)*cell, y, cell, cellH}, v, reach, note)
		}
	}
	p.scale(c, x, top+float64(len(p.Rows))*cellH+10, at, reach)
}

func (p Heat) cell(c *canvas, at box, v, reach float64, note string) {
	step, text := p.step(v, reach), "n/a"
	if known(v) {
		text = short(v) + note
	}
	fmt.Fprintf(c, `<rect class="d%s" x="%.1f" y="%.1f" width="%.1f" height="%.1f">%s</rect>`+"\n", step, at.x+1, at.y+1, at.w-2, at.h-2, tipOf(text))
	for _, size := range []struct {
		class  string
		pixels float64
	}{{"n", 11}, {"s", 10}} {
		if textWidth(text, size.pixels) <= at.w-2 {
			c.text(size.class+" e"+step, at.x+at.w/2, at.y+at.h/2+4, "middle", text)
			return
		}
	}
}

// scale draws the key of the colours.
func (p Heat) scale(c *canvas, x, y float64, at box, reach float64) {
	const w = 26
	x = max(min(x, at.x+at.w-heatSteps*w-20), at.x+20)
	for i := range heatSteps {
		fmt.Fprintf(c, `<rect class="d%d" x="%.1f" y="%.1f" width="%d" height="10"/>`+"\n", i, x+float64(i*w), y, w)
	}
	for _, l := range []struct{ at, v float64 }{{0, 1 / reach}, {.5, 1}, {1, reach}} {
		middle := x + w*(.5+l.at*(heatSteps-1))
		c.text("m n", middle, y+22, "middle", short(l.v*p.even()))
	}
	c.text("m n", at.x, y+38, "start", strings.Join(nonEmpty(prefix("blue: ", p.Below), prefix("orange: ", p.Above)), "; "))
}

func prefix(with, s string) string {
	if s == "" {
		return ""
	}
	return with + s
}

func nonEmpty(texts ...string) []string {
	var out []string
	for _, t := range texts {
		if t != "" {
			out = append(out, t)
		}
	}
	return out
}
