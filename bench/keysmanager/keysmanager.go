// Package keysmanager measures the daemon of a node.
package keysmanager

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/bench/idle"
	"github.com/stagecoach-serving/stagecoach/bench/running"
	"github.com/stagecoach-serving/stagecoach/bench/starts"
	"github.com/stagecoach-serving/stagecoach/internal/child"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// keysBench measures a KeysManager with one stage.
type keysBench struct{ *starts.Stage }

// Run measures a KeysManager: forks of one zygote, a thousand orders at once, invalidations, and
// the idle daemon's memory and CPU. It also measures, through the whole product, how much longer a
// request to a function without replicas takes than a request to a ready replica.
func Run(ctx context.Context, m starts.Machine, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("bench keysmanager", flag.ContinueOnError)
	asJSON, images := bench.Flags(fs)
	ort := fs.String("ort", "build/ort/libonnxruntime.so.1", "ONNX Runtime's shared library")
	window := fs.Duration("window", 20*time.Second, "of idleness that is measured")
	wakes := fs.Int("wakes", 20, "requests to a function at zero")
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	report := bench.NewReport("keysmanager", os.Stderr)
	console.Progress("bench keysmanager: generating a stage of 100 MB")
	stage, err := starts.NewONNXStage(m, 100<<20, *images, *ort)
	if err != nil {
		return err
	}
	defer stage.Close()
	b := keysBench{stage}
	for _, part := range []func() error{
		func() error { return b.orders(ctx, report) },
		func() error { return b.daemon(ctx, report, *window) },
		func() error { return b.wakes(ctx, report, *wakes) },
	} {
		if err := part(); err != nil {
			return err
		}
	}
	return bench.Print(report, *asJSON, out)
}

// orders measures a KeysManager in this process.
func (b keysBench) orders(ctx context.Context, report *bench.Report) error {
	if err := b.Manage(); err != nil {
		return err
	}
	defer func() { b.Keys.Close(); b.Keys = nil }()
	if _, err := b.Keys.Load(ctx, b.Spec("fork")); err != nil {
		return err
	}
	const forks, orders, invalidations = 500, 1000, 10
	console.Progress("bench keysmanager: %d forks, then %d orders at once", forks, orders)
	rate, err := b.ForksPerSecond(ctx, forks)
	if err != nil {
		return err
	}
	report.Add("zygote_100MB", "forks_per_second", rate, forks)
	took, err := b.AtOnce(ctx, orders, orders)
	if err != nil {
		return err
	}
	report.AddMillis("orders_1000_at_once", "p50_ms", took, 0.5)
	report.AddMillis("orders_1000_at_once", "p99_ms", took, 0.99)
	took = nil
	for range invalidations {
		if _, err := b.Keys.Load(ctx, b.Spec("fork")); err != nil {
			return err
		}
		begin := time.Now()
		if _, err := b.Keys.Invalidate(ctx, b.Spec("fork").Function); err != nil {
			return err
		}
		took = append(took, time.Since(begin))
	}
	report.AddMillis("invalidate_100MB", "p50_ms", took, 0.5)
	return nil
}

// daemon measures `stagecoach keysmanager` while nothing happens.
func (b keysBench) daemon(ctx context.Context, report *bench.Report, window time.Duration) error {
	l, err := net.Listen("tcp", "127.0.0.1:0") // a free port
	if err != nil {
		return err
	}
	addr := l.Addr().String()
	_ = l.Close()
	state := filepath.Join(b.Dir, "up")
	up, err := child.Start(ctx, os.Stderr, "up", "--listen", "127.0.0.1:0", "--no-node", "--nats-listen", addr, "--state", state, "--images", b.Images.Dir, "--log", "error")
	if err != nil {
		return err
	}
	defer func() { _ = up.Stop() }()
	daemon, err := child.Start(ctx, os.Stderr, "keysmanager", "--node", "bench", "--nats", "nats://"+addr, "--nats-token", filepath.Join(state, "nats-token"),
		"--state", filepath.Join(b.Dir, "node"), "--images", b.Images.Dir, "--ort", b.Ort, "--log", "error")
	if err != nil {
		return err
	}
	defer func() { _ = daemon.Stop() }()
	console.Progress("bench keysmanager: %v of a daemon's idleness", window)
	return idle.Measure(ctx, report, "daemon_idle", daemon.Cmd.Process.Pid, window)
}

// wakes measures requests to a function without replicas, and compares them with requests to a
// ready replica. The parameters are in memory for half of the requests, and evicted before the
// others.
func (b keysBench) wakes(ctx context.Context, report *bench.Report, wakes int) error {
	up, err := child.Start(ctx, os.Stderr, "up", "--listen", "127.0.0.1:0", "--state", filepath.Join(b.Dir, "wakes"), "--images", b.Images.Dir, "--ort", b.Ort, "--log", "error")
	if err != nil {
		return err
	}
	defer func() { _ = up.Stop() }()
	api := client.New("http://" + up.Addr)
	model := map[string]string{"STAGECOACH_MODEL": "model.onnx"}
	zero := map[string]string{"com.openfaas.scale.min": "0", "com.openfaas.scale.zero": "true", "com.openfaas.scale.zero-duration": "1s"}
	for _, d := range []client.Deployment{
		{Service: "warm", EnvVars: model, Image: starts.Image},
		// Its process differs, so that it has a zygote of its own.
		{Service: "zero", EnvVars: model, Image: starts.Image, Labels: zero, EnvProcess: "./stage"},
	} {
		if err := api.Deploy(ctx, d); err != nil {
			return err
		}
	}
	body, err := b.body()
	if err != nil {
		return err
	}
	call := func(name string) (time.Duration, error) {
		a, err := api.Do(ctx, http.MethodPost, "/function/"+name, "application/json", body)
		if err == nil && a.Status != http.StatusOK {
			err = fmt.Errorf("%s answers %d: %.200s", name, a.Status, a.Body)
		}
		return a.Took, err
	}
	var warm, cached, cold []time.Duration
	for i := range wakes {
		for _, c := range []struct {
			name, function string
			took           *[]time.Duration
			evict          bool
		}{{"warm", "warm", &warm, false}, {"cold cache", "zero", &cold, true}, {"warm cache", "zero", &cached, false}} {
			if c.function == "zero" {
				if err := running.Asleep(ctx, api, "zero", c.evict && i > 0); err != nil {
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
		console.Progress("bench keysmanager: %d of %d rounds of a request to a warm replica, from zero with a cold and from zero with a warm cache", i+1, wakes)
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
func (b keysBench) body() ([]byte, error) {
	type input struct {
		Name     string    `json:"name"`
		Datatype string    `json:"datatype"`
		Shape    []int     `json:"shape"`
		Data     []float32 `json:"data"`
	}
	width := int(b.Input.Tensors[0].Shape[2])
	data := make([]float32, width)
	for i := range data {
		data[i] = float32(i%7)/7 - 0.5
	}
	return json.Marshal(map[string][]input{"inputs": {{"x", "FP32", []int{1, 1, width}, data}}})
}
