package ocr_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/functions/ocr/ocr"
	"github.com/stagecoach-serving/stagecoach/functions/ocr/page"
	"github.com/stagecoach-serving/stagecoach/stage/zygote"
)

// TestRealModelsReadDrawnPages reads pages with known text, with the real models.
func TestRealModelsReadDrawnPages(t *testing.T) {
	detector, recogniser, keys := model(t, "det.onnx"), model(t, "rec.onnx"), keys(t)
	for name, noise := range map[string]int{"clean": 0, "noisy": 40} {
		t.Run(name, func(t *testing.T) {
			var got, want strings.Builder
			var detecting, recognising time.Duration
			lines := 0
			for seed := range uint64(4) {
				p, err := page.Draw(page.Options{Seed: seed, Width: 800, Height: 320, Font: page.Font(seed), Size: 14 + int(seed), Noise: noise})
				if err != nil {
					t.Fatal(err)
				}
				img, err := ocr.Decode(p.PNG)
				if err != nil {
					t.Fatal(err)
				}
				start := time.Now()
				boxes, err := ocr.Detect(detector, img)
				if err != nil {
					t.Fatal(err)
				}
				detecting += time.Since(start)
				start = time.Now()
				var pieces []ocr.Line
				for _, b := range boxes {
					text, confidence, err := ocr.Recognise(recogniser, keys, ocr.Crop(img, b.Rect))
					if err != nil {
						t.Fatal(err)
					}
					pieces = append(pieces, ocr.Line{Text: text, Confidence: confidence, Box: ocr.Rect{Rectangle: b.Rect}})
				}
				recognising += time.Since(start)
				lines += len(boxes)
				text := ocr.Plain(ocr.Assemble(pieces))
				if text != p.Text() {
					t.Logf("page %d: %.4f\n%s", seed, ocr.CER(text, p.Text()), differences(text, p.Text()))
				}
				got.WriteString(text + "\n")
				want.WriteString(p.Text() + "\n")
			}
			cer := ocr.CER(got.String(), want.String())
			t.Logf("character error rate %.4f over 4 pages, %d boxes; detection %v a page, recognition %v a line",
				cer, lines, detecting/4, recognising/time.Duration(lines))
			if cer > 0.02 {
				t.Errorf("character error rate %.4f, want at most 0.02", cer)
			}
		})
	}
}

// TestBlankPageHasNoBoxes checks that a page without text has no boxes, and that this is no error.
func TestBlankPageHasNoBoxes(t *testing.T) {
	boxes, err := ocr.Detect(model(t, "det.onnx"), blank(320, 240))
	if err != nil || len(boxes) != 0 {
		t.Errorf("boxes %v, error %v, want none", boxes, err)
	}
}

func differences(got, want string) string {
	g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
	var b strings.Builder
	for i := range min(len(g), len(w)) {
		if g[i] != w[i] {
			b.WriteString("got  " + g[i] + "\nwant " + w[i] + "\n")
		}
	}
	return b.String()
}

func model(t *testing.T, name string) *zygote.Session {
	t.Helper()
	s, err := zygote.Open(zygote.Options{Library: built(t, "ort/libonnxruntime.so.1"), Model: built(t, "models/ocr/"+name), Threads: 1, Start: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func keys(t *testing.T) ocr.Keys {
	t.Helper()
	b, err := os.ReadFile(built(t, "models/ocr/keys.txt"))
	if err != nil {
		t.Fatal(err)
	}
	k, err := ocr.ParseKeys(b)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func built(t *testing.T, name string) string {
	t.Helper()
	path, err := filepath.Abs("../../../build/" + name)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("%v: run make fetch", err)
		}
		t.Skipf("%v: run make fetch", err)
	}
	return path
}
