// Package batch measures how much faster batches are, at several concurrencies, with batches off
// and with batches that are chosen from profiles. It runs MiniLM as one ONNX stage, MiniLM with its
// layers in PyTorch, and OCR, in which recognition takes batches.
package batch

import (
	"bytes"
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
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
	// of pipelines, whose stages share two cores and take far longer under load
	pipelineObjective = 10 * time.Second
	off, auto         = "off", "auto" // copies of each subject
)

// subjects are the values of --only.
var subjects = []string{"onnx", "torch", "ocr"}

// Run measures requests per second and latencies. The cases take turns, so that disturbances on the
// machine affect all cases alike. Run first measures the model alone, by batch size. These times
// bound the gain, and they are the profile that auto reads.
func Run(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("bench batch", flag.ContinueOnError)
	asJSON, images := bench.Flags(fs)
	ort := fs.String("ort", "build/ort/libonnxruntime.so.1", "ONNX Runtime's library")
	rounds := fs.Int("rounds", 5, "turns of every case")
	calls := fs.Int("calls", 200, "of a turn")
	only := fs.String("only", "", "one of onnx, torch and ocr")
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	if *only != "" && !slices.Contains(subjects, *only) {
		return fmt.Errorf("--only %q, want one of %s", *only, strings.Join(subjects, ", "))
	}
	report := bench.NewReport("batch", os.Stderr)
	for _, name := range subjects {
		if *only != "" && *only != name {
			continue
		}
		s, p, err := prepared(report, name, *ort, *images, *rounds)
		if err != nil {
			return err
		}
		err = running.OnUp(ctx, []string{"--images", *images, "--ort", *ort}, func(api *client.Client) error {
			if err := s.begin(ctx, api, p, *calls); err != nil {
				return err
			}
			if err := s.limit(ctx, api, report); err != nil {
				return err
			}
			return s.measure(ctx, api, report, *rounds, *calls)
		})
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return bench.Print(report, *asJSON, out)
}

// prepared returns a subject, and its profile if that can be measured without `up`.
func prepared(report *bench.Report, name, ort, images string, rounds int) (s subject, p profile.Profile, err error) {
	switch name {
	case "torch":
		s = torchPipeline()
	case "ocr":
		s, err = ocrPipeline()
	default:
		s = subject{name: name, content: "text/plain", body: []byte(text), slo: objective, stages: []stage{{image: image, env: map[string]string{"STAGECOACH_MODEL": "model/whole.onnx"}, batch: true}}}
		p, err = profiled(report, ort, filepath.Join(images, "stagecoach", image, "0.1.0", "model", "whole.onnx"), rounds)
	}
	return s, p, err
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

// measure runs all cases in turns.
func (s *subject) measure(ctx context.Context, api *client.Client, report *bench.Report, rounds, calls int) error {
	took, rates := map[string][]time.Duration{}, map[string][]float64{}
	concurrency := []int{1, 8, 32}
	for r := range rounds {
		for _, c := range concurrency {
			for _, of := range []string{off, auto} {
				key := s.key(of, c)
				all, err := running.Saturate(ctx, api, s.pipeline(of), s.content, string(s.body), c, calls, func(a client.Answer) { took[key] = append(took[key], a.Took) })
				if err != nil {
					return err
				}
				rates[key] = append(rates[key], float64(calls)/all.Seconds())
			}
		}
		console.Progress("bench batch: %s: round %d of %d", s.name, r+1, rounds)
	}
	for _, c := range concurrency {
		without := s.key(off, c)
		for _, of := range []string{off, auto} {
			key := s.key(of, c)
			n := rounds * calls
			report.Add(key, "requests_per_second", bench.Median(rates[key]), n)
			report.AddMillis(key, "p50_ms", took[key], 0.5)
			report.AddMillis(key, "p99_ms", took[key], 0.99)
			report.Add(key, "times_faster", bench.Median(rates[key])/bench.Median(rates[without]), n)
		}
	}
	return nil
}

// key returns the name of a case.
func (s *subject) key(of string, c int) string { return fmt.Sprintf("%s_%s_c%d", s.name, of, c) }
