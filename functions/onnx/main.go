// Command onnx is the stage of an ONNX file without code of its own: each item is a set of tensors by the names of the
// model's inputs, and becomes the set of its outputs.
package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/stage/zygote"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

func main() {
	var model *zygote.Session
	stage.Main(stage.Hooks{
		Place: func(_ context.Context, r *stage.Replica) error {
			if model = r.Model(); model == nil {
				return errors.New("no model: set STAGECOACH_MODEL in the function's environment to the ONNX file, relative to the image")
			}
			return nil
		},
		Infer: stage.Each(func(c *stage.Call) (tensor.Activation, error) {
			items := c.Items()
			out := make(tensor.Activation, len(items))
			for i, it := range items {
				if it.Tensors == nil {
					return nil, stage.BadInput(fmt.Errorf("item %d: content type %q, want tensors: {\"inputs\":[{\"name\",\"datatype\",\"shape\",\"data\"}]}", i, it.ContentType))
				}
				result, err := model.Run(it.Tensors)
				if err != nil {
					return nil, stage.BadInput(fmt.Errorf("item %d: %w", i, err))
				}
				out[i] = tensor.Item{Tensors: result}
			}
			return out, nil
		}),
	})
}
