// Command stagecoach-init is the first program of a container of Stagecoach. It is linked
// statically, and appears in each container beside the container's own files.
package main

import (
	"os"

	"github.com/stagecoach-serving/stagecoach/keysmanager/container/entry"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == entry.HoldCommand {
		entry.Hold(os.Args[2:])
	}
	entry.Main()
}
