// Command recognise is the stage of the OCR pipeline that reads the text of one box; see package
// stages.
package main

import (
	"github.com/stagecoach-serving/stagecoach/functions/ocr/stages"
	"github.com/stagecoach-serving/stagecoach/stage"
)

func main() { stage.Main(stages.Recognise()) }
