package stage

import (
	"context"
	"errors"
	"fmt"

	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/stage/join"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Model returns the hooks of a stage that runs its ONNX model once per batch, as far as the items
// can be joined (see package join). before turns an item into the model's inputs, and after turns
// the model's outputs into the item of the answer. If before or after is nil, the items on its side
// are sets of tensors and stay unchanged. An error of before is the client's fault (400). It fails
// the item's call and no other call of the batch.
func Model(before func(c *Call, it tensor.Item) ([]tensor.Tensor, error), after func(c *Call, out []tensor.Tensor) (tensor.Item, error)) Hooks {
	if before == nil {
		before = tensors
	}
	if after == nil {
		after = func(_ *Call, out []tensor.Tensor) (tensor.Item, error) {
			return tensor.Item{Tensors: out}, nil
		}
	}
	var runner *join.Runner
	return Hooks{
		MaxBatch: MostTogether,
		Place: func(_ context.Context, r *Replica) error {
			model := r.Model()
			if model == nil {
				return errors.New("no model: set " + wire.EnvModel + " in the function's environment to the ONNX file, relative to the image, such as model/model.onnx")
			}
			if err := model.Served(); err != nil {
				return fmt.Errorf("%w: remove inputs and outputs that are not numbers from the model (of a classifier: fit it with numbers as labels, "+"or drop the output with onnx.utils.extract_model), or write a handler that runs the model for its other outputs", err)
			}
			runner = join.New(model, r.Log)
			return nil
		},
		Infer: Together(func(sets [][]tensor.Tensor) []join.Result { return runner.Run(sets) }, perItem(before, after)),
	}
}

// perItem returns the work of a call that needs one run of the model per item.
func perItem(before func(c *Call, it tensor.Item) ([]tensor.Tensor, error), after func(c *Call, out []tensor.Tensor) (tensor.Item, error)) func(c *Call) (Work, error) {
	return func(c *Call) (Work, error) {
		items := c.Items()
		work := Work{Sets: make([][]tensor.Tensor, len(items))}
		for i, it := range items {
			var err error
			if work.Sets[i], err = before(c, it); err != nil {
				return work, BadInput(fmt.Errorf("item %d: %w", i, err))
			}
		}
		work.Answer = func(of []join.Result) (tensor.Activation, error) {
			out := make(tensor.Activation, len(of))
			for i, r := range of {
				err := r.Err
				if err != nil {
					return nil, BadInput(fmt.Errorf("item %d: %w", i, err)) // wrong name, shape or datatype
				}
				if out[i], err = after(c, r.Outputs); err != nil {
					return nil, fmt.Errorf("item %d: %w", i, err)
				}
			}
			return out, nil
		}
		return work, nil
	}
}

// tensors returns the tensors of an item.
func tensors(_ *Call, it tensor.Item) ([]tensor.Tensor, error) {
	if it.Tensors == nil {
		return nil, fmt.Errorf(`content type %q, want tensors: {"inputs":[{"name","datatype","shape","data"}]}`, it.ContentType)
	}
	return it.Tensors, nil
}
