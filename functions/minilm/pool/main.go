// Command pool is the stage of the minilm pipeline that computes the embedding of each text from
// the vectors of its tokens; see package stages.
package main

import (
	"github.com/stagecoach-serving/stagecoach/functions/minilm/stages"
	"github.com/stagecoach-serving/stagecoach/stage"
)

func main() { stage.Main(stages.Pool()) }
