// Package batch measures how much faster batches are. It runs MiniLM as one ONNX stage at several
// concurrencies, with batches off and with a batch that is chosen from a profile.
package batch

import (
	"bytes"
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/profile"
	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/bench/running"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/stage/zygote"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Settings of the bench.
const (
	image     = "minilm-encode"
	text      = "The coach rolled out of the yard into the rain, with six inside." // 16 tokens
	tokens    = 16
	largest   = 32
	objective = 2 * time.Second
	off, auto = "batch-off", "batch-auto" // functions, and prefixes of cases
)

// Run measures requests per second and latencies. The cases take turns, so that disturbances on the
// machine affect all cases alike. Run first measures the model alone, by batch size. These times
// bound the gain, and they are the profile that auto reads.
func Run(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("bench batch", flag.ContinueOnError)
	asJSON, images := bench.Flags(fs)
	ort := fs.String("ort", "build/ort/libonnxruntime.so.1", "ONNX Runtime's library")
	rounds := fs.Int("rounds", 5, "turns of every case")
	calls := fs.Int("calls", 200, "of a turn")
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	report := bench.NewReport("batch", os.Stderr)
	folder := filepath.Join(*images, "stagecoach", image, "0.1.0", "model", "whole.onnx")
	p, err := profiled(report, *ort, folder, *rounds)
	if err != nil {
		return err
	}
	err = running.OnUp(ctx, []string{"--images", *images, "--ort", *ort}, func(api *client.Client) error {
		if err := deploy(ctx, api, p); err != nil {
			return err
		}
		return measure(ctx, api, report, *rounds, *calls)
	})
	if err != nil {
		return err
	}
	return bench.Print(report, *asJSON, out)
}

// profiled measures the model alone with batches of 1, 2, 4, … texts.
func profiled(report *bench.Report, library, model string, rounds int) (p profile.Profile, err error) {
	cores := runtime.NumCPU()
	s, err := zygote.Open(zygote.Options{Library: library, Model: model, Threads: cores, Start: cores})
	if err != nil {
		return p, err
	}
	defer s.Close()
	series := map[int]*profile.Series{}
	for r := range rounds + 1 { // the first round warms up
		for n := 1; n <= largest; n *= 2 {
			if series[n] == nil {
				series[n] = new(profile.Series)
			}
			for range 4 {
				begin := time.Now()
				if _, err := s.Run(inputs(n)); err != nil {
					return p, err
				}
				if r > 0 {
					series[n].Add(time.Since(begin))
				}
			}
		}
	}
	p = profile.Profile{Version: profile.Version, Relative: 0.05}
	one := series[1].Estimate().Mean
	for n := 1; n <= largest; n *= 2 {
		pt := series[n].Estimate()
		pt.Cell = profile.Cell{CPUMilli: 1000 * cores, Batch: n}
		p.Points = append(p.Points, pt)
		c := fmt.Sprintf("model_batch%d", n)
		report.Add(c, "ms_per_item", 1000*pt.Mean/float64(n), pt.N)
		report.Add(c, "times_faster", one*float64(n)/pt.Mean, pt.N)
	}
	return p, nil
}

// inputs returns n texts of the same length.
func inputs(n int) []tensor.Tensor {
	shape := []int64{int64(n), tokens}
	ids := tensor.Tensor{Name: "input_ids", Datatype: "INT64", Shape: shape}
	for range n * tokens {
		ids.Data = binary.LittleEndian.AppendUint64(ids.Data, 2000)
	}
	mask := bytes.Repeat([]byte{1, 0, 0, 0, 0, 0, 0, 0}, n*tokens)
	return []tensor.Tensor{ids, {Name: "attention_mask", Datatype: "INT64", Shape: shape, Data: mask}}
}

// deploy deploys both functions. The one with batches starts its replica after it has a profile.
func deploy(ctx context.Context, api *client.Client, p profile.Profile) error {
	for name, batch := range map[string]string{off: "1", auto: fmt.Sprintf("auto:%d", largest)} {
		if err := api.Deploy(ctx, client.Deployment{
			Service: name, Image: "stagecoach/" + image + ":0.1.0", EnvVars: map[string]string{"STAGECOACH_MODEL": "model/whole.onnx"},
			Labels:      map[string]string{"com.openfaas.scale.min": "0", "com.openfaas.scale.max": "1", "com.openfaas.scale.zero": "true"},
			Annotations: map[string]string{"stagecoach.dev/batch": batch, "stagecoach.dev/slo": objective.String()},
		}); err != nil {
			return err
		}
	}
	if err := api.Send(ctx, "profile "+auto, http.MethodPut, "/system/function/"+auto+"/profile", p); err != nil {
		return err
	}
	time.Sleep(3 * time.Second) // the control loop reads profiles every second
	for _, name := range []string{off, auto} {
		if _, err := running.Saturate(ctx, api, name, "text/plain", text, largest, 4*largest, nil); err != nil {
			return err
		}
	}
	return nil
}

// measure runs all cases in turns.
func measure(ctx context.Context, api *client.Client, report *bench.Report, rounds, calls int) error {
	took, rates := map[string][]time.Duration{}, map[string][]float64{}
	concurrency := []int{1, 8, 32}
	for r := range rounds {
		for _, c := range concurrency {
			for _, name := range []string{off, auto} {
				key := fmt.Sprintf("%s_c%d", name, c)
				all, err := running.Saturate(ctx, api, name, "text/plain", text, c, calls, func(a client.Answer) { took[key] = append(took[key], a.Took) })
				if err != nil {
					return err
				}
				rates[key] = append(rates[key], float64(calls)/all.Seconds())
			}
		}
		console.Progress("bench batch: round %d of %d", r+1, rounds)
	}
	for _, c := range concurrency {
		without := fmt.Sprintf("%s_c%d", off, c)
		for _, name := range []string{off, auto} {
			key := fmt.Sprintf("%s_c%d", name, c)
			n := rounds * calls
			report.Add(key, "requests_per_second", bench.Median(rates[key]), n)
			report.AddMillis(key, "p50_ms", took[key], 0.5)
			report.AddMillis(key, "p99_ms", took[key], 0.99)
			report.Add(key, "times_faster", bench.Median(rates[key])/bench.Median(rates[without]), n)
		}
	}
	return nil
}
