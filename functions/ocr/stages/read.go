package stages

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/stagecoach-serving/stagecoach/functions/ocr/ocr"
	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/stage/join"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// recognise prepares the reading of one box.
func recognise(keys ocr.Keys, c *stage.Call) (work stage.Work, err error) {
	items := c.Items()
	if len(items) != 1 {
		return work, stage.BadInput(fmt.Errorf("%d items, want one box", len(items)))
	}
	crop, box, err := readBoxItem(items[0])
	if err != nil {
		return work, stage.BadInput(err)
	}
	reading, line := ocr.NewReading(keys, crop), ocr.Line{Box: ocr.Rect{Rectangle: box}}
	work.Sets = [][]tensor.Tensor{reading.Inputs}
	work.Answer = func(of []join.Result) (_ tensor.Activation, err error) {
		if of[0].Err != nil {
			return nil, reading.Failed(of[0].Err)
		}
		if line.Text, line.Confidence, err = reading.Text(of[0].Outputs); err != nil {
			return nil, err
		}
		return jsonItem(line)
	}
	return work, nil
}

// form is the form of an item with text, for messages.
const form = `{"text", "confidence", "box": [left, top, right, bottom]}`

func text(c *stage.Call) (tensor.Activation, error) {
	items := c.Items()
	pieces := make([]ocr.Line, len(items))
	for i, it := range items {
		if err := json.Unmarshal(it.Bytes, &pieces[i]); err != nil {
			return nil, stage.BadInput(fmt.Errorf("item %d: %w, want %s", i, err, form))
		}
		if pieces[i].Box.Empty() {
			return nil, stage.BadInput(fmt.Errorf("item %d: no box, want %s", i, form))
		}
	}
	lines := ocr.Assemble(pieces)
	plain := ocr.Plain(lines)
	if strings.Contains(c.HeaderValue("Accept"), "application/json") {
		return jsonItem(result{Text: plain, Lines: lines})
	}
	return tensor.Activation{{ContentType: "text/plain; charset=utf-8", Bytes: []byte(plain)}}, nil
}

// result is the JSON of a page's text and of its lines.
type result struct {
	Text  string     `json:"text"`
	Lines []ocr.Line `json:"lines"`
}

func jsonItem(v any) (tensor.Activation, error) {
	b, err := json.Marshal(v)
	return tensor.Activation{{ContentType: "application/json", Bytes: b}}, err
}
