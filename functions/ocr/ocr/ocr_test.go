package ocr_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"hash/crc32"
	"image"
	"image/color"
	"image/draw"
	"image/jpeg"
	"image/png"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/functions/ocr/ocr"
)

func blank(w, h int) *image.RGBA {
	img := image.NewRGBA(image.Rect(0, 0, w, h))
	draw.Draw(img, img.Bounds(), image.White, image.Point{}, draw.Src)
	return img
}

func encoded(t testing.TB, img image.Image) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := png.Encode(&b, img); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// claiming returns a small PNG whose header claims another size.
func claiming(t testing.TB, w, h uint32) []byte {
	b := encoded(t, blank(20, 20))
	header := b[12:29] // "IHDR", width, height, five more bytes
	binary.BigEndian.PutUint32(header[4:], w)
	binary.BigEndian.PutUint32(header[8:], h)
	binary.BigEndian.PutUint32(b[29:], crc32.ChecksumIEEE(header))
	return b
}

func TestDecodePutsPicturesOnWhite(t *testing.T) {
	var photo bytes.Buffer
	if err := jpeg.Encode(&photo, blank(40, 30), nil); err != nil {
		t.Fatal(err)
	}
	clear := image.NewNRGBA(image.Rect(5, 5, 45, 35)) // transparent pixels become white
	for name, b := range map[string][]byte{"png": encoded(t, blank(40, 30)), "jpeg": photo.Bytes(), "transparent": encoded(t, clear)} {
		img, err := ocr.Decode(b)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if img.Bounds() != image.Rect(0, 0, 40, 30) || img.RGBAAt(7, 7) != (color.RGBA{255, 255, 255, 255}) {
			t.Errorf("%s: %v with %v, want 40×30 of white", name, img.Bounds(), img.RGBAAt(7, 7))
		}
	}
}

func TestDecodeRefusesInvalidPictures(t *testing.T) {
	whole := encoded(t, blank(200, 100))
	for name, tc := range map[string]struct {
		b    []byte
		want string
	}{
		"nothing":          {nil, "want a PNG or JPEG"},
		"text":             {[]byte("hello, world"), `"hello, w"`},
		"truncated":        {whole[:len(whole)/2], "want a whole file"},
		"truncated header": {whole[:20], "want a whole PNG or JPEG"},
		"one pixel":        {encoded(t, blank(1, 1)), "png of 1×1 pixels, want sides of at least 16"},
		"low":              {encoded(t, blank(400, 15)), "png of 400×15 pixels"},
		"huge":             {claiming(t, 1<<20, 1<<20), "1048576×1048576 pixels"},
		"a pixel too many": {claiming(t, 4097, 4096), "at most 16777216 pixels"},
		"a lie":            {claiming(t, 4096, 4096), "want a whole file"},
	} {
		if _, err := ocr.Decode(tc.b); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: error %v, want %q in it", name, err, tc.want)
		}
	}
}

// mapWith returns a w×h map with rectangles of the given probability.
func mapWith(w, h int, v float32, rs ...image.Rectangle) []float32 {
	p := make([]float32, w*h)
	for _, r := range rs {
		for y := r.Min.Y; y < r.Max.Y; y++ {
			for x := r.Min.X; x < r.Max.X; x++ {
				p[y*w+x] = v
			}
		}
	}
	return p
}

