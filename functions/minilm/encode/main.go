// Command encode is the stage that computes embeddings with the whole model. It is the same program
// as embed, with another model; see package stages.
package main

import (
	"github.com/stagecoach-serving/stagecoach/functions/minilm/stages"
	"github.com/stagecoach-serving/stagecoach/stage"
)

func main() { stage.Main(stages.Embed()) }
