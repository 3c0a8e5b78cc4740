//go:build template

// Command handler is the stage: it runs the hooks of the handler's package, which is in the folder
// function of the build context. The build tag excludes this file from other builds, where that
// package is missing.
package main

import (
	"handler/function"

	"github.com/stagecoach-serving/stagecoach/stage"
)

func main() { stage.Main(function.Hooks()) }
