// Package wake measures the first answer of pipelines that sleep.
package wake

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
	openloop "github.com/stagecoach-serving/stagecoach/bench/load"
	"github.com/stagecoach-serving/stagecoach/bench/running"
	"github.com/stagecoach-serving/stagecoach/functions/ocr/page"
	"github.com/stagecoach-serving/stagecoach/image/stack"
	"github.com/stagecoach-serving/stagecoach/internal/child"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// wakeCase is a pipeline and the state that it is in before a call.
type wakeCase struct {
	name, pipeline string
	asleep, evict  bool
}

var wakeCases = []wakeCase{
	{"ocr_awake", "ocr", false, false},
	{"ocr_asleep", "ocr", true, false}, // parameters are kept in memory: two stages are forked
	{"ocr_evicted", "ocr", true, true},
	{"processes_awake", "processes", false, false},
	{"processes_asleep", "processes", true, false},
}

// wakeBench calls pipelines of one `up`.
type wakeBench struct {
	api    *client.Client
	page   []byte
	stages map[string][]string        // by pipeline
	models map[string]bool            // stages that have parameters
	took   map[string][]time.Duration // by case
	waits  map[string][]time.Duration // of the last stage's call for a replica, by case
}

// Run measures how long calls of two pipelines take while their stages sleep, and while they are
// awake. Each pipeline has three stages: the OCR pipeline has models, and the other one has
// ordinary processes. With --against, another build of this program takes turns with this one, and
// the report has the median over rounds of the ratio of their times.
func Run(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("bench wake", flag.ContinueOnError)
	asJSON, images := bench.Flags(fs)
	rounds := fs.Int("rounds", 20, "calls per case")
	ort := fs.String("ort", "build/ort/libonnxruntime.so.1", "ONNX Runtime's shared library")
	file := fs.String("stack", "stack.yml", "the stack file with the OCR pipeline")
	against := fs.String("against", "", "another build of this program, to compare with in turns")
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	if *rounds < 1 {
		return fmt.Errorf("bench wake: --rounds %d, want at least 1", *rounds)
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	programs := []string{self}
	if *against != "" {
		programs = append(programs, *against)
	}
	report := bench.NewReport("wake", os.Stderr)
	var all []*wakeBench
	for _, program := range programs {
		state, err := os.MkdirTemp("", "stagecoach-wake-")
		if err != nil {
			return err
		}
		defer os.RemoveAll(state)
		up, err := child.StartProgram(ctx, program, os.Stderr, "up", "--listen", "127.0.0.1:0", "--state", state, "--images", *images, "--ort", *ort, "--log", "error")
		if err != nil {
			return err
		}
		defer func() { _ = up.Stop() }()
		w := &wakeBench{api: client.New("http://" + up.Addr), stages: map[string][]string{}, models: map[string]bool{}, took: map[string][]time.Duration{}, waits: map[string][]time.Duration{}}
		if err := w.deploy(ctx, *file); err != nil {
			return err
		}
		all = append(all, w)
	}
	for round := range *rounds + 1 { // the first round packs the weights
		for _, c := range wakeCases {
			for k := range all {
				w := all[(k+round)%len(all)] // each goes first in turn
				took, wait, err := w.turn(ctx, c)
				if err != nil {
					return fmt.Errorf("%s: %w", c.name, err)
				}
				if round > 0 {
					w.took[c.name] = append(w.took[c.name], took)
					w.waits[c.name] = append(w.waits[c.name], wait)
				}
			}
		}
		console.Progress("bench wake: round %d of %d", round, *rounds)
	}
	for _, c := range wakeCases {
		report.AddMillis(c.name, "p50_ms", all[0].took[c.name], 0.5)
		report.AddMillis(c.name, "last_wait_ms", all[0].waits[c.name], 0.5)
		if len(all) > 1 {
			report.AddMillis(c.name, "against_p50_ms", all[1].took[c.name], 0.5)
			report.AddMillis(c.name, "against_last_wait_ms", all[1].waits[c.name], 0.5)
			var ratios []float64
			for i, took := range all[0].took[c.name] {
				ratios = append(ratios, float64(took)/float64(all[1].took[c.name][i]))
			}
			slices.Sort(ratios)
			report.Add(c.name, "ratio", ratios[len(ratios)/2], len(ratios))
		}
	}
	return bench.Print(report, *asJSON, out)
}

// deploy deploys the pipelines, whose stages sleep after a second, and draws a page.
func (w *wakeBench) deploy(ctx context.Context, file string) error {
	s, err := stack.Read(file)
	if err != nil {
		return err
	}
	sleepy := map[string]string{"com.openfaas.scale.min": "0", "com.openfaas.scale.zero": "true", "com.openfaas.scale.zero-duration": "1s"}
	all := []client.Deployment{
		{Service: "one", Annotations: map[string]string{"stagecoach.dev/next": "two"}},
		{Service: "two", Annotations: map[string]string{"stagecoach.dev/next": "three"}},
		{Service: "three", Annotations: map[string]string{}},
	}
	for i := range all {
		all[i].Image, all[i].Labels = "stagecoach/noop:0.1.0", sleepy
		all[i].Annotations["stagecoach.dev/pipeline"] = "processes"
	}
	for name, f := range s.Functions {
		d := client.FromStack(name, f)
		d.Labels = maps.Clone(d.Labels)
		maps.Copy(d.Labels, sleepy)
		all = append(all, d)
	}
	for _, d := range all {
		if err := w.api.Deploy(ctx, d); err != nil {
			return err
		}
		pipeline := d.Annotations["stagecoach.dev/pipeline"]
		w.stages[pipeline] = append(w.stages[pipeline], d.Service)
		w.models[d.Service] = d.EnvVars["STAGECOACH_MODEL"] != ""
	}
	p, err := page.Draw(page.Options{Seed: 9, Width: 500, Height: 120, Size: 16})
	w.page = p.PNG
	return err
}

// turn puts a pipeline into the state of the case and calls it. It returns how long the answer
// took, and how long the call of the last stage waited for a replica.
func (w *wakeBench) turn(ctx context.Context, c wakeCase) (took, wait time.Duration, err error) {
	if !c.asleep {
		if _, _, err := w.call(ctx, c.pipeline); err != nil {
			return 0, 0, err
		}
	}
	// Evicted parameters are soon loaded again, so all stages must sleep first.
	for _, evict := range []bool{false, true} {
		for _, stage := range w.stages[c.pipeline] {
			if !c.asleep || evict && !(c.evict && w.models[stage]) {
				continue
			}
			if err := running.Asleep(ctx, w.api, stage, evict); err != nil {
				return 0, 0, err
			}
		}
	}
	return w.call(ctx, c.pipeline)
}

func (w *wakeBench) call(ctx context.Context, pipeline string) (took, wait time.Duration, err error) {
	a, err := w.api.Do(ctx, http.MethodPost, "/function/"+pipeline, "image/png", w.page)
	if err == nil && a.Status != http.StatusOK {
		err = fmt.Errorf("pipeline %s answers %d: %.200s", pipeline, a.Status, a.Body)
	}
	if stages := openloop.ServerTiming(a.Header.Get("Server-Timing")); len(stages) == 3 {
		wait = stages[2].Wait
	}
	return a.Took, wait, err
}
