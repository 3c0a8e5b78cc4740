// Command onnx is a stage that only runs an ONNX model. An item is a set of tensors with the names
// of the model's inputs, and becomes a set of the model's outputs.
package main

import "github.com/stagecoach-serving/stagecoach/stage"

func main() { stage.Main(stage.Model(nil, nil)) }
