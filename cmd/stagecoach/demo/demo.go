// Package demo does the main job end to end with a gateway of its own: pages through a pipeline, a
// burst that forks replicas answer, and a request that wakes sleeping stages.
package demo

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	openloop "github.com/stagecoach-serving/stagecoach/bench/load"
	"github.com/stagecoach-serving/stagecoach/functions/ocr/ocr"
	"github.com/stagecoach-serving/stagecoach/functions/ocr/page"
	"github.com/stagecoach-serving/stagecoach/image/stack"
	"github.com/stagecoach-serving/stagecoach/internal/child"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/keysmanager/container"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// The demo's targets.
const (
	demoPages   = 3
	demoMaxCER  = 0.05
	demoZeroAge = "6s" // after which an idle function has no replica; stack.yml says minutes
)

// demoBurst is 2 requests per second, then 30, then 2. Each takes 200 ms, so the burst keeps six
// replicas busy.
var demoBurst = []phase{{2, 3 * time.Second}, {30, 12 * time.Second}, {2, 5 * time.Second}}

// Run runs `stagecoach demo`: it starts a gateway and does the main job on pages that it draws. The
// error says what did not happen.
func Run(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("demo", flag.ContinueOnError)
	images := fs.String("images", "build/images", "the functions' images")
	ort := fs.String("ort", "build/ort/libonnxruntime.so.1", "ONNX Runtime's shared library")
	stack := fs.String("stack", "stack.yml", "what is deployed")
	runtime := fs.String("runtime", "process", "what functions run in, as in up: process or containerd")
	address := fs.String("containerd-address", container.Address, "path of containerd's socket")
	namespace := fs.String("containerd-namespace", container.Namespace, "namespace of containerd for the containers")
	dir := fs.String("out", "build/demo", "folder for the log, the pages, the chart and the figures as JSON")
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	if err := os.MkdirAll(*dir, 0o755); err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(*dir, "up.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	state, err := os.MkdirTemp("", "stagecoach-demo-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(state)
	console.Progress("demo: starting stagecoach up (log: %s)", log.Name())
	up, err := child.Start(ctx, log, "up", "--listen", "127.0.0.1:0", "--state", state, "--images", *images, "--ort", *ort,
		"--runtime", *runtime, "--containerd-address", *address, "--containerd-namespace", *namespace)
	if err != nil {
		return fmt.Errorf("%w; see %s", err, log.Name())
	}
	d := &demo{api: client.New("http://" + up.Addr), out: out, dir: *dir}
	err = d.run(ctx, *stack)
	if stopErr := up.Stop(); stopErr != nil {
		err = errors.Join(err, fmt.Errorf("stagecoach up ended with: %w; see %s", stopErr, log.Name()))
	}
	if err == nil {
		fmt.Fprintf(out, "\nAll of it happened. Chart: %s  Figures: %s\n", filepath.Join(*dir, "burst.svg"), filepath.Join(*dir, "demo.json"))
	}
	return err
}

// demo is one run.
type demo struct {
	api *client.Client
	out io.Writer
	dir string

	figures demoFigures
}

// demoFigures is the demo's result, in JSON.
type demoFigures struct {
	CER        float64       `json:"character_error_rate"`
	Stages     []stageFigure `json:"stages"` // of the last page
	Requests   int           `json:"burst_requests"`
	Failed     int           `json:"burst_failed"`
	MaxQueue   int           `json:"burst_max_queue"`
	MaxReady   int           `json:"burst_max_replicas"`
	Forks      int           `json:"burst_forks"`
	ForkAnswer []float64     `json:"fork_order_to_first_answer_ms"`
	Wake       float64       `json:"wake_from_zero_ms"`
}

type stageFigure struct {
	Stage     string  `json:"stage"`
	Calls     int     `json:"calls"`
	WaitMS    float64 `json:"wait_ms"`
	ServiceMS float64 `json:"service_ms"`
}

func (d *demo) run(ctx context.Context, stack string) error {
	for _, step := range []func(context.Context) error{
		func(ctx context.Context) error { return d.deploy(ctx, stack) }, d.pages, d.burst, d.wake,
	} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	b, err := json.MarshalIndent(d.figures, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(d.dir, "demo.json"), append(b, '\n'), 0o644)
}

func (d *demo) title(format string, args ...any) {
	fmt.Fprintf(d.out, "\n== "+format+"\n\n", args...)
}

// deploy deploys the stack's functions in random order, as faas-cli does.
func (d *demo) deploy(ctx context.Context, file string) error {
	stack, err := stack.Read(file)
	if err != nil {
		return err
	}
	for name, f := range stack.Functions { // map order is random
		f.Labels = maps.Clone(f.Labels)
		f.Labels["com.openfaas.scale.zero-duration"] = demoZeroAge
		if err := d.api.Deploy(ctx, client.FromStack(name, f)); err != nil {
			return err
		}
	}
	console.Progress("demo: %d functions deployed from %s", len(stack.Functions), file)
	return nil
}

// pages sends drawn pages through the OCR pipeline.
func (d *demo) pages(ctx context.Context) error {
	d.title("OCR: page images through three stages (detect, recognise each box, text)")
	errors, characters := 0.0, 0
	for i := range demoPages {
		p, err := page.Sample(uint64(i+1), 0)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(d.dir, fmt.Sprintf("page-%d.png", i+1)), p.PNG, 0o644); err != nil {
			return err
		}
		a, err := d.api.Invoke(ctx, "ocr", "image/png", p.PNG)
		if err != nil {
			return err
		}
		cer := ocr.CER(string(a.Body), p.Text())
		errors += cer * float64(len(p.Text()))
		characters += len(p.Text())
		d.figures.Stages = serverTiming(a.Header.Get("Server-Timing"))
		fmt.Fprintf(d.out, "page %d: %d lines, %d ms, character error rate %.4f\n", i+1, len(p.Lines), a.Took.Milliseconds(), cer)
		if i == demoPages-1 {
			fmt.Fprintf(d.out, "\n%s\n\n", indent(string(a.Body)))
		}
	}
	if err := writeStages(d.out, d.figures.Stages); err != nil {
		return err
	}
	d.figures.CER = errors / float64(characters)
	fmt.Fprintf(d.out, "character error rate over all pages: %.4f (at most %.2f)\n", d.figures.CER, demoMaxCER)
	if d.figures.CER > demoMaxCER {
		return fmt.Errorf("character error rate %.4f, want at most %.2f", d.figures.CER, demoMaxCER)
	}
	return nil
}

