package stages

import (
	"encoding/json"
	"log/slog"
	"math"
	"testing"

	"github.com/stagecoach-serving/stagecoach/functions/ocr/ocr"
	"github.com/stagecoach-serving/stagecoach/functions/ocr/page"
	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/stage/join"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// counted is a model that counts its runs.
type counted struct {
	join.Model
	runs int
}

func (c *counted) Run(inputs []tensor.Tensor, outputs ...string) ([]tensor.Tensor, error) {
	c.runs++
	return c.Model.Run(inputs, outputs...)
}

// TestBatchesOfBoxesEqualSingleBoxes reads the boxes of a page as one batch and one by one.
func TestBatchesOfBoxesEqualSingleBoxes(t *testing.T) {
	m, keys := &counted{Model: model(t, "rec.onnx")}, keys(t)
	p, err := page.Draw(page.Options{Seed: 7, Width: 500, Height: 320, Size: 16, Noise: 10})
	if err != nil {
		t.Fatal(err)
	}
	boxes, err := detect(model(t, "det.onnx"))(call("", tensor.Item{ContentType: "image/png", Bytes: p.PNG}))
	if err != nil || len(boxes) < 5 {
		t.Fatalf("%d boxes, %v, want at least 5", len(boxes), err)
	}
	// Each box comes twice, so that there are equal widths.
	boxes = append(boxes, boxes...)
	works := make([]stage.Work, len(boxes))
	var sets [][]tensor.Tensor
	for i, box := range boxes {
		if works[i], err = recognise(keys, call("", box)); err != nil {
			t.Fatal(err)
		}
		sets = append(sets, works[i].Sets...)
	}
	r := join.New(m, slog.New(slog.DiscardHandler))
	r.Run(sets) // the first joined run is checked
	m.runs = 0
	results := r.Run(sets)
	if t.Logf("%d runs for %d boxes", m.runs, len(boxes)); m.runs > len(boxes)/2 {
		t.Errorf("%d runs for %d boxes, want at most half", m.runs, len(boxes))
	}
	for i, box := range boxes {
		out, err := works[i].Answer(results[i : i+1])
		if err != nil {
			t.Fatal(err)
		}
		want, err := alone(m, keys)(call("", box))
		if err != nil {
			t.Fatal(err)
		}
		a, b := lineOf(t, out), lineOf(t, want)
		if a.Text != b.Text || a.Box != b.Box || !(math.Abs(a.Confidence-b.Confidence) <= 1e-4) {
			t.Errorf("box %d: %+v, want %+v", i, a, b)
		}
	}
}

func lineOf(t *testing.T, a tensor.Activation) (l ocr.Line) {
	t.Helper()
	if len(a) != 1 {
		t.Fatalf("%d items, want one", len(a))
	}
	if err := json.Unmarshal(a[0].Bytes, &l); err != nil {
		t.Fatal(err)
	}
	return l
}
