// Command onnx is the stage of an ONNX file without code of its own: each item is a set of tensors by the names of the
// model's inputs, and becomes the set of its outputs.
package main

import "github.com/stagecoach-serving/stagecoach/stage"

func main() { stage.Main(stage.Model(nil, nil)) }
