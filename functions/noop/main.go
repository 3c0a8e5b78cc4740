// Command noop is a stage that answers with its input: what is left to measure is the way to it and back.
package main

import (
	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

func main() {
	stage.Main(stage.Hooks{Infer: stage.Each(func(c *stage.Call) (tensor.Activation, error) { return c.Items(), nil })})
}
