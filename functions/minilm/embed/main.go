// Command embed is the stage of the minilm pipeline that makes batches of tokenised texts and
// embeds the tokens; see package stages.
package main

import (
	"github.com/stagecoach-serving/stagecoach/functions/minilm/stages"
	"github.com/stagecoach-serving/stagecoach/stage"
)

func main() { stage.Main(stages.Embed()) }
