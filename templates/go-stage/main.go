//go:build template

// Command handler is the stage: it runs the hooks of the handler's package, which is in the folder
// function of the build context. The build tag keeps this file out of builds elsewhere, because
// they lack that package.
package main

import (
	"handler/function"

	"github.com/stagecoach-serving/stagecoach/stage"
)

func main() { stage.Main(function.Hooks()) }
