// Command detect is the stage of the OCR pipeline that finds the text on a page; see package
// stages.
package main

import (
	"github.com/stagecoach-serving/stagecoach/functions/ocr/stages"
	"github.com/stagecoach-serving/stagecoach/stage"
)

func main() { stage.Main(stages.Detect()) }
