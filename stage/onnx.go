package stage

import (
	"context"
	"errors"
	"fmt"

	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/stage/zygote"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Model returns the hooks of a stage that runs its ONNX model once per item. before turns an item
// into the model's inputs, and after turns the model's outputs into the item of the answer. If
// before or after is nil, the items on its side are sets of tensors and stay unchanged. An error of
// before is the client's fault (400).
func Model(before func(c *Call, it tensor.Item) ([]tensor.Tensor, error), after func(c *Call, out []tensor.Tensor) (tensor.Item, error)) Hooks {
	if before == nil {
		before = tensors
	}
	if after == nil {
		//nolint:unparam // other functions return errors
		after = func(_ *Call, out []tensor.Tensor) (tensor.Item, error) {
			return tensor.Item{Tensors: out}, nil
		}
	}
	var model *zygote.Session
	return Hooks{
		Place: func(_ context.Context, r *Replica) error {
			if model = r.Model(); model == nil {
				return errors.New("no model: set " + wire.EnvModel + " in the function's environment to the ONNX file, relative to the image, such as model/model.onnx")
			}
			if err := model.Served(); err != nil {
				return fmt.Errorf("%w: remove inputs and outputs that are not numbers from the model (of a classifier: fit it with numbers as labels, "+"or drop the output with onnx.utils.extract_model), or write a handler that runs the model for its other outputs", err)
			}
			return nil
		},
		Infer: Each(func(c *Call) (tensor.Activation, error) {
			items := c.Items()
			out := make(tensor.Activation, len(items))
			for i, it := range items {
				in, err := before(c, it)
				if err != nil {
					return nil, BadInput(fmt.Errorf("item %d: %w", i, err))
				}
				result, err := model.Run(in)
				if err != nil {
					return nil, BadInput(fmt.Errorf("item %d: %w", i, err)) // wrong name, shape or datatype
				}
				if out[i], err = after(c, result); err != nil {
					return nil, fmt.Errorf("item %d: %w", i, err)
				}
			}
			return out, nil
		}),
	}
}

// tensors returns the tensors of an item.
func tensors(_ *Call, it tensor.Item) ([]tensor.Tensor, error) {
	if it.Tensors == nil {
		return nil, fmt.Errorf(`content type %q, want tensors: {"inputs":[{"name","datatype","shape","data"}]}`, it.ContentType)
	}
	return it.Tensors, nil
}
