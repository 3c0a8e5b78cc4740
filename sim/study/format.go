package study

import (
	"fmt"
	"math"
	"strings"
	"unicode/utf8"

	"github.com/stagecoach-serving/stagecoach/sim"
)

// String is the value and its interval, with the digits that the interval leaves: "0.52 (0.48 to 0.57)".
func (i Interval) String() string { return i.with(1, 0, "") }

// Change is that of a ratio as a change in percent: "-48 % (-52 to -43)".
func (i Interval) Change() string { return sign(i.Value-1) + i.with(100, -100, " %") }

// Points are those of a difference of parts: "+12 points (9 to 15)".
func (i Interval) Points() string { return sign(i.Value) + i.with(100, 0, " points") }

// sign is what stands before numbers that are no less than 0.
func sign(v float64) string {
	if v > 0 {
		return "+"
	}
	return ""
}

func (i Interval) with(scale, offset float64, unit string) string {
	value, low, high := scale*i.Value+offset, scale*i.Low+offset, scale*i.High+offset
	if high <= low {
		return sim.Trim(value, 3) + unit
	}
	d := digits(high - low)
	return fmt.Sprintf("%.*f%s (%.*f to %.*f)", d, value, unit, d, low, d, high)
}

// digits after the point, of a value that is known to half of width.
func digits(width float64) int { return min(max(-int(math.Floor(math.Log10(width/2)))+1, 0), 6) }

// with is the mean with the digits that its interval leaves, and the interval, in a unit.
func (s Sample) with(scale float64) string {
	if s.CI == 0 {
		return sim.Trim(s.Mean*scale, 3)
	}
	d := digits(2 * s.CI * scale)
	return fmt.Sprintf("%.*f ± %.*f", d, s.Mean*scale, d, s.CI*scale)
}

// table is one of Markdown whose columns are aligned, as people read it without a browser.
type table [][]string

func (t *table) row(cells ...string) { *t = append(*t, cells) }

// write puts the table behind an empty line; its first row is the heading. A table of a heading alone is left out.
func (t table) write(b *strings.Builder) {
	if len(t) < 2 {
		return
	}
	width := make([]int, len(t[0]))
	for _, row := range t {
		for i := range row {
			row[i] = clean(row[i])
			width[i] = max(width[i], utf8.RuneCountInString(row[i]), 3)
		}
	}
	b.WriteString("\n")
	for n, row := range t {
		for i, cell := range row {
			fmt.Fprintf(b, "| %s%s ", cell, strings.Repeat(" ", width[i]-utf8.RuneCountInString(cell)))
		}
		b.WriteString("|\n")
		if n == 0 {
			for _, w := range width {
				b.WriteString("|" + strings.Repeat("-", w+2))
			}
			b.WriteString("|\n")
		}
	}
}

// clean keeps text from breaking tables.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '|' || r < ' ' {
			return ' '
		}
		return r
	}, s)
}
