// Package function is the stage's handler.
package function

import (
	"errors"
	"fmt"

	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Hooks returns what the stage runs: Infer for each batch of calls and, if it is set, Place once in
// each new replica.
func Hooks() stage.Hooks {
	return stage.Hooks{Infer: stage.Each(handle)}
}

// handle answers one call. Its items come from the client, or from earlier stages of the pipeline.
func handle(c *stage.Call) (tensor.Activation, error) {
	var out tensor.Activation
	for _, it := range c.Items() {
		answer, err := reply(it)
		if err != nil {
			return nil, stage.BadInput(err) // the client gets 400; any other error is a 500
		}
		out = append(out, answer)
	}
	return out, nil
}

func reply(it tensor.Item) (tensor.Item, error) {
	if it.Tensors != nil {
		return tensor.Item{}, errors.New("got tensors, want text")
	}
	return tensor.Item{ContentType: "text/plain", Bytes: fmt.Appendf(nil, "You said: %s\n", it.Bytes)}, nil
}
