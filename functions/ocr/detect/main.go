// Command detect is the OCR pipeline's stage that finds where there is text on a page; see package stages.
package main

import (
	"github.com/stagecoach-serving/stagecoach/functions/ocr/stages"
	"github.com/stagecoach-serving/stagecoach/stage"
)

func main() { stage.Main(stages.Detect()) }
