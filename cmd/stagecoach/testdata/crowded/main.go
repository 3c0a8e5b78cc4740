// Command crowded is a stage for TestOutOfMemory: it answers with the device that it has, but where that is too small. On devices
// that the environment's `full` names it does not come up; on those of `short` it does and has no memory for a call.
package main

import (
	"context"
	"errors"
	"os"
	"strings"

	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

func main() {
	device := os.Getenv("CUDA_VISIBLE_DEVICES")
	fits := func(devices string) error {
		if strings.Contains(os.Getenv(devices), device) {
			return stage.OutOfMemory(errors.New("want 2 GiB, 1 GiB of 10 GiB free"))
		}
		return nil
	}
	stage.Main(stage.Hooks{
		Place: func(context.Context, *stage.Replica) error { return fits("full") },
		Infer: stage.Each(func(*stage.Call) (tensor.Activation, error) {
			return tensor.Activation{{ContentType: "text/plain", Bytes: []byte(device)}}, fits("short")
		}),
	})
}
