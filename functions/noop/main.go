// Command noop is a stage that answers with its input. Its calls measure the way to a stage and
// back.
package main

import (
	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

func main() {
	stage.Main(stage.Hooks{Infer: stage.Each(func(c *stage.Call) (tensor.Activation, error) { return c.Items(), nil })})
}
