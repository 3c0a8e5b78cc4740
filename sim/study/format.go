package study

import (
	"fmt"
	"math"
	"strings"
	"unicode/utf8"

	"github.com/stagecoach-serving/stagecoach/sim"
)

// String formats the value and its interval, with as many digits as the interval justifies: "0.52
// (0.48 to 0.57)".
func (i Interval) String() string { return i.with(1, 0, "") }

// Change formats the interval of a ratio as a change in percent: "-48 % (-52 to -43)".
func (i Interval) Change() string { return sign(i.Value-1) + i.with(100, -100, " %") }

// Points formats the interval of a difference of shares: "+12 points (9 to 15)".
func (i Interval) Points() string { return sign(i.Value) + i.with(100, 0, " points") }

// sign returns the sign in front of a number that is not negative.
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

// digits returns the digits after the point for a value that is known to half of width.
func digits(width float64) int { return min(max(-int(math.Floor(math.Log10(width/2)))+1, 0), 6) }

// with formats the mean and its interval in a unit, with as many digits as the interval justifies.
func (s Sample) with(scale float64) string {
	if s.CI == 0 {
		return sim.Trim(s.Mean*scale, 3)
	}
	d := digits(2 * s.CI * scale)
	return fmt.Sprintf("%.*f ± %.*f", d, s.Mean*scale, d, s.CI*scale)
}

// table is a Markdown table. Its columns are aligned for readers without a browser.
type table [][]string

func (t *table) row(cells ...string) { *t = append(*t, cells) }

// write writes an empty line and the table. The first row is the heading. It leaves out a table
// that has only a heading.
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

// clean replaces characters that would break tables.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '|' || r < ' ' {
			return ' '
		}
		return r
	}, s)
}
