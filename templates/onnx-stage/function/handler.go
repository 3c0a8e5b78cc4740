// Package function says what comes before and after the model: here nothing, so that clients send and get tensors by the
// names of the model's inputs and outputs.
package function

import "github.com/stagecoach-serving/stagecoach/stage"

// Hooks says what the stage runs. Without this file it runs just this.
func Hooks() stage.Hooks { return stage.Model(nil, nil) }
