package ocr

import (
	"fmt"
	"image"
	"math"
	"strings"

	"github.com/stagecoach-serving/stagecoach/tensor"
)

// How the recogniser was trained to see.
const (
	lineHeight = 48  // pixels
	minWidth   = 320 // narrower lines are padded
	maxWidth   = 4096
)

// Crop returns the part r of a page, for [Recognise]: as it is, or scaled down to the recogniser's height.
func Crop(page *image.RGBA, r image.Rectangle) *image.RGBA {
	w, h := r.Dx(), r.Dy()
	if h > lineHeight {
		w, h = lineWidth(w, h), lineHeight
	}
	return scaled(page, r, w, h)
}

// lineWidth is the width of a line of w×h pixels at the recogniser's height.
func lineWidth(w, h int) int {
	return min(maxWidth, int(math.Ceil(lineHeight*float64(w)/float64(h))))
}

// Recognise reads one line of text; it returns the text and the mean probability of its characters, 0 when it has none.
func Recognise(m Model, keys Keys, line *image.RGBA) (string, float64, error) {
	w := lineWidth(line.Bounds().Dx(), line.Bounds().Dy())
	width := max(w, minWidth)
	half := [3]float32{.5, .5, .5}
	out, err := m.Run([]tensor.Tensor{planes(scaled(line, line.Bounds(), w, lineHeight), width, half, half)})
	if err != nil {
		return "", 0, fmt.Errorf("recognise %d×%d: %w", width, lineHeight, err)
	}
	if len(out) != 1 || out[0].Datatype != "FP32" || len(out[0].Shape) != 3 || out[0].Shape[0] != 1 || out[0].Shape[2] != int64(len(keys)) {
		return "", 0, fmt.Errorf("recogniser's output: %s, want one FP32 [1, steps, %d]: do the keys belong to this model?", describe(out), len(keys))
	}
	chars := Decoded(floats(out[0].Data), len(keys))
	steps := float64(out[0].Shape[1]) * float64(w) / float64(width)
	text := spaced(chars, keys, steps, gaps(line))
	return strings.TrimSpace(text), confidence(chars), nil
}

// Char is one character that the recogniser saw.
type Char struct {
	Class       int     // index into Keys, at least 1
	Step        int     // where: a step is a column of the recogniser's output
	Probability float64 // 0..1
}

// Decoded reads the recogniser's output, a row of class probabilities a step: the best class of each step, repetitions
// merged, class 0 (blank) left out (best path decoding; Graves et al. 2006, section 3.2).
func Decoded(p []float32, classes int) []Char {
	var chars []Char
	last := 0
	for step := range len(p) / classes {
		row := p[step*classes : (step+1)*classes]
		best := 0
		for c, v := range row {
			if v > row[best] {
				best = c
			}
		}
		if best != 0 && best != last {
			chars = append(chars, Char{Class: best, Step: step, Probability: float64(row[best])})
		}
		last = best
	}
	return chars
}

func confidence(chars []Char) float64 {
	sum := 0.0
	for _, c := range chars {
		sum += c.Probability
	}
	return sum / float64(max(1, len(chars)))
}