func TestBoxesAreGrownAndInReadingOrder(t *testing.T) {
	r := image.Rect
	for name, tc := range map[string]struct {
		p    []float32
		page image.Point
		want []image.Rectangle
	}{
		"nothing":         {mapWith(100, 50, 0), image.Pt(100, 50), nil},
		"below threshold": {mapWith(100, 50, .3, r(10, 10, 60, 20)), image.Pt(100, 50), nil},
		"unsure":          {mapWith(100, 50, .59, r(10, 10, 60, 20)), image.Pt(100, 50), nil},
		"too thin":        {mapWith(100, 50, .9, r(10, 10, 60, 12)), image.Pt(100, 50), nil},
		"grown by w·h·1.6/2(w+h), then 5 % of the height":     {mapWith(100, 50, .9, r(20, 20, 60, 30)), image.Pt(100, 50), []image.Rectangle{r(14, 12, 66, 38)}},
		"on a page twice the map's width and half its height": {mapWith(100, 50, .9, r(20, 20, 60, 30)), image.Pt(200, 25), []image.Rectangle{r(27, 6, 133, 19)}},
		"cut off at the page":                                 {mapWith(100, 50, .9, r(0, 0, 100, 50)), image.Pt(100, 50), []image.Rectangle{r(0, 0, 100, 50)}},
		"touching at a corner is one":                         {mapWith(100, 50, .9, r(20, 20, 30, 25), r(30, 25, 31, 26), r(20, 26, 30, 27)), image.Pt(100, 50), []image.Rectangle{r(17, 16, 34, 31)}},
		"two of a line, left first":                           {mapWith(200, 50, .9, r(120, 18, 160, 28), r(20, 20, 60, 30)), image.Pt(200, 50), []image.Rectangle{r(14, 12, 66, 38), r(114, 10, 166, 36)}},
		"two lines, upper first":                              {mapWith(200, 90, .9, r(20, 60, 60, 70), r(120, 20, 160, 30)), image.Pt(200, 90), []image.Rectangle{r(114, 12, 166, 38), r(14, 52, 66, 78)}},
	} {
		t.Run(name, func(t *testing.T) {
			w := 100
			if tc.page.X == 200 && len(tc.p) != 100*50 {
				w = 200
			}
			var got []image.Rectangle
			for _, b := range ocr.Boxes(tc.p, w, len(tc.p)/w, tc.page) {
				got = append(got, b.Rect)
			}
			if !slices.Equal(got, tc.want) {
				t.Errorf("boxes %v, want %v", got, tc.want)
			}
		})
	}
}

// TestBoxContainsItsAreaAndScalesWithIt checks that a box contains its area, and scales with it.
func TestBoxContainsItsAreaAndScalesWithIt(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 0))
	for range 200 {
		x, y := random.IntN(100), random.IntN(100)
		area := image.Rect(x, y, x+3+random.IntN(100), y+3+random.IntN(100))
		p := mapWith(256, 256, .9, area)
		small, large := ocr.Boxes(p, 256, 256, image.Pt(256, 256)), ocr.Boxes(p, 256, 256, image.Pt(1024, 1024))
		if len(small) != 1 || len(large) != 1 || !area.In(small[0].Rect) {
			t.Fatalf("area %v: boxes %v and %v, want one each, with the area inside", area, small, large)
		}
		for _, d := range []int{large[0].Rect.Min.X - 4*small[0].Rect.Min.X, large[0].Rect.Max.Y - 4*small[0].Rect.Max.Y} {
			if max(d, -d) > 2 {
				t.Fatalf("area %v: box %v on a page four times as large as that with %v", area, large[0].Rect, small[0].Rect)
			}
		}
	}
}

func FuzzBoxes(f *testing.F) {
	f.Add([]byte{0, 255, 255, 255, 0, 255, 255, 255, 0, 255, 255, 255}, uint8(4), uint16(40), uint16(30))
	f.Add(bytes.Repeat([]byte{200}, 64), uint8(8), uint16(8), uint16(800))
	f.Fuzz(func(t *testing.T, values []byte, width uint8, pageW, pageH uint16) {
		w := max(1, int(width))
		h := len(values) / w
		p := make([]float32, w*h)
		for i := range p {
			p[i] = float32(values[i]) / 255
		}
		page := image.Rect(0, 0, 1+int(pageW), 1+int(pageH))
		if h == 0 {
			return
		}
		for _, b := range ocr.Boxes(p, w, h, page.Max) {
			if !b.Rect.In(page) || b.Rect.Dx() < 4 || b.Rect.Dy() < 4 || b.Score < .6 || b.Score > 1.0001 {
				t.Errorf("box %v with score %g on %v", b.Rect, b.Score, page)
			}
		}
	})
}

func FuzzDecode(f *testing.F) {
	whole := encoded(f, blank(20, 20))
	f.Add(whole)
	f.Add(whole[:40])
	f.Add(claiming(f, 4096, 4096))
	f.Add([]byte("\xff\xd8\xff\xe0"))
	f.Fuzz(func(t *testing.T, b []byte) {
		img, err := ocr.Decode(b)
		if (img == nil) == (err == nil) {
			t.Fatalf("image %v and error %v", img != nil, err)
		}
		if err == nil && (img.Rect.Min != image.Point{} || img.Rect.Dx() < ocr.MinSide || img.Rect.Dx()*img.Rect.Dy() > ocr.MaxPixels) {
			t.Errorf("image of %v", img.Rect)
		}
	})
}

