// Command runs is a stage for TestPartitions: it reports each run, and answers with its input. The
// report is the input's first item and the process id, as a line. It goes into the named pipe that
// the environment variable "runs" names, so that a test can count runs.
package main

import (
	"fmt"
	"os"
	"time"

	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

func main() {
	stage.Main(stage.Hooks{
		Slots: 8,
		Infer: stage.Each(func(c *stage.Call) (tensor.Activation, error) {
			pipe, err := os.OpenFile(os.Getenv("runs"), os.O_WRONLY, 0)
			if err != nil {
				return nil, err
			}
			_, err = fmt.Fprintf(pipe, "%.100s %d\n", c.Items()[0].Bytes, os.Getpid()) // one write is not mixed with others
			if closing := pipe.Close(); err != nil || closing != nil {
				return nil, fmt.Errorf("report the run: %w, %w", err, closing)
			}
			time.Sleep(10 * time.Millisecond) // so that some calls run when a link is cut
			return c.Items(), nil
		}),
	})
}
