package ocr

import (
	"fmt"
	"image"
	"math"
	"strings"

	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Parameters of the recogniser's training.
const (
	lineHeight = 48  // pixels
	minWidth   = 320 // narrower lines are padded
	maxWidth   = 4096
)

// Crop returns the part r of a page for [Recognise]. A part that is higher than the recogniser's
// height is scaled down to it.
func Crop(page *image.RGBA, r image.Rectangle) *image.RGBA {
	w, h := r.Dx(), r.Dy()
	if h > lineHeight {
		w, h = lineWidth(w, h), lineHeight
	}
	return scaled(page, r, w, h)
}

// lineWidth returns the width of a line of w×h pixels after scaling to the recogniser's height.
func lineWidth(w, h int) int {
	return min(maxWidth, int(math.Ceil(lineHeight*float64(w)/float64(h))))
}

// Recognise reads one line of text. It returns the text and the mean probability of its characters,
// or 0 if there are none.
func Recognise(m Model, keys Keys, line *image.RGBA) (string, float64, error) {
	r := NewReading(keys, line)
	out, err := m.Run(r.Inputs)
	if err != nil {
		return "", 0, r.Failed(err)
	}
	return r.Text(out)
}

// Reading is a line of text before the recogniser has run.
type Reading struct {
	Inputs []tensor.Tensor // of the recogniser

	keys     Keys
	line     *image.RGBA
	w, width int // of the scaled line, without and with padding
}

// NewReading returns the reading of a line.
func NewReading(keys Keys, line *image.RGBA) Reading {
	w := lineWidth(line.Bounds().Dx(), line.Bounds().Dy())
	r := Reading{keys: keys, line: line, w: w, width: max(w, minWidth)}
	half := [3]float32{.5, .5, .5}
	r.Inputs = []tensor.Tensor{planes(scaled(line, line.Bounds(), w, lineHeight), r.width, half, half)}
	return r
}

// Failed adds the line's size to an error of the recogniser.
func (r Reading) Failed(err error) error {
	return fmt.Errorf("recognise %d×%d: %w", r.width, lineHeight, err)
}

// Text returns the text that the recogniser has read and the mean probability of its characters, or
// 0 if there are none.
func (r Reading) Text(out []tensor.Tensor) (string, float64, error) {
	if len(out) != 1 || out[0].Datatype != "FP32" || len(out[0].Shape) != 3 || out[0].Shape[0] != 1 || out[0].Shape[2] != int64(len(r.keys)) {
		return "", 0, fmt.Errorf("recogniser's output: %s, want one FP32 [1, steps, %d]: do the keys belong to this model?", describe(out), len(r.keys))
	}
	chars := Decoded(floats(out[0].Data), len(r.keys))
	steps := float64(out[0].Shape[1]) * float64(r.w) / float64(r.width)
	text := spaced(chars, r.keys, steps, gaps(r.line))
	return strings.TrimSpace(text), confidence(chars), nil
}

// Char is one character that the recogniser has read.
type Char struct {
	Class       int     // index into Keys, at least 1
	Step        int     // column of the recogniser's output
	Probability float64 // 0..1
}

// Decoded reads the recogniser's output, which has one row of class probabilities per step. It
// takes the best class of each step, merges repetitions, and leaves out class 0, the blank (best
// path decoding; Graves et al. 2006, section 3.2).
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