func TestCropScalesLargePartsDown(t *testing.T) {
	for name, tc := range map[string]struct {
		r    image.Rectangle
		w, h int
	}{
		"small stays":            {image.Rect(10, 10, 210, 40), 200, 30},
		"high is scaled to 48":   {image.Rect(0, 0, 200, 96), 100, 48},
		"very long is squeezed":  {image.Rect(0, 0, 30000, 50), 4096, 48},
		"higher than it is wide": {image.Rect(0, 0, 10, 500), 1, 48},
	} {
		if got := ocr.Crop(blank(30000, 500), tc.r).Bounds(); got != image.Rect(0, 0, tc.w, tc.h) {
			t.Errorf("%s: %v becomes %v, want %d×%d", name, tc.r, got, tc.w, tc.h)
		}
	}
}

func TestDecodedMergesRepetitions(t *testing.T) {
	row := func(class int) []float32 {
		p := []float32{.1, .1, .1}
		p[class] = .8
		return p
	}
	for name, tc := range map[string]struct{ steps, want []int }{
		"nothing":                 {nil, nil},
		"blanks":                  {[]int{0, 0, 0}, nil},
		"repetition is one":       {[]int{1, 1, 1}, []int{1}},
		"a blank parts two":       {[]int{1, 0, 1}, []int{1, 1}},
		"change without a blank":  {[]int{0, 1, 1, 2, 2, 0}, []int{1, 2}},
		"blank, twice, blank, it": {[]int{0, 2, 2, 0, 0, 2}, []int{2, 2}},
	} {
		var p []float32
		for _, class := range tc.steps {
			p = append(p, row(class)...)
		}
		var got []int
		for _, c := range ocr.Decoded(p, 3) {
			got = append(got, c.Class)
			if tc.steps[c.Step] != c.Class || c.Probability < .79 || c.Probability > .81 {
				t.Errorf("%s: %+v", name, c)
			}
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("%s: steps %v give %v, want %v", name, tc.steps, got, tc.want)
		}
	}
}

func TestParseKeysAddsBlankAndSpace(t *testing.T) {
	keys, err := ocr.ParseKeys([]byte("a\n\u3000\n…"))
	if want := (ocr.Keys{"", "a", "\u3000", "…", " "}); err != nil || !slices.Equal(keys, want) {
		t.Errorf("keys %q, error %v, want %q", keys, err, want)
	}
	for b, want := range map[string]string{"": `line 1 is ""`, "a\n\nb": `line 2 is ""`, "a\nbc": `line 2 is "bc"`, "a\n\xff": "not UTF-8"} {
		if _, err := ocr.ParseKeys([]byte(b)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("keys %q: error %v, want %q in it", b, err, want)
		}
	}
}

func line(text string, x, y, w, h int) ocr.Line {
	return ocr.Line{Text: text, Confidence: .5, Box: ocr.Rect{Rectangle: image.Rect(x, y, x+w, y+h)}}
}

func TestAssembleJoinsPiecesOfALine(t *testing.T) {
	for name, tc := range map[string]struct {
		pieces []ocr.Line
		want   string
	}{
		"nothing":                    {nil, ""},
		"one":                        {[]ocr.Line{line("a", 0, 0, 10, 10)}, "a"},
		"two lines":                  {[]ocr.Line{line("b", 0, 20, 10, 10), line("a", 50, 0, 10, 10)}, "a\nb"},
		"one line, not quite level":  {[]ocr.Line{line("b", 50, 0, 10, 10), line("a", 0, 4, 10, 10)}, "a b"},
		"half a line lower is below": {[]ocr.Line{line("a", 50, 0, 10, 10), line("b", 0, 5, 10, 10)}, "a\nb"},
		"small beside large":         {[]ocr.Line{line("b", 50, 8, 10, 10), line("a", 0, 0, 40, 30)}, "a b"},
		"a block beside three lines": {[]ocr.Line{line("block", 0, 0, 40, 60), line("1", 50, 2, 9, 10), line("2", 50, 25, 9, 10), line("3", 50, 48, 9, 10)}, "block 2\n1\n3"},
		"without text":               {[]ocr.Line{line("", 0, 0, 10, 10), line("a", 20, 0, 10, 10)}, "a"},
	} {
		if got := ocr.Plain(ocr.Assemble(tc.pieces)); got != tc.want {
			t.Errorf("%s: %q, want %q", name, got, tc.want)
		}
	}
	joined := ocr.Assemble([]ocr.Line{{Text: "abc", Confidence: 1, Box: line("", 0, 0, 10, 10).Box}, {Text: "d", Confidence: .6, Box: line("", 20, 1, 10, 10).Box}})
	if want := []ocr.Line{{Text: "abc d", Confidence: .9, Box: line("", 0, 0, 30, 11).Box}}; !reflect.DeepEqual(joined, want) {
		t.Errorf("joined %+v, want %+v", joined, want)
	}
}

