//go:build template

// Command handler is the stage: the hooks of the handler's package, which lies in the folder function of the build context.
// The tag keeps it out of builds elsewhere, where there is no such package.
package main

import (
	"handler/function"

	"github.com/stagecoach-serving/stagecoach/stage"
)

func main() { stage.Main(function.Hooks()) }
