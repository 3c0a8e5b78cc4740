// Command tokenize is the stage of the minilm pipelines that turns texts into tokens; see package
// stages.
package main

import (
	"github.com/stagecoach-serving/stagecoach/functions/minilm/stages"
	"github.com/stagecoach-serving/stagecoach/stage"
)

func main() { stage.Main(stages.Tokenize()) }
