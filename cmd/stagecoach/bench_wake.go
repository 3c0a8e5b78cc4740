package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/functions/ocr/page"
	"github.com/stagecoach-serving/stagecoach/stack"
)

// wakeBench calls the OCR pipeline of an `up` of its own.
type wakeBench struct {
	name   string
	api    *client
	page   []byte
	stages []string
	models map[string]bool            // stages that have parameters
	took   map[string][]time.Duration // by case
}

// benchWake measures the first answer of the OCR pipeline when all its stages sleep, with their
// parameters in memory and without, beside the answer of an awake pipeline. With --against, another
// build of this program takes turns with this one.
func benchWake(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("bench wake", flag.ContinueOnError)
	asJSON, images := reportFlags(fs)
	rounds := fs.Int("rounds", 20, "turns of every case")
	ort := fs.String("ort", "build/ort/libonnxruntime.so.1", "ONNX Runtime's shared library")
	file := fs.String("stack", "stack.yml", "the stack file with the OCR pipeline")
	against := fs.String("against", "", "another build of this program, to take turns with")
	if err := parseFlags(fs, args); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	report := bench.NewReport("wake", os.Stderr)
	programs := []string{self}
	if *against != "" {
		programs = append(programs, *against)
	}
	var all []*wakeBench
	for i, program := range programs {
		state, err := os.MkdirTemp("", "stagecoach-wake-")
		if err != nil {
			return err
		}
		defer os.RemoveAll(state)
		up, err := startProgram(ctx, program, os.Stderr, "up", "--listen", "127.0.0.1:0", "--state", state, "--images", *images, "--ort", *ort, "--log", "error")
		if err != nil {
			return err
		}
		defer func() { _ = up.stop() }()
		w := &wakeBench{name: []string{"", "against_"}[i], api: newClient("http://" + up.addr), took: map[string][]time.Duration{}, models: map[string]bool{}}
		if err := w.deploy(ctx, *file); err != nil {
			return err
		}
		all = append(all, w)
	}
	for round := range *rounds + 1 { // the first round packs the weights
		for _, name := range []string{"awake", "kept", "evicted"} {
			for _, w := range all {
				took, err := w.turn(ctx, name)
				if err != nil {
					return fmt.Errorf("%s%s: %w", w.name, name, err)
				}
				if round > 0 {
					w.took[name] = append(w.took[name], took)
				}
			}
		}
		progress("bench wake: round %d of %d", round, *rounds)
	}
	for _, w := range all {
		for _, name := range slices.Sorted(maps.Keys(w.took)) {
			report.AddMillis(w.name+name, "p50_ms", w.took[name], 0.5)
			report.AddMillis(w.name+name, "p90_ms", w.took[name], 0.9)
		}
	}
	return printReport(report, *asJSON, out)
}

// deploy deploys the pipeline, whose stages sleep after a second, and draws a page.
func (w *wakeBench) deploy(ctx context.Context, file string) error {
	s, err := stack.Read(file)
	if err != nil {
		return err
	}
	for name, f := range s.Functions {
		if f.Annotations["stagecoach.dev/pipeline"] != "ocr" {
			continue
		}
		d := stackDeployment(name, f)
		d.Labels = maps.Clone(d.Labels)
		d.Labels["com.openfaas.scale.zero-duration"] = "1s"
		if err := w.api.deploy(ctx, d); err != nil {
			return err
		}
		w.stages = append(w.stages, name)
		w.models[name] = f.Environment["STAGECOACH_MODEL"] != ""
	}
	p, err := page.Draw(page.Options{Seed: 9, Width: 500, Height: 120, Size: 16})
	w.page = p.PNG
	return err
}

// turn calls the pipeline once: awake, or asleep with its parameters kept in memory or evicted.
func (w *wakeBench) turn(ctx context.Context, name string) (time.Duration, error) {
	if name == "awake" {
		if _, err := w.call(ctx); err != nil {
			return 0, err
		}
		return w.call(ctx)
	}
	passes := []bool{false, true} // what is evicted is loaded again a second later: all must sleep first
	if name == "kept" {
		passes = passes[:1]
	}
	for _, evict := range passes {
		for _, stage := range w.stages {
			if err := asleep(ctx, w.api, stage, evict && w.models[stage]); err != nil {
				return 0, err
			}
		}
	}
	return w.call(ctx)
}

func (w *wakeBench) call(ctx context.Context) (time.Duration, error) {
	a, err := w.api.do(ctx, http.MethodPost, "/function/ocr", "image/png", w.page)
	if err == nil && a.status != http.StatusOK {
		err = fmt.Errorf("the pipeline answers %d: %.200s", a.status, a.body)
	}
	return a.took, err
}