func indent(s string) string { return "  | " + strings.ReplaceAll(s, "\n", "\n  | ") }

// serverTiming reads a response's Server-Timing header.
func serverTiming(header string) []stageFigure {
	var out []stageFigure
	for _, s := range openloop.ServerTiming(header) {
		out = append(out, stageFigure{s.Stage, s.Calls, float64(s.Wait) / float64(time.Millisecond), float64(s.Service) / float64(time.Millisecond)})
	}
	return out
}

func writeStages(w io.Writer, stages []stageFigure) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "stage (last page)\tcalls\twait, all calls\tservice, all calls\t\n")
	for _, s := range stages {
		fmt.Fprintf(t, "%s\t%d\t%.1f ms\t%.1f ms\t\n", s.Stage, s.Calls, s.WaitMS, s.ServiceMS)
	}
	return t.Flush()
}

// burst sends a burst to the function wait, and prints how forks answer it.
func (d *demo) burst(ctx context.Context) error {
	d.title("A burst: 2, then 30, then 2 requests/s of 200 ms. The function only holds a slot, a stand-in for a device.")
	console.Progress("demo: the burst takes 20 s")
	b, err := runBurst(ctx, d.api, "wait", demoBurst)
	if err != nil {
		return err
	}
	if err := b.writeTable(d.out); err != nil {
		return err
	}
	f, err := os.Create(filepath.Join(d.dir, "burst.svg"))
	if err != nil {
		return err
	}
	defer f.Close()
	if err := b.writeChart(f); err != nil {
		return err
	}
	forks := b.forked()
	fmt.Fprintf(d.out, "\nwhat each fork took, its first answer's 200 ms of waiting included:\n")
	if err := client.WriteStarts(d.out, forks); err != nil {
		return err
	}
	d.figures.Requests, d.figures.Failed, d.figures.Forks = len(b.calls), b.failed(), len(forks)
	for _, s := range b.samples {
		d.figures.MaxQueue, d.figures.MaxReady = max(d.figures.MaxQueue, s.waiting), max(d.figures.MaxReady, s.ready)
	}
	for _, r := range forks {
		d.figures.ForkAnswer = append(d.figures.ForkAnswer, r.Answered.Seconds()*1e3)
	}
	switch {
	case b.failed() > 0:
		return fmt.Errorf("%d of %d requests of the burst were not answered with 200", b.failed(), len(b.calls))
	case len(forks) < 3 || d.figures.MaxReady < 4:
		return fmt.Errorf("the burst was answered by %d forks and at most %d replicas, want at least 3 and 4", len(forks), d.figures.MaxReady)
	}
	return nil
}

// wake waits until the pipeline has no replica, and sends the page that wakes it.
func (d *demo) wake(ctx context.Context) error {
	d.title("The pipeline at zero, and the request that wakes it")
	console.Progress("demo: waiting until the idle pipeline has no replicas")
	stages := []string{"ocr-detect", "ocr-recognise", "ocr-text"}
	deadline := time.Now().Add(time.Minute)
	for {
		total := 0
		for _, s := range stages {
			st, err := d.api.Status(ctx, s)
			if err != nil {
				return err
			}
			total += st.Replicas
		}
		if total == 0 {
			break
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("after a minute of idleness the pipeline still has %d replicas, want none", total)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(200 * time.Millisecond):
		}
	}
	fmt.Fprintf(d.out, "%s: no replicas\n", strings.Join(stages, ", "))
	p, err := page.Draw(page.Options{Seed: 9, Width: 500, Height: 120, Size: 16})
	if err != nil {
		return err
	}
	begin := time.Now()
	a, err := d.api.Invoke(ctx, "ocr", "image/png", p.PNG)
	if err != nil {
		return err
	}
	d.figures.Wake = a.Took.Seconds() * 1e3
	fmt.Fprintf(d.out, "a page of %d lines woke it: answered after %d ms, recognition included\n\n%s\n\n", len(p.Lines), a.Took.Milliseconds(), indent(string(a.Body)))
	var starts []client.ReplicaStart
	for _, s := range stages {
		tl, err := d.api.Timeline(ctx, s)
		if err != nil {
			return err
		}
		starts = append(starts, client.ReplicaStarts(slices.DeleteFunc(tl.Events, func(e schema.Event) bool { return e.At.Before(begin) }))...)
	}
	if err := client.WriteStarts(d.out, starts); err != nil {
		return err
	}
	if cer := ocr.CER(string(a.Body), p.Text()); cer > demoMaxCER {
		return fmt.Errorf("the page that woke the pipeline was read as %q, want %q", a.Body, p.Text())
	}
	if len(starts) < len(stages) {
		return fmt.Errorf("%d replicas started on the wake, want at least %d", len(starts), len(stages))
	}
	return nil
}
