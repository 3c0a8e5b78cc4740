package page_test

import (
	"bytes"
	"image"
	"image/png"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/functions/ocr/page"
)

func sample(t *testing.T, seed uint64, noise int) *page.Page {
	t.Helper()
	p, err := page.Sample(seed, noise)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestSampleDependsOnlyOnItsOptions(t *testing.T) {
	for seed := range uint64(2) {
		clean, again, noisy := sample(t, seed, 0), sample(t, seed, 0), sample(t, seed, 30)
		if !bytes.Equal(clean.PNG, again.PNG) || clean.Text() != again.Text() {
			t.Errorf("seed %d: two pages", seed)
		}
		if noisy.Text() != clean.Text() || bytes.Equal(noisy.Image.Pix, clean.Image.Pix) {
			t.Errorf("seed %d: noise changes the text or not the picture", seed)
		}
		img, err := png.Decode(bytes.NewReader(clean.PNG))
		if err != nil || img.Bounds() != image.Rect(0, 0, 800, 600) {
			t.Fatalf("seed %d: %v, want 800×600", seed, err)
		}
		if len(clean.Lines) < 16 || slices.ContainsFunc(clean.Lines, func(s string) bool { return s == "" || strings.TrimSpace(s) != s }) {
			t.Errorf("seed %d: lines %q, want at least 16, each with text", seed, clean.Lines)
		}
	}
}

func TestSeedChangesTheWords(t *testing.T) {
	texts := map[string]uint64{}
	for seed := range uint64(4) {
		p, err := page.Draw(page.Options{Seed: seed, Width: 300, Height: 100, Size: 14})
		if err != nil {
			t.Fatal(err)
		}
		if other, ok := texts[p.Text()]; ok {
			t.Errorf("seeds %d and %d: both %q", other, seed, p.Text())
		}
		texts[p.Text()] = seed
	}
}

func TestDrawRefuses(t *testing.T) {
	good := page.Options{Width: 300, Height: 200, Size: 14}
	if _, err := page.Draw(good); err != nil {
		t.Fatal(err)
	}
	for _, change := range []func(*page.Options){
		func(o *page.Options) { o.Width = 100 },
		func(o *page.Options) { o.Height = 50 },
		func(o *page.Options) { o.Font = 5 },
		func(o *page.Options) { o.Font = -1 },
		func(o *page.Options) { o.Size = 7 },
		func(o *page.Options) { o.Noise = 256 },
	} {
		bad := good
		change(&bad)
		if _, err := page.Draw(bad); err == nil || !strings.Contains(err.Error(), "want") {
			t.Errorf("%+v: error %v", bad, err)
		}
	}
}
