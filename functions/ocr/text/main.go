// Command text is the stage of the OCR pipeline that puts the boxes' texts into reading order; see
// package stages.
package main

import (
	"github.com/stagecoach-serving/stagecoach/functions/ocr/stages"
	"github.com/stagecoach-serving/stagecoach/stage"
)

func main() { stage.Main(stages.Text()) }
