// Command lane is a stage for tests of variants. Its answer to a call has the name of its function,
// the version from its environment and its input.
//
// Environment: lane_version, and lane_folder, a folder with files of the test:
//
//   - crash-NAME: each replica of the function NAME ends with exit status 3 when it starts
//   - held: calls whose input ends with "hold" run until the file is gone
//   - calls-NAME-PID, which the stage writes: a line with the input of each call that has run
package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

func main() {
	var (
		name, folder, version string
		calls                 *os.File
	)
	stage.Main(stage.Hooks{
		Slots: 2,
		Place: func(_ context.Context, r *stage.Replica) (err error) {
			name, _, _ = strings.Cut(r.Function, ".")
			folder, version = os.Getenv("lane_folder"), os.Getenv("lane_version") // a zygote has neither
			if exists(filepath.Join(folder, "crash-"+name)) {
				fmt.Fprintln(os.Stderr, "lane: the test wants this replica to crash")
				os.Exit(3)
			}
			calls, err = os.OpenFile(filepath.Join(folder, fmt.Sprintf("calls-%s-%d", name, os.Getpid())), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
			return err
		},
		Infer: stage.Each(func(c *stage.Call) (tensor.Activation, error) {
			text := ""
			for _, item := range c.Items() {
				text += string(item.Bytes)
			}
			text = strings.Trim(text, `"`)
			for strings.HasSuffix(text, "hold") && exists(filepath.Join(folder, "held")) {
				time.Sleep(10 * time.Millisecond)
			}
			time.Sleep(time.Millisecond) // so that a kill meets some calls
			if _, err := fmt.Fprintln(calls, text); err != nil {
				return nil, err
			}
			return tensor.Activation{{ContentType: "text/plain", Bytes: []byte(name + " " + version + " " + text)}}, nil
		}),
	})
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return !errors.Is(err, fs.ErrNotExist)
}
