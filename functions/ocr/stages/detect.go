package stages

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/stagecoach-serving/stagecoach/functions/ocr/ocr"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/stage/join"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// hook answers one call.
type hook func(c *stage.Call) (tensor.Activation, error)

var errNoModel = fmt.Errorf("no model, want the environment %s to name one", wire.EnvModel)

// Detect returns the hooks of the stage that finds the boxes with text on a page.
func Detect() stage.Hooks {
	var answer hook
	return stage.Hooks{
		Place: func(_ context.Context, r *stage.Replica) error {
			if r.Model() == nil {
				return errNoModel
			}
			answer = detect(r.Model())
			return nil
		},
		Infer: stage.Each(func(c *stage.Call) (tensor.Activation, error) { return answer(c) }),
	}
}

// Recognise returns the hooks of the stage that reads the text of one box. Boxes whose scaled lines
// have the same width, such as all short ones, run through the model together. The file keys.txt is
// beside the model.
func Recognise() stage.Hooks {
	var keys ocr.Keys
	var runner *join.Runner
	return stage.Hooks{
		MaxBatch: stage.MostTogether,
		Place: func(_ context.Context, r *stage.Replica) (err error) {
			if r.Model() == nil {
				return errNoModel
			}
			runner = join.New(r.Model(), r.Log)
			b, err := os.ReadFile(filepath.Join(filepath.Dir(os.Getenv(wire.EnvModel)), "keys.txt"))
			if err != nil {
				return fmt.Errorf("the recogniser's characters: %w", err)
			}
			keys, err = ocr.ParseKeys(b)
			return err
		},
		Infer: stage.Together(
			func(sets [][]tensor.Tensor) []join.Result { return runner.Run(sets) },
			func(c *stage.Call) (stage.Work, error) { return recognise(keys, c) }),
	}
}

// Text returns the hooks of the stage that joins the texts of a page.
func Text() stage.Hooks { return stage.Hooks{Infer: stage.Each(text)} }

func detect(m ocr.Model) hook {
	return func(c *stage.Call) (tensor.Activation, error) {
		items := c.Items()
		if len(items) != 1 || items[0].Tensors != nil {
			return nil, stage.BadInput(fmt.Errorf("%d items, want one, a PNG or JPEG", len(items)))
		}
		page, err := ocr.Decode(items[0].Bytes)
		if err != nil {
			return nil, stage.BadInput(err)
		}
		boxes, err := ocr.Detect(m, page)
		if errors.Is(err, ocr.ErrCrowded) {
			return nil, stage.BadInput(err)
		}
		if err != nil {
			return nil, err
		}
		out := make(tensor.Activation, len(boxes))
		for i, b := range boxes {
			out[i] = boxItem(ocr.Crop(page, b.Rect), b.Rect)
		}
		return out, nil
	}
}
