// Command text is the OCR pipeline's stage that puts the boxes' text into reading order; see package stages.
package main

import (
	"github.com/stagecoach-serving/stagecoach/functions/ocr/stages"
	"github.com/stagecoach-serving/stagecoach/stage"
)

func main() { stage.Main(stages.Text()) }
