// Command spin is a stage that computes for a given time on one core. The time of a call depends in
// a known way on the stage's CPU quota, the size of the batch and the length of the input. Use it
// to try `stagecoach profile` and quotas.
//
// Environment: spin_base per batch (default 2ms), spin_call per call (default 1ms), spin_byte per
// byte of input (default 0s), and spin_batch, the maximum batch size (default 8).
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

// costs has the times from the environment, in time of one core.
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

// of returns the time of a batch whose inputs have these sizes in bytes.
func (c costs) of(bytes []int) time.Duration {
	all := c.base
	for _, n := range bytes {
		all += c.call + time.Duration(n)*c.byte
	}
	return all
}

// spin uses d of processor time, however long that takes. It stops when ctx ends.
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

// used returns the CPU time of this thread.
func used() (time.Duration, error) {
	var t unix.Timespec
	err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t)
	return time.Duration(t.Nano()), err
}

// size returns the size of a call's input in bytes.
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
