// Package hop measures the time that a request takes to a replica and back, and compares it with a
// bare echo.
package hop

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/internal/child"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// hopCase is one way through the system at one concurrency.
type hopCase struct {
	name string
	addr string
	path string
	c    int
	size int    // bytes of the body
	of   string // name of the direct case to compare with

	rate     []float64       // requests per second, one per round
	p50      []time.Duration // one per round
	requests int
	messages float64 // NATS messages per request
}

// Run measures two paths of a request, with bodies of several sizes, and compares both with a bare
// net/http echo of the same body:
//
//   - HTTP → provider → queue → a replica that does nothing → back
//   - HTTP → rendezvous → a function that speaks HTTP → back
//
// A separate process sends the load. The cases take turns, so that disturbances on the machine
// affect all cases alike.
func Run(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("bench hop", flag.ContinueOnError)
	asJSON, images := bench.Flags(fs)
	rounds := fs.Int("rounds", 5, "turns of every case")
	window := fs.Duration("window", 1500*time.Millisecond, "of load in a turn")
	sender := fs.String("client", string(bench.NetHTTP), "that sends the load: net/http, or lean, which costs less and shows more of the servers' difference")
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	report := bench.NewReport("hop", os.Stderr)
	state, err := os.MkdirTemp("", "stagecoach-hop-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(state)
	echo, err := child.Start(ctx, os.Stderr, "bench", "echo")
	if err != nil {
		return err
	}
	defer func() { _ = echo.Stop() }()
	up, err := child.Start(ctx, os.Stderr, "up", "--listen", "127.0.0.1:0", "--state", state, "--images", *images, "--log", "warn")
	if err != nil {
		return err
	}
	defer func() { _ = up.Stop() }()
	api := client.New("http://" + up.Addr)
	if err := deployHop(ctx, api); err != nil {
		return err
	}
	const usual = 64
	cases := []*hopCase{
		{name: "direct_c1", addr: echo.Addr, path: "/function/noop", c: 1, size: usual, of: "direct_c1"},
		{name: "function_c1", addr: up.Addr, path: "/function/noop", c: 1, size: usual, of: "direct_c1"},
		{name: "http_c1", addr: up.Addr, path: "/function/web/echo", c: 1, size: usual, of: "direct_c1"},
		{name: "direct_c16", addr: echo.Addr, path: "/function/noop", c: 16, size: usual, of: "direct_c16"},
		{name: "function_c16", addr: up.Addr, path: "/function/noop", c: 16, size: usual, of: "direct_c16"},
		{name: "stages3_c16", addr: up.Addr, path: "/function/three", c: 16, size: usual, of: "direct_c16"},
		{name: "http_c16", addr: up.Addr, path: "/function/web/echo", c: 16, size: usual, of: "direct_c16"},
		// Accepted requests are on disk, and have not run yet.
		{name: "function_async_c16", addr: up.Addr, path: "/async-function/noop", c: 16, size: usual, of: "direct_c16"},
	}
	for _, b := range []struct {
		name string
		size int
	}{{"1KB", 1 << 10}, {"64KB", 64 << 10}, {"4MB", 4 << 20}} {
		direct := "direct_" + b.name + "_c16"
		cases = append(cases,
			&hopCase{name: direct, addr: echo.Addr, path: "/function/noop", c: 16, size: b.size, of: direct},
			&hopCase{name: "function_" + b.name + "_c16", addr: up.Addr, path: "/function/noop", c: 16, size: b.size, of: direct},
			&hopCase{name: "http_" + b.name + "_c16", addr: up.Addr, path: "/function/web/echo", c: 16, size: b.size, of: direct},
		)
	}
	for r := range *rounds + 1 { // the first round warms up
		for _, c := range cases {
			if err := c.turn(ctx, api, *sender, *window, r > 0); err != nil {
				return err
			}
		}
		console.Progress("bench hop: round %d of %d", r, *rounds)
	}
	sum(report, cases, *rounds)
	return bench.Print(report, *asJSON, out)
}

// sum adds the figures of all rounds to the report.
func sum(report *bench.Report, cases []*hopCase, rounds int) {
	for _, c := range cases {
		slices.Sort(c.rate)
		slices.Sort(c.p50)
		report.Add(c.name, "requests_per_second", c.rate[len(c.rate)/2], c.requests)
		report.Add(c.name, "p50_ms", float64(c.p50[len(c.p50)/2])/float64(time.Millisecond), c.requests)
		report.Add(c.name, "messages_per_request", c.messages, c.requests)
	}
	for _, c := range cases { // rates are medians of rounds
		i := slices.IndexFunc(cases, func(d *hopCase) bool { return d.name == c.of })
		report.Add(c.name, "share_of_direct", c.rate[len(c.rate)/2]/cases[i].rate[len(c.rate)/2], rounds)
	}
}

// deployHop deploys a function outside any pipeline and a pipeline of three stages, all of the same
// program that does nothing.
func deployHop(ctx context.Context, api *client.Client) error {
	const image = "stagecoach/noop:0.1.0"
	labels := map[string]string{"com.openfaas.scale.min": "1", "com.openfaas.scale.max": "1"}
	env := map[string]string{"max_inflight": "64", "GOMAXPROCS": "1"}
	fns := []client.Deployment{{Service: "noop", Image: image, Labels: labels, EnvVars: env, Annotations: map[string]string{"stagecoach.dev/async-queue-limit": "1000000"}}}
	fns = append(fns, client.Deployment{
		Service: "web", Image: "stagecoach/echo-http:0.1.0", Labels: labels, EnvProcess: "./echo-http", EnvVars: map[string]string{"mode": "http", "max_inflight": "64"},
	})
	for i := 1; i <= 3; i++ {
		a := map[string]string{"stagecoach.dev/pipeline": "three"}
		if i < 3 {
			a["stagecoach.dev/next"] = fmt.Sprintf("hop-%d", i+1)
		}
		fns = append(fns, client.Deployment{Service: fmt.Sprintf("hop-%d", i), Image: image, Labels: labels, EnvVars: env, Annotations: a})
	}
	for _, d := range fns {
		if err := api.Deploy(ctx, d); err != nil {
			return err
		}
	}
	for _, name := range []string{"noop", "three", "web"} { // the first request waits for the replicas
		if _, err := api.Invoke(ctx, name, "text/plain", []byte("up?")); err != nil {
			return err
		}
	}
	return nil
}

func (c *hopCase) turn(ctx context.Context, api *client.Client, loader string, window time.Duration, counts bool) error {
	before, err := messages(ctx, api)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	var stdout bytes.Buffer
	cmd := exec.CommandContext(ctx, self, "bench", "load", "--client", loader, "--addr", c.addr, "--path", c.path, "--c", strconv.Itoa(c.c), "--duration", window.String(), "--size", strconv.Itoa(c.size))
	cmd.Stdout, cmd.Stderr = &stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("load of %s: %w", c.name, err)
	}
	var r bench.LoadResult
	if err := json.Unmarshal(stdout.Bytes(), &r); err != nil {
		return fmt.Errorf("load of %s: %w", c.name, err)
	}
	if r.Failed > 0 {
		return fmt.Errorf("%s: %d of %d requests failed: %s", c.name, r.Failed, r.Requests, r.Cause)
	}
	after, err := messages(ctx, api)
	if err != nil {
		return err
	}
	if err := drained(ctx, api); err != nil { // so that remaining requests disturb no later case
		return err
	}
	if counts {
		c.rate = append(c.rate, float64(r.Requests)/r.Elapsed.Seconds())
		c.p50 = append(c.p50, r.P50)
		c.messages = (after - before) / float64(r.Requests)
		c.requests += r.Requests
	}
	return nil
}

// drained waits until no async request is left.
func drained(ctx context.Context, api *client.Client) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		left, err := api.Metric(ctx, "stagecoach_async_bytes ")
		if err != nil || left == 0 {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// messages returns how many messages NATS has carried so far.
func messages(ctx context.Context, api *client.Client) (float64, error) {
	return api.Metric(ctx, "stagecoach_queue_messages_total")
}
