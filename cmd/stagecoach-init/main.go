// Command stagecoach-init is the first program of a container of Stagecoach. It is linked
// statically, and appears in each container beside the container's own files.
package main

import "github.com/stagecoach-serving/stagecoach/keysmanager/container/entry"

func main() { entry.Main() }
