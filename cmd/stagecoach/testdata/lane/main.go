// Command lane is a stage for tests of variants. Its answer to a call has the name of its function,
// the version from its environment (lane_version), the name of its replica, the number of calls that
// the replica has run, and its input. Two files in its image's folder change what it does:
//
//   - crash: each replica ends with exit status 3 when it starts
//   - held: calls whose input ends with "hold" run until the file is gone
package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

func main() {
	var (
		who   string
		calls atomic.Int64
	)
	stage.Main(stage.Hooks{
		Slots: 2,
		Place: func(_ context.Context, r *stage.Replica) error {
			if exists("crash") {
				fmt.Fprintln(os.Stderr, "lane: the test wants this replica to crash")
				os.Exit(3)
			}
			name, _, _ := strings.Cut(r.Function, ".")
			who = name + " " + os.Getenv("lane_version") + " " + r.Name
			return nil
		},
		Infer: stage.Each(func(c *stage.Call) (tensor.Activation, error) {
			text := ""
			for _, item := range c.Items() {
				text += string(item.Bytes)
			}
			text = strings.Trim(text, `"`)
			for strings.HasSuffix(text, "hold") && exists("held") {
				time.Sleep(10 * time.Millisecond)
			}
			time.Sleep(time.Millisecond) // so that a kill meets some calls
			return tensor.Activation{{ContentType: "text/plain", Bytes: fmt.Append(nil, who, " ", calls.Add(1), " ", text)}}, nil
		}),
	})
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return !errors.Is(err, fs.ErrNotExist)
}