// TestAssembleIgnoresTheOrderOfPieces checks that the order of the pieces does not matter, even
// among equal boxes, and that Assemble does not change them.
func TestAssembleIgnoresTheOrderOfPieces(t *testing.T) {
	random := rand.New(rand.NewPCG(2, 0))
	for range 300 {
		var pieces []ocr.Line
		for i := range 1 + random.IntN(12) {
			pieces = append(pieces, line(string(rune('a'+i)), random.IntN(5)*10, random.IntN(40), 10, 5+random.IntN(20)))
		}
		want := ocr.Assemble(pieces)
		random.Shuffle(len(pieces), func(i, j int) { pieces[i], pieces[j] = pieces[j], pieces[i] })
		before := slices.Clone(pieces)
		if got := ocr.Assemble(pieces); !reflect.DeepEqual(got, want) {
			t.Fatalf("shuffled %+v, want %+v", got, want)
		}
		if !reflect.DeepEqual(pieces, before) {
			t.Fatal("the pieces were changed")
		}
	}
}

func TestLineJSON(t *testing.T) {
	want := line("a", 1, 2, 3, 4)
	b, err := json.Marshal(want)
	if err != nil || string(b) != `{"text":"a","confidence":0.5,"box":[1,2,4,6]}` {
		t.Fatalf("%s, error %v", b, err)
	}
	var got ocr.Line
	if err := json.Unmarshal(b, &got); err != nil || got != want {
		t.Errorf("%+v, error %v, want %+v", got, err, want)
	}
	for _, box := range []string{`[]`, `[1,2,3]`, `[4,2,1,6]`, `[1,2,1,6]`, `"x"`, `{}`, `[0,0,1.5,2]`} {
		if err := json.Unmarshal([]byte(`{"box":`+box+`}`), &got); err == nil || !strings.Contains(err.Error(), "want [left, top, right, bottom]") {
			t.Errorf("box %s: error %v", box, err)
		}
	}
}

func TestCERIsTheEditDistancePerCharacter(t *testing.T) {
	for _, tc := range []struct {
		got, want string
		cer       float64
	}{
		{"", "", 0},
		{"a", "", 1},
		{"", "abc", 1},
		{"abc", "abc", 0},
		{"abd", "abc", 1. / 3},
		{"kitten", "sitting", 3. / 7},
		{"größe", "große", .2},
		{"abcdef", "ab", 2},
	} {
		if got := ocr.CER(tc.got, tc.want); got != tc.cer {
			t.Errorf("CER(%q, %q) = %g, want %g", tc.got, tc.want, got, tc.cer)
		}
	}
	random := rand.New(rand.NewPCG(3, 0))
	text := func() string {
		b := make([]rune, random.IntN(12))
		for i := range b {
			b[i] = rune('α' + random.IntN(3))
		}
		return string(b)
	}
	edits := func(got, want string) float64 { return ocr.CER(got, want+"-") * float64(len([]rune(want))+1) }
	for range 500 {
		a, b, c := text(), text(), text()
		if d, e := edits(a+"-", b), edits(b+"-", a); d-e > 1e-9 || e-d > 1e-9 {
			t.Fatalf("%q and %q are %g apart, and %g the other way", a, b, d, e)
		}
		if edits(a+"-", c) > edits(a+"-", b)+edits(b+"-", c)+1e-9 {
			t.Fatalf("%q, %q, %q: the way through the middle is shorter", a, b, c)
		}
		if edits(a+"-", a) != 0 {
			t.Fatalf("%q is not itself", a)
		}
	}
}
