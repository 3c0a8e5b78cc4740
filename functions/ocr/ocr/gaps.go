package ocr

import (
	"cmp"
	"image"
	"slices"
	"strings"
)

// The recogniser often leaves out spaces. The function gaps finds the gaps between words in the
// picture. A run of columns without ink is such a gap if:
//   - its width is at least wordGap of the ink's height, and
//   - its width is at least narrowGap of the median width of the runs that meet the first
//     condition.
//
// The second condition keeps a number in a fixed-width font from being split at its decimal point.
const (
	wordGap   = 0.25
	narrowGap = 0.6
)

// gaps returns the middles of the gaps between words, as fractions of the line's width, ascending.
func gaps(line *image.RGBA) []float64 {
	ink, height := columns(line)
	w := len(ink)
	var runs []run
	for x := 0; x < w; {
		if ink[x] {
			x++
			continue
		}
		from := x
		for x < w && !ink[x] {
			x++
		}
		if from > 0 && x < w && float64(x-from) >= wordGap*float64(height) {
			runs = append(runs, run{from, x})
		}
	}
	slices.SortFunc(runs, func(a, b run) int { return cmp.Compare(a.width(), b.width()) })
	var middles []float64
	for _, r := range runs {
		if float64(r.width()) >= narrowGap*float64(runs[len(runs)/2].width()) {
			middles = append(middles, float64(r.from+r.to)/2/float64(w))
		}
	}
	slices.Sort(middles)
	return middles
}

// run is a run of columns without ink.
type run struct{ from, to int }

func (r run) width() int { return r.to - r.from }

// columns returns the columns of a line that have ink, and the height of the ink. Ink is the rarer
// side of Otsu's threshold.
func columns(line *image.RGBA) (ink []bool, height int) {
	w, h := line.Bounds().Dx(), line.Bounds().Dy()
	grey := make([]uint8, 0, w*h)
	var histogram [256]int
	for y := range h {
		for x := range w {
			p := line.Pix[y*line.Stride+4*x:]
			v := uint8((299*int(p[0]) + 587*int(p[1]) + 114*int(p[2])) / 1000)
			grey = append(grey, v)
			histogram[v]++
		}
	}
	threshold := otsu(&histogram)
	dark := 0
	for v := range threshold + 1 {
		dark += histogram[v]
	}
	lightText := dark > w*h/2
	ink = make([]bool, w)
	top, bottom := h, 0
	for i, v := range grey {
		if (int(v) <= threshold) != lightText {
			ink[i%w] = true
			top, bottom = min(top, i/w), max(bottom, i/w+1)
		}
	}
	return ink, max(0, bottom-top)
}

// otsu returns the grey that splits a histogram into two classes with the greatest variance between
// them (Otsu, IEEE SMC 9(1), 1979). The grey belongs to the lower class.
func otsu(histogram *[256]int) int {
	total, sum := 0, 0
	for v, n := range histogram {
		total += n
		sum += v * n
	}
	threshold, best := 127, 0.0
	below, sumBelow := 0, 0
	for v, n := range histogram {
		below += n
		sumBelow += v * n
		if below == 0 || below == total {
			continue
		}
		d := float64(sumBelow)/float64(below) - float64(sum-sumBelow)/float64(total-below)
		if between := float64(below) * float64(total-below) * d * d; between > best {
			threshold, best = v, between
		}
	}
	return threshold
}

// spaced joins characters, with a space where a gap is between two of them. steps is the number of
// the recogniser's steps that the line covers.
func spaced(chars []Char, keys Keys, steps float64, gaps []float64) string {
	var b strings.Builder
	for i, c := range chars {
		at := (float64(c.Step) + .5) / steps
		crossed := false
		for len(gaps) > 0 && gaps[0] < at {
			gaps, crossed = gaps[1:], true
		}
		if i > 0 && crossed && keys[c.Class] != " " && keys[chars[i-1].Class] != " " {
			b.WriteByte(' ')
		}
		b.WriteString(keys[c.Class])
	}
	return b.String()
}
