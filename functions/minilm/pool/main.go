// Command pool is the minilm pipeline's stage that makes each text's embedding of its tokens' vectors; see package stages.
package main

import (
	"github.com/stagecoach-serving/stagecoach/functions/minilm/stages"
	"github.com/stagecoach-serving/stagecoach/stage"
)

func main() { stage.Main(stages.Pool()) }
