package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
)

// benchKeysManager measures a node's daemon: forks of one zygote, a thousand orders at once, an invalidation, what it uses
// while nothing happens, and, through the whole product, what a request to a function at zero takes longer than one to a
// replica that is there.
func benchKeysManager(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("bench keysmanager", flag.ContinueOnError)
	asJSON, images := reportFlags(fs)
	ort := fs.String("ort", "build/ort/libonnxruntime.so.1", "ONNX Runtime's shared library")
	window := fs.Duration("window", 20*time.Second, "of idleness that is measured")
	wakes := fs.Int("wakes", 20, "requests to a function at zero")
	if err := parseFlags(fs, args); err != nil {
		return err
	}
	report := bench.NewReport("keysmanager", os.Stderr)
	progress("bench keysmanager: generating a stage of 100 MB")
	b, err := newONNXStage(100<<20, *images, *ort)
	if err != nil {
		return err
	}
	defer b.close()
	for _, part := range []func() error{
		func() error { return b.benchOrders(ctx, report) },
		func() error { return b.benchDaemon(ctx, report, *window) },
		func() error { return b.benchWakes(ctx, report, *wakes) },
	} {
		if err := part(); err != nil {
			return err
		}
	}
	return printReport(report, *asJSON, out)
}

// benchOrders measures a KeysManager in this process.
func (b *benchStage) benchOrders(ctx context.Context, report *bench.Report) error {
	if err := b.manage(); err != nil {
		return err
	}
	defer func() { b.keys.Close(); b.keys = nil }()
	if _, err := b.keys.Load(ctx, b.spec("fork")); err != nil {
		return err
	}
	const forks, orders, invalidations = 500, 1000, 10
	progress("bench keysmanager: %d forks, then %d orders at once", forks, orders)
	rate, err := b.forksPerSecond(ctx, forks)
	if err != nil {
		return err
	}
	report.Add("zygote_100MB", "forks_per_second", rate, forks)
	took, err := b.atOnce(ctx, orders, orders)
	if err != nil {
		return err
	}
	report.AddMillis("orders_1000_at_once", "p50_ms", took, 0.5)
	report.AddMillis("orders_1000_at_once", "p99_ms", took, 0.99)
	took = nil
	for range invalidations {
		if _, err := b.keys.Load(ctx, b.spec("fork")); err != nil {
			return err
		}
		begin := time.Now()
		if _, err := b.keys.Invalidate(ctx, b.spec("fork").Function); err != nil {
			return err
		}
		took = append(took, time.Since(begin))
	}
	report.AddMillis("invalidate_100MB", "p50_ms", took, 0.5)
	return nil
}

// benchDaemon measures `stagecoach keysmanager` while nothing happens.
func (b *benchStage) benchDaemon(ctx context.Context, report *bench.Report, window time.Duration) error {
	l, err := net.Listen("tcp", "127.0.0.1:0") // a port that is free
	if err != nil {
		return err
	}
	addr := l.Addr().String()
	_ = l.Close()
	state := filepath.Join(b.dir, "up")
	up, err := startChild(ctx, os.Stderr, "up", "--listen", "127.0.0.1:0", "--no-node", "--nats-listen", addr, "--state", state, "--images", b.images.Dir, "--log", "error")
	if err != nil {
		return err
	}
	defer func() { _ = up.stop() }()
	daemon, err := startChild(ctx, os.Stderr, "keysmanager", "--node", "bench", "--nats", "nats://"+addr, "--nats-token", filepath.Join(state, "nats-token"),
		"--state", filepath.Join(b.dir, "node"), "--images", b.images.Dir, "--ort", b.ort, "--log", "error")
	if err != nil {
		return err
	}
	defer func() { _ = daemon.stop() }()
	progress("bench keysmanager: %v of a daemon's idleness", window)
	return measureIdle(ctx, report, "daemon_idle", daemon.cmd.Process.Pid, window)
}

