// Package page draws pages of known text, as input for the OCR pipeline's demo, tests and
// benchmarks.
//
// A page depends only on its [Options]. [Sample] chooses the font and the size by the seed.
package page

import (
	"bytes"
	"fmt"
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"math/rand/v2"
	"strings"

	"golang.org/x/image/font"
	"golang.org/x/image/font/gofont/gobold"
	"golang.org/x/image/font/gofont/goitalic"
	"golang.org/x/image/font/gofont/gomedium"
	"golang.org/x/image/font/gofont/gomono"
	"golang.org/x/image/font/gofont/goregular"
	"golang.org/x/image/font/opentype"
	"golang.org/x/image/math/fixed"
)

// Options say what to draw.
type Options struct {
	Seed          uint64 // determines the words and the noise
	Width, Height int    // pixels
	Font          Font
	Size          int // font size in pixels; the line distance is twice as much
	Noise         int // maximum change per channel and pixel, 0..255
}

// Font is one of the Go fonts.
type Font int

// The fonts.
const (
	Regular Font = iota
	Bold
	Medium
	Mono
	Italic
	fonts // number of fonts
)

func (f Font) ttf() []byte {
	return [fonts][]byte{goregular.TTF, gobold.TTF, gomedium.TTF, gomono.TTF, goitalic.TTF}[f]
}

// Page is a drawn page.
type Page struct {
	Image *image.RGBA
	PNG   []byte
	Lines []string // its text, top to bottom
}

// Text returns the text of the page, with lines separated by newlines.
func (p *Page) Text() string { return strings.Join(p.Lines, "\n") }

// Sample draws a page of 800×600 pixels. The seed determines the font and the size, 14 to 17.
func Sample(seed uint64, noise int) (*Page, error) {
	return Draw(Options{Seed: seed, Width: 800, Height: 600, Font: Font(seed % uint64(fonts)), Size: 14 + int(seed%4), Noise: noise})
}

// The colours of the paper and the ink, and the left and right margins in pixels.
var (
	paper = color.RGBA{250, 249, 245, 255}
	ink   = color.RGBA{30, 30, 50, 255}
)

const margin = 28

// Draw draws a page.
func Draw(o Options) (*Page, error) {
	if o.Width < 200 || o.Height < 4*o.Size || o.Font < 0 || o.Font >= fonts || o.Size < 8 || o.Noise < 0 || o.Noise > 255 {
		return nil, fmt.Errorf("page: %+v, want a width of at least 200, a height of at least four times the size, a font below %d, a size of at least 8 and noise of 0..255", o, fonts)
	}
	parsed, err := opentype.Parse(o.Font.ttf())
	if err != nil {
		return nil, fmt.Errorf("page: font %d: %w", o.Font, err)
	}
	face, err := opentype.NewFace(parsed, &opentype.FaceOptions{Size: float64(o.Size), DPI: 72, Hinting: font.HintingFull})
	if err != nil {
		return nil, fmt.Errorf("page: font %d: %w", o.Font, err)
	}
	random := rand.New(rand.NewPCG(o.Seed, 0))
	p := &Page{Image: image.NewRGBA(image.Rect(0, 0, o.Width, o.Height))}
	draw.Draw(p.Image, p.Image.Bounds(), image.NewUniform(paper), image.Point{}, draw.Src)
	pen := &font.Drawer{Dst: p.Image, Src: image.NewUniform(ink), Face: face}
	for y := 2 * o.Size; y < o.Height-o.Size; y += 2 * o.Size {
		line := words(random, func(s string) bool { return pen.MeasureString(s).Ceil() <= o.Width-2*margin })
		pen.Dot = fixed.P(margin, y)
		pen.DrawString(line)
		p.Lines = append(p.Lines, line)
	}
	addNoise(p.Image, random, o.Noise)
	var b bytes.Buffer
	if err := png.Encode(&b, p.Image); err != nil {
		return nil, fmt.Errorf("page: %w", err)
	}
	p.PNG = b.Bytes()
	return p, nil
}

// words returns 3 to 14 random words, or fewer if they do not fit.
func words(random *rand.Rand, fits func(string) bool) string {
	all := strings.Fields(vocabulary)
	line := all[random.IntN(len(all))]
	for range 2 + random.IntN(12) {
		longer := line + " " + all[random.IntN(len(all))]
		if !fits(longer) {
			break
		}
		line = longer
	}
	return line
}

func addNoise(img *image.RGBA, random *rand.Rand, noise int) {
	if noise == 0 {
		return
	}
	for i := range img.Pix {
		if i%4 != 3 { // not the alpha channel
			img.Pix[i] = uint8(min(255, max(0, int(img.Pix[i])+random.IntN(2*noise+1)-noise)))
		}
	}
}

const vocabulary = `the quick pipeline serves images and text with adaptive batching across many replicas on
heterogeneous nodes while latency targets remain strict under bursty load invoice number total amount due date account
customer address shipping Order Payment Received 2024 1999 $42.50 #A-1093 scheduler gateway memory kernel Each stage has a
queue of its own; autoscaler gives replicas to stages that hold it up. Dear Ms. Turner, please find enclosed your statement
(page 3/7), 12,480 units @ 0.95 = 11,856.00 EUR. "Warm" parameters fork copy-on-write: 30 ms, not 3 s! Why? I am x86_64 &
arm64. e-mail: ops@example.org 50% off`
