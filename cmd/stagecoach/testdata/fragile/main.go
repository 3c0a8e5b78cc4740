// Command fragile is a stage for TestPoison: it takes batches, answers with its input after a
// moment, and ends its process if an input begins with "poison". The text says how: "poison kill"
// by SIGKILL, any other with exit status 3.
package main

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// half is half of the time that a call takes. In the first half, other calls join the batch or a
// slot; then a poison ends the process.
const half = 10 * time.Millisecond

func main() {
	stage.Main(stage.Hooks{
		Slots: 2, MaxBatch: 4,
		Infer: stage.Each(func(c *stage.Call) (tensor.Activation, error) {
			time.Sleep(half)
			if text := string(c.Items()[0].Bytes); strings.HasPrefix(text, "poison kill") {
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			} else if strings.HasPrefix(text, "poison") {
				fmt.Fprintln(os.Stderr, "fragile: this input ends the process")
				os.Exit(3)
			}
			time.Sleep(half)
			return c.Items(), nil
		}),
	})
}