// benchWakes measures requests to a function at zero, whose parameters are in memory or not, against a warm one.
func (b *benchStage) benchWakes(ctx context.Context, report *bench.Report, wakes int) error {
	up, err := startChild(ctx, os.Stderr, "up", "--listen", "127.0.0.1:0", "--state", filepath.Join(b.dir, "wakes"), "--images", b.images.Dir, "--ort", b.ort, "--log", "error")
	if err != nil {
		return err
	}
	defer func() { _ = up.stop() }()
	api := newClient("http://" + up.addr)
	model := map[string]string{"STAGECOACH_MODEL": "model.onnx"}
	zero := map[string]string{"com.openfaas.scale.min": "0", "com.openfaas.scale.zero": "true", "com.openfaas.scale.zero-duration": "1s"}
	for _, d := range []deployment{
		{Service: "warm", EnvVars: model, Image: benchImage},
		{Service: "zero", EnvVars: model, Image: benchImage, Labels: zero, EnvProcess: "./stage"}, // so that it has a zygote of its own
	} {
		if err := api.deploy(ctx, d); err != nil {
			return err
		}
	}
	body, err := b.body()
	if err != nil {
		return err
	}
	call := func(name string) (time.Duration, error) {
		a, err := api.do(ctx, http.MethodPost, "/function/"+name, "application/json", body)
		if err == nil && a.status != http.StatusOK {
			err = fmt.Errorf("%s answers %d: %.200s", name, a.status, a.body)
		}
		return a.took, err
	}
	var warm, cached, cold []time.Duration
	for i := range wakes {
		for _, c := range []struct {
			name, function string
			took           *[]time.Duration
			evict          bool
		}{{"warm", "warm", &warm, false}, {"cold cache", "zero", &cold, true}, {"warm cache", "zero", &cached, false}} {
			if c.function == "zero" {
				if err := asleep(ctx, api, "zero", c.evict && i > 0); err != nil {
					return err
				}
			}
			took, err := call(c.function)
			if err != nil {
				return err
			}
			if i > 0 { // the first round packs the weights
				*c.took = append(*c.took, took)
			}
		}
		progress("bench keysmanager: %d of %d rounds of a request to a warm replica, from zero with a cold and from zero with a warm cache", i+1, wakes)
	}
	report.AddMillis("request_to_warm_replica", "p50_ms", warm, 0.5)
	base, _ := bench.Quantile(warm, 0.5)
	for name, took := range map[string][]time.Duration{"request_from_zero_warm_cache": cached, "request_from_zero_cold_cache": cold} {
		report.AddMillis(name, "p50_ms", took, 0.5)
		if p50, ok := bench.Quantile(took, 0.5); ok {
			report.Add(name, "added_p50_ms", float64(p50-base)/1e6, len(took))
		}
	}
	return nil
}

// body is an inference request of one position.
func (b *benchStage) body() ([]byte, error) {
	type input struct {
		Name     string    `json:"name"`
		Datatype string    `json:"datatype"`
		Shape    []int     `json:"shape"`
		Data     []float32 `json:"data"`
	}
	width := int(b.input.Tensors[0].Shape[2])
	data := make([]float32, width)
	for i := range data {
		data[i] = float32(i%7)/7 - 0.5
	}
	return json.Marshal(map[string][]input{"inputs": {{"x", "FP32", []int{1, 1, width}, data}}})
}

// asleep waits until a function has no replicas, and evicts its parameters if that is wanted: once their processes have ended,
// they can be.
func asleep(ctx context.Context, api *client, name string, evict bool) error {
	deadline := time.Now().Add(time.Minute)
	for {
		s, err := api.status(ctx, name)
		if err != nil {
			return err
		}
		done := s.Replicas == 0 && s.AvailableReplicas == 0
		if done && evict {
			a, err := api.do(ctx, http.MethodPost, "/system/cache/evict", "application/json", []byte(`{"function":"`+name+`"}`))
			if err != nil {
				return err
			}
			done = a.status/100 == 2
		}
		if done {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s still has %d replicas, or processes, after a minute of idleness", name, s.Replicas)
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// atOnce is in the names of replicas that are ordered by many at a time.
const atOnce = "at-once"

// forksPerSecond has one zygote fork n replicas, as fast as their orders come, and returns how many it forked in a second.
func (b *benchStage) forksPerSecond(ctx context.Context, n int) (float64, error) {
	took, err := b.atOnce(ctx, n, 8)
	var all time.Duration
	for _, t := range took {
		all = max(all, t)
	}
	return float64(n) / all.Seconds(), err
}

// atOnce orders n replicas of the stage from so many goroutines and tells when each was there, since the beginning. They end at
// once, and it returns when they have.
func (b *benchStage) atOnce(ctx context.Context, n, goroutines int) ([]time.Duration, error) {
	took := make([]time.Duration, n)
	next := make(chan int, n)
	for i := range n {
		next <- i
	}
	close(next)
	var wg sync.WaitGroup
	var once sync.Once
	var failed error
	b.n++
	name := func(i int) string { return fmt.Sprintf("%d-%s-%d", b.n, atOnce, i) }
	begin := time.Now()
	for range goroutines {
		wg.Go(func() {
			for i := range next {
				r, err := b.keys.Start(ctx, node.Order{Replica: name(i), Spec: b.spec("fork")}, nil)
				if err != nil {
					once.Do(func() { failed = err })
					return
				}
				took[i] = time.Since(begin)
				_ = r.Conn.Close()
			}
		})
	}
	wg.Wait()
	for i := range n {
		if err := b.keys.Stop(ctx, name(i), time.Minute); err != nil {
			return took, errors.Join(failed, err)
		}
	}
	return took, failed
}
