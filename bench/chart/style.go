package chart

import (
	"fmt"
	"html"
	"math"
	"slices"
	"strconv"
	"strings"
)

// figureStyle returns the colours of everything except the series, for a light and a dark
// background.
func figureStyle() string {
	return `<style>
text{font:12px system-ui,sans-serif;fill:#24292f}.t{font-size:15px;font-weight:600}.p{font-size:13px;font-weight:600}.n{font-size:11px}.s{font-size:10px}.m{fill:#57606a}
.o{paint-order:stroke;stroke:#fff;stroke-width:3px;stroke-linejoin:round}.g{stroke:#d8dee4}.a{stroke:#8c959f}.w{stroke:#24292f;stroke-width:1.3}.k{stroke:#57606a;stroke-width:1.3;stroke-dasharray:6 4}
.h{stroke:#fff;stroke-width:1.6}.hd{fill:#fff}.f{stroke:#fff;stroke-width:.8}.q{opacity:.5}.c{stroke:#24292f;stroke-width:1.6}
` + heatStyle(heatLight) + `
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.m{fill:#9aa4af}.o{stroke:#0d1117}.g{stroke:#2b3139}.a{stroke:#8b949e}.w{stroke:#e6edf3}.k{stroke:#9aa4af}
.h{stroke:#0d1117}.hd{fill:#0d1117}.f{stroke:#0d1117}.c{stroke:#fff}
` + heatStyle(heatDark) + `}
</style>
`
}

// styleOrder has the colours of styles as indices into Palette. Styles that are five apart have
// equal hatchings, so their colours differ for any kind of colour vision.
var styleOrder = [...]int{0, 1, 2, 3, 4, 8, 5, 9, 7, 6}

func styleColor(style int) string { return Palette[styleOrder[style%len(styleOrder)]] }

// hatch returns the hatching of a style, 0 (none) to 4. The tenth style after another has the same
// colour, so it gets the next hatching.
func hatch(style int) int { return (style + style/len(styleOrder)) % 5 }

// shape returns the index of a style's shape in shapes.
func shape(style int) int { return (style + style/len(styleOrder)) % len(shapes) }

// patterns returns the definitions of the keys' hatchings.
func patterns(keys []key) string {
	var b strings.Builder
	var done []int
	for _, k := range keys {
		if k.kind != ofBars || hatch(k.style) == 0 || slices.Contains(done, k.style) {
			continue
		}
		done = append(done, k.style)
		const body = `<pattern id="hatch%d" width="%d" height="%d" patternUnits="userSpaceOnUse" patternTransform="rotate(%d)"><rect width="10" height="10" fill="%s"/>%s</pattern>`
		stripe, turn, size := `<line class="h" x1="0" y1="0" x2="0" y2="10"/>`, 0, 6
		switch hatch(k.style) {
		case 1:
			turn = 45
		case 2:
			stripe, turn, size = `<circle class="hd" cx="2.5" cy="2.5" r="1.2"/>`, 0, 5
		case 3:
			turn = -45
		case 4:
			turn, size = 90, 5
		}
		fmt.Fprintf(&b, body+"\n", k.style, size, size, turn, styleColor(k.style), stripe)
	}
	if b.Len() == 0 {
		return ""
	}
	return "<defs>\n" + b.String() + "</defs>\n"
}

// shapes has the corners of points of radius 1. No corners mean a circle.
var shapes = [...][][2]float64{
	nil,
	{{-.9, -.9}, {.9, -.9}, {.9, .9}, {-.9, .9}}, // square
	{{0, -1.15}, {1.1, .85}, {-1.1, .85}},        // triangle
	{{0, -1.3}, {1.1, 0}, {0, 1.3}, {-1.1, 0}},   // diamond
	{{0, 1.15}, {1.1, -.85}, {-1.1, -.85}},       // triangle on its tip
	plus(0), plus(math.Pi / 4),                   // plus, cross
	star(5, .45), star(3, .3), // stars with five and three points
	{{-1.2, -.5}, {1.2, -.5}, {1.2, .5}, {-1.2, .5}}, // flat
}

// plus returns a plus with thick arms, turned by an angle.
func plus(turn float64) [][2]float64 {
	const a, b = 1.2, .4
	out := [][2]float64{{-b, -a}, {b, -a}, {b, -b}, {a, -b}, {a, b}, {b, b}, {b, a}, {-b, a}, {-b, b}, {-a, b}, {-a, -b}, {-b, -b}}
	for i, p := range out {
		out[i] = [2]float64{p[0]*math.Cos(turn) - p[1]*math.Sin(turn), p[0]*math.Sin(turn) + p[1]*math.Cos(turn)}
	}
	return out
}

