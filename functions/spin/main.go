// Command spin is a stage that burns a given time of one core and does nothing with it: how long it takes depends on the CPU that it may
// use, the size of a batch and the length of the input, in a known way. It is there to try `stagecoach profile` and quotas on.
//
// Environment: spin_base a batch (default 2ms), spin_call a call (default 1ms), spin_byte a byte of input (default 0s); spin_batch is the
// largest batch (default 8).
package main

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// costs is what the environment says, in time of one core.
type costs struct {
	base, call, byte time.Duration
	batch            int
}

func parse(getenv func(string) string) (costs, error) {
	c := costs{2 * time.Millisecond, time.Millisecond, 0, 8}
	for name, to := range map[string]*time.Duration{"spin_base": &c.base, "spin_call": &c.call, "spin_byte": &c.byte} {
		v := getenv(name)
		if v == "" {
			continue
		}
		var err error
		if *to, err = time.ParseDuration(v); err != nil || *to < 0 || *to > time.Minute {
			return c, fmt.Errorf("%s=%q, want a duration such as 2ms, at most 1m", name, v)
		}
	}
	if v := getenv("spin_batch"); v != "" {
		var err error
		if c.batch, err = strconv.Atoi(v); err != nil || c.batch < 1 || c.batch > 4096 {
			return c, fmt.Errorf("spin_batch=%q, want 1 to 4096", v)
		}
	}
	return c, nil
}

// of is what a batch costs whose inputs have so many bytes.
func (c costs) of(bytes []int) time.Duration {
	all := c.base
	for _, n := range bytes {
		all += c.call + time.Duration(n)*c.byte
	}
	return all
}

// spin burns d of the core that it runs on, however long that takes, unless ctx ends.
func spin(ctx context.Context, d time.Duration) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	begin, err := used()
	for now := begin; err == nil && now-begin < d; now, err = used() {
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return err
}

// used is the CPU time that this thread has had.
func used() (time.Duration, error) {
	var t unix.Timespec
	err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t)
	return time.Duration(t.Nano()), err
}

// size is the bytes of a call's input.
func size(items tensor.Activation) (n int) {
	for _, item := range items {
		n += len(item.Bytes)
		for _, t := range item.Tensors {
			n += len(t.Data)
		}
	}
	return n
}

func main() {
	c, err := parse(os.Getenv)
	if err != nil {
		fmt.Fprintln(os.Stderr, "spin:", err)
		os.Exit(1)
	}
	stage.Main(stage.Hooks{MaxBatch: c.batch, Infer: func(ctx context.Context, calls []*stage.Call) []stage.Result {
		var bytes []int
		for _, call := range calls {
			bytes = append(bytes, size(call.Items()))
		}
		err := spin(ctx, c.of(bytes))
		out := make([]stage.Result, len(calls))
		for i := range out {
			text := fmt.Sprintf("spun %v of a core for %d calls\n", c.of(bytes), len(calls))
			out[i] = stage.Result{Err: err, Output: tensor.Activation{{ContentType: "text/plain", Bytes: []byte(text)}}}
		}
		return out
	}})
}
