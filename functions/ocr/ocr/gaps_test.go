package ocr

import (
	"encoding/binary"
	"image"
	"image/color"
	"image/draw"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/tensor"
)

// bars draws a line of 100×30 pixels with ink of 20 pixels' height in the given columns.
func bars(paper, ink color.Color, columns ...[2]int) *image.RGBA {
	img := image.NewRGBA(image.Rect(0, 0, 100, 30))
	draw.Draw(img, img.Bounds(), image.NewUniform(paper), image.Point{}, draw.Src)
	for _, c := range columns {
		draw.Draw(img, image.Rect(c[0], 5, c[1], 25), image.NewUniform(ink), image.Point{}, draw.Src)
	}
	return img
}

func TestGapsAreWideRunsWithoutInk(t *testing.T) {
	for name, tc := range map[string]struct {
		columns [][2]int
		want    []float64
	}{
		"no ink":                       {nil, nil},
		"one word":                     {[][2]int{{10, 90}}, nil},
		"margins are no gaps":          {[][2]int{{40, 60}}, nil},
		"a gap of a quarter":           {[][2]int{{10, 40}, {45, 80}}, []float64{.425}},
		"less than a quarter":          {[][2]int{{10, 40}, {44, 90}}, nil},
		"narrow beside wide ones":      {[][2]int{{5, 20}, {30, 40}, {46, 60}, {70, 90}}, []float64{.25, .43, .65}},
		"narrower beside wide ones":    {[][2]int{{5, 20}, {31, 40}, {46, 60}, {71, 90}}, []float64{.255, .655}},
		"narrow ones when most are so": {[][2]int{{5, 20}, {26, 40}, {46, 60}, {72, 90}}, []float64{.23, .43, .66}},
	} {
		t.Run(name, func(t *testing.T) {
			for _, img := range []*image.RGBA{bars(color.White, color.Black, tc.columns...), bars(color.RGBA{20, 20, 60, 255}, color.RGBA{200, 220, 180, 255}, tc.columns...)} {
				if got := gaps(img); !slices.Equal(got, tc.want) {
					t.Errorf("gaps %v, want %v", got, tc.want)
				}
			}
		})
	}
}

func TestSpacedPutsSpacesAtGaps(t *testing.T) {
	keys := Keys{"", "a", "b", " "}
	chars := []Char{{Class: 1, Step: 1}, {Class: 2, Step: 3}, {Class: 1, Step: 5}, {Class: 2, Step: 7}}
	for name, tc := range map[string]struct {
		chars []Char
		steps float64
		gaps  []float64
		want  string
	}{
		"no gaps":           {chars, 9, nil, "abab"},
		"one":               {chars, 9, []float64{.5}, "ab ab"},
		"before and behind": {chars, 9, []float64{.01, .99}, "abab"},
		"two in one place":  {chars, 9, []float64{.45, .5}, "ab ab"},
		"each":              {chars, 9, []float64{.25, .5, .75}, "a b a b"},
		"a space is there":  {[]Char{{Class: 1, Step: 1}, {Class: 3, Step: 3}, {Class: 2, Step: 6}}, 9, []float64{.3, .6}, "a b"},
		"a longer line":     {chars, 20, []float64{.2, .9}, "ab ab"},
	} {
		if got := spaced(tc.chars, keys, tc.steps, tc.gaps); got != tc.want {
			t.Errorf("%s: %q, want %q", name, got, tc.want)
		}
	}
}

// reader is a recogniser that reads "ab", with the a at step 5 and the b at step 14 of 40.
type reader struct{ t *testing.T }

func (r reader) Run(in []tensor.Tensor, _ ...string) ([]tensor.Tensor, error) {
	if want := []int64{1, 3, 48, 320}; !slices.Equal(in[0].Shape, want) {
		r.t.Errorf("input of shape %v, want %v", in[0].Shape, want)
	}
	out := tensor.Tensor{Datatype: "FP32", Shape: []int64{1, 40, 4}, Data: make([]byte, 4*40*4)}
	for step, class := range map[int]int{5: 1, 14: 2} {
		binary.LittleEndian.PutUint32(out.Data[4*(4*step+class):], math.Float32bits(.5))
	}
	return []tensor.Tensor{out}, nil
}

// TestPaddingDoesNotMoveGaps checks that gaps have the right places although the recogniser gets a
// short line padded on the right.
func TestPaddingDoesNotMoveGaps(t *testing.T) {
	// 100×30, which is half of 320×48.
	line := bars(color.White, color.Black, [2]int{10, 45}, [2]int{55, 90})
	text, confidence, err := Recognise(reader{t}, Keys{"", "a", "b", " "}, line)
	if text != "a b" || confidence != .5 || err != nil {
		t.Errorf("%q with %g, error %v, want %q with 0.5", text, confidence, err, "a b")
	}
	if _, _, err := Recognise(reader{t}, Keys{"", "a", " "}, line); err == nil || !strings.Contains(err.Error(), "[1, steps, 3]") {
		t.Errorf("keys of another model: error %v", err)
	}
}

func TestDetectorSizeIsBoundedAndAMultiple(t *testing.T) {
	for _, tc := range [][4]int{{800, 600, 800, 608}, {960, 960, 960, 960}, {1920, 1080, 960, 544}, {16, 16, 32, 32}, {16, 1 << 20, 32, 960}, {3000, 4000, 736, 960}} {
		if w, h := detectorSize(tc[0], tc[1]); w != tc[2] || h != tc[3] {
			t.Errorf("%d×%d is scaled to %d×%d, want %d×%d", tc[0], tc[1], w, h, tc[2], tc[3])
		}
	}
}

func TestPlanesAreNormalisedAndPadded(t *testing.T) {
	img := image.NewRGBA(image.Rect(0, 0, 2, 2))
	img.SetRGBA(1, 0, color.RGBA{255, 51, 0, 255})
	in := planes(img, 3, [3]float32{0, .2, 0}, [3]float32{1, .5, 2})
	if !slices.Equal(in.Shape, []int64{1, 3, 2, 3}) || in.Validate() != nil {
		t.Fatalf("shape %v, %v", in.Shape, in.Validate())
	}
	want := []float32{
		0, 0, 0, 0, 0, 0, // blue
		-.4, 0, 0, -.4, -.4, 0, // green
		0, .5, 0, 0, 0, 0, // red
	}
	if got := floats(in.Data); !slices.Equal(got, want) {
		t.Errorf("planes %v, want %v", got, want)
	}
}
