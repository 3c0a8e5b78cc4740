package ocr

import (
	"errors"
	"fmt"
	"image"
	"math"
	"slices"

	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Parameters that the detector was trained with, and parameters for reading its output, a map of
// where the page has text. unclip and extraHeight were chosen on pages that package page has drawn,
// with text of 14–17 pixels: smaller values cut ascenders off, and larger ones include neighbouring
// lines.
const (
	longestSide  = 960 // pixels; larger pages are scaled down
	sideMultiple = 32
	mapThreshold = 0.3 // a pixel above it belongs to text
	minScore     = 0.6 // minimum mean of the map within a box
	minMapSide   = 3   // pixels of the map
	minPageSide  = 4   // pixels of the page
	unclip       = 1.6 // growth of boxes: the network has learned shrunk ones (DB, eq. 10)
	extraHeight  = 0.05
)

// MaxBoxes is the maximum number of boxes per page, because each box is a call.
const MaxBoxes = 1000

// ErrCrowded is in Detect's error for a page with more than [MaxBoxes] boxes.
var ErrCrowded = errors.New("page is too full")

// Box is an area with text.
type Box struct {
	Rect  image.Rectangle // in the page's pixels
	Score float64         // confidence of the detector, 0..1
}

// Detect returns the boxes with text on a page, in reading order.
func Detect(m Model, page *image.RGBA) ([]Box, error) {
	size := page.Bounds().Size()
	w, h := detectorSize(size.X, size.Y)
	out, err := m.Run([]tensor.Tensor{planes(scaled(page, page.Bounds(), w, h), w, [3]float32{.485, .456, .406}, [3]float32{.229, .224, .225})})
	if err != nil {
		return nil, fmt.Errorf("detect on %d×%d: %w", w, h, err)
	}
	if want := []int64{1, 1, int64(h), int64(w)}; len(out) != 1 || out[0].Datatype != "FP32" || !slices.Equal(out[0].Shape, want) {
		return nil, fmt.Errorf("detector's output: %s, want one FP32 %v", describe(out), want)
	}
	boxes := Boxes(floats(out[0].Data), w, h, size)
	if len(boxes) > MaxBoxes {
		return nil, fmt.Errorf("%w: %d text boxes, want at most %d; send it in parts", ErrCrowded, len(boxes), MaxBoxes)
	}
	return boxes, nil
}

func describe(out []tensor.Tensor) string {
	s := ""
	for _, t := range out {
		s += fmt.Sprintf("%s %s%v ", t.Name, t.Datatype, t.Shape)
	}
	return s
}

// detectorSize returns the size that a page is scaled to. Its longest side is at most longestSide,
// and both sides are multiples of sideMultiple.
func detectorSize(w, h int) (int, int) {
	scale := min(1, longestSide/float64(max(w, h)))
	side := func(v int) int {
		return max(1, int(math.Round(float64(v)*scale/sideMultiple))) * sideMultiple
	}
	return side(w), side(h)
}

// Boxes turns the detector's map into boxes on a page of the given size, in reading order. p has
// w×h probabilities, row by row. A box is the upright rectangle around a connected area above the
// threshold, plus a margin. The margin is needed because the network was trained to find areas
// smaller than the text.
func Boxes(p []float32, w, h int, page image.Point) []Box {
	var boxes []Box
	for _, r := range areas(p, w, h) {
		if min(r.Dx(), r.Dy()) < minMapSide {
			continue
		}
		score := mean(p, w, r)
		if score < minScore {
			continue
		}
		grown := grow(r, float64(page.X)/float64(w), float64(page.Y)/float64(h)).Intersect(image.Rectangle{Max: page})
		if min(grown.Dx(), grown.Dy()) < minPageSide {
			continue
		}
		boxes = append(boxes, Box{Rect: grown, Score: score})
	}
	var out []Box
	for _, line := range group(boxes, func(b Box) image.Rectangle { return b.Rect }) {
		out = append(out, line...)
	}
	return out
}

// areas returns the bounds of each 8-connected area above the threshold, ordered by their first
// pixels.
func areas(p []float32, w, h int) []image.Rectangle {
	seen := make([]bool, w*h)
	var all []image.Rectangle
	var stack []int
	visit := func(i int) {
		if !seen[i] && p[i] > mapThreshold {
			seen[i] = true
			stack = append(stack, i)
		}
	}
	for i := range p {
		visit(i)
		if len(stack) == 0 {
			continue
		}
		r := image.Rectangle{Min: image.Pt(w, h)}
		for len(stack) > 0 {
			x, y := stack[len(stack)-1]%w, stack[len(stack)-1]/w
			stack = stack[:len(stack)-1]
			r.Min.X, r.Min.Y = min(r.Min.X, x), min(r.Min.Y, y)
			r.Max.X, r.Max.Y = max(r.Max.X, x+1), max(r.Max.Y, y+1)
			for b := max(0, y-1); b < min(h, y+2); b++ {
				for a := max(0, x-1); a < min(w, x+2); a++ {
					visit(b*w + a)
				}
			}
		}
		all = append(all, r)
	}
	return all
}

// mean returns the mean of the map within r.
func mean(p []float32, w int, r image.Rectangle) float64 {
	sum := 0.0
	for y := r.Min.Y; y < r.Max.Y; y++ {
		for _, v := range p[y*w+r.Min.X : y*w+r.Max.X] {
			sum += float64(v)
		}
	}
	return sum / float64(r.Dx()*r.Dy())
}

// grow moves each side of r outwards by area·unclip/perimeter (DB, eq. 10), adds some height, and
// scales the result to the page.
func grow(r image.Rectangle, sx, sy float64) image.Rectangle {
	w, h := float64(r.Dx()), float64(r.Dy())
	d := w * h * unclip / (2 * (w + h))
	v := d + extraHeight*(h+2*d)
	at := func(v float64) int { return int(math.Round(v)) }
	return image.Rect(
		at((float64(r.Min.X)-d)*sx), at((float64(r.Min.Y)-v)*sy),
		at((float64(r.Max.X)+d)*sx), at((float64(r.Max.Y)+v)*sy))
}
