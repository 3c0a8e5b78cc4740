// Package idle measures the cost of functions that nobody calls.
package idle

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/internal/child"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// Run measures the cost of functions that nobody calls: the time to deploy and to list them, and
// the memory and CPU that `up` uses while nothing happens.
func Run(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("bench idle", flag.ContinueOnError)
	asJSON, images := bench.Flags(fs)
	functions := fs.Int("functions", 1000, "that are deployed, at zero replicas")
	window := fs.Duration("window", 20*time.Second, "of idleness that is measured")
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	report := bench.NewReport("idle", os.Stderr)
	state, err := os.MkdirTemp("", "stagecoach-idle-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(state)
	up, err := child.Start(ctx, os.Stderr, "up", "--listen", "127.0.0.1:0", "--state", state, "--images", *images, "--log", "error")
	if err != nil {
		return err
	}
	defer func() { _ = up.Stop() }()
	api := client.New("http://" + up.Addr)
	for _, n := range []int{0, *functions} {
		name := fmt.Sprintf("functions_%d", n)
		if n > 0 {
			if err := deployIdle(ctx, api, report, name, n); err != nil {
				return err
			}
		}
		console.Progress("bench idle: %s: %v of idleness", name, *window)
		if err := Measure(ctx, report, name, up.Cmd.Process.Pid, *window); err != nil {
			return err
		}
	}
	return bench.Print(report, *asJSON, out)
}

// deployIdle deploys n functions and lists them.
func deployIdle(ctx context.Context, api *client.Client, report *bench.Report, name string, n int) error {
	const lists = 50
	labels := map[string]string{"com.openfaas.scale.min": "0", "com.openfaas.scale.zero": "true"}
	start := time.Now()
	for i := range n {
		if err := api.Deploy(ctx, client.Deployment{Service: fmt.Sprintf("idle-%d", i), Image: "stagecoach/noop:0.1.0", Labels: labels}); err != nil {
			return err
		}
		if i%100 == 99 {
			console.Progress("bench idle: %d of %d deployed", i+1, n)
		}
	}
	report.Add(name, "deploys_per_second", float64(n)/time.Since(start).Seconds(), n)
	var took []time.Duration
	for range lists {
		start := time.Now()
		if _, err := api.Do(ctx, "GET", "/system/functions", "", nil); err != nil {
			return err
		}
		took = append(took, time.Since(start))
	}
	report.AddMillis(name, "list_p50_ms", took, 0.5)
	return nil
}

// Measure waits a moment, and then measures a process for a while.
func Measure(ctx context.Context, report *bench.Report, name string, pid int, window time.Duration) error {
	const settle = 5 * time.Second
	var meter sandbox.Meter
	for _, wait := range []time.Duration{settle, window} {
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return ctx.Err()
		}
		cpuMilli, memory, err := meter.Measure(name, []int{pid})
		if err != nil {
			return err
		}
		if wait == window {
			report.Add(name, "cpu_percent_of_a_core", cpuMilli/10, 1)
			report.Add(name, "memory_mb", float64(memory)/1e6, 1)
		}
	}
	return nil
}