func star(points int, inner float64) [][2]float64 {
	var out [][2]float64
	for i := range 2 * points {
		r, a := 1.3, math.Pi*float64(i)/float64(points)
		if i%2 == 1 {
			r *= inner
		}
		out = append(out, [2]float64{r * math.Sin(a), -r * math.Cos(a)})
	}
	return out
}

// canvas collects what is drawn.
type canvas struct{ strings.Builder }

func (c *canvas) text(class string, x, y float64, anchor, s string) {
	if s == "" {
		return
	}
	fmt.Fprintf(c, `<text class="%s" x="%.1f" y="%.1f" text-anchor="%s">%s</text>`+"\n", class, x, y, anchor, html.EscapeString(s))
}

// turned writes text that reads upwards. It starts at (x, y) or, with anchor end, ends there.
func (c *canvas) turned(class string, x, y float64, anchor, s string) {
	fmt.Fprintf(c, `<text class="%s" transform="translate(%.1f %.1f) rotate(-90)" text-anchor="%s">%s</text>`+"\n", class, x, y, anchor, html.EscapeString(s))
}

func (c *canvas) line(class string, x1, y1, x2, y2 float64) {
	fmt.Fprintf(c, `<line class="%s" x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f"/>`+"\n", class, x1, y1, x2, y2)
}

// stroke draws a line in the colour of a style.
func (c *canvas) stroke(style int, x1, y1, x2, y2 float64) {
	fmt.Fprintf(c, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="%s" stroke-width="1.5"/>`+"\n", x1, y1, x2, y2, styleColor(style))
}

// bar draws a filled rectangle. tip appears while the pointer is on it.
func (c *canvas) bar(style int, at box, tip string) {
	fill := styleColor(style)
	if hatch(style) != 0 {
		fill = fmt.Sprintf("url(#hatch%d)", style)
	}
	fmt.Fprintf(c, `<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="%s" stroke="%s">%s</rect>`+"\n", at.x, at.y, at.w, at.h, fill, styleColor(style), tipOf(tip))
}

// point draws the shape of a style. class sets the look of its edge.
func (c *canvas) point(style int, x, y, r float64, class, tip string) {
	corners := shapes[shape(style)]
	if corners == nil {
		fmt.Fprintf(c, `<circle class="%s" cx="%.1f" cy="%.1f" r="%.1f" fill="%s">%s</circle>`+"\n", class, x, y, r, styleColor(style), tipOf(tip))
		return
	}
	var at []string
	for _, p := range corners {
		at = append(at, fmt.Sprintf("%.1f,%.1f", x+r*p[0], y+r*p[1]))
	}
	fmt.Fprintf(c, `<polygon class="%s" points="%s" fill="%s">%s</polygon>`+"\n", class, strings.Join(at, " "), styleColor(style), tipOf(tip))
}

// cross marks an unknown value where there is no space for a text.
func (c *canvas) cross(x, y float64) {
	c.line("a", x-3, y-3, x+3, y+3)
	c.line("a", x-3, y+3, x+3, y-3)
}

func tipOf(s string) string {
	if s == "" {
		return ""
	}
	return "<title>" + html.EscapeString(s) + "</title>"
}

// textWidth returns the largest width of s in pixels. It uses DejaVu Sans, which is wider than the
// fonts of most systems.
func textWidth(s string, size float64) float64 {
	w := 0.0
	for _, r := range s {
		switch {
		case strings.ContainsRune("ijlI.,:;'|! ", r):
			w += .34
		case strings.ContainsRune("frt()[]-/\"", r):
			w += .42
		case strings.ContainsRune("mwMWQ%@×≤≥=+→", r):
			w += .98
		case r >= 'A' && r <= 'Z' || r > 0x2000:
			w += .72
		default:
			w += .62
		}
	}
	return w * size
}

// wrap breaks s at spaces into lines that fit into width. Longer words stay whole.
func wrap(s string, width, size float64) []string {
	var out []string
	for _, word := range strings.Fields(s) {
		if n := len(out); n > 0 && textWidth(out[n-1]+" "+word, size) <= width {
			out[n-1] += " " + word
		} else {
			out = append(out, word)
		}
	}
	return out
}

func widest(texts []string, size float64) float64 {
	w := 0.0
	for _, t := range texts {
		w = max(w, textWidth(t, size))
	}
	return w
}

// short formats v with three digits: 0.0123, 1.26, 126, 1.26k.
func short(v float64) string {
	sign := ""
	for _, next := range []string{"k", "M", "G"} {
		if math.Abs(v) < 999.5 {
			break
		}
		v, sign = v/1000, next
	}
	// cannot fail: the text was just written
	v, _ = strconv.ParseFloat(strconv.FormatFloat(v, 'g', 3, 64), 64)
	return strconv.FormatFloat(v, 'g', -1, 64) + sign
}
