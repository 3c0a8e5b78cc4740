// Package gpu measures how fast stages in PyTorch start on a device.
package gpu

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/bench/starts"
	"github.com/stagecoach-serving/stagecoach/functions/torch/synthetic"
	"github.com/stagecoach-serving/stagecoach/internal/console"
)

// gpuBench measures how fast stages in PyTorch start on a device.
type gpuBench struct {
	machine starts.Machine
	py      starts.Python
	at      gpuDevice
	report  *bench.Report
	cells   *gpuCells
	times   gpuTimes
	often   int
	sizes   []gpuSize
	paths   []string
	weights string                   // folder; empty: a temporary one per size
	stages  map[string]*starts.Stage // by name of the size; nil: it has no weights
	answers map[string]string        // answer by hand, by name of the size
}

// gpuSize is a stage's size.
type gpuSize struct {
	name  string // as it was given, such as 5.4GB
	bytes int64
}

// gpuPaths are the ways to start a stage, in the order of measurement. The first is a start by
// hand, with which the others are compared.
var gpuPaths = []string{"plain", "fork", "parked", "resident", "heap", "cold"}

// Run measures a device: the cost of a context, the speed of copies from pinned memory, and the
// speed at which a stage's parameters are copied. It also measures the time from order to first
// output on each start path, and compares it with torch.load by hand. It needs this program and an
// interpreter with PyTorch, but no network.
func Run(ctx context.Context, m starts.Machine, args []string, out io.Writer) error {
	g := gpuBench{machine: m, times: gpuTimes{start: guessed}, stages: map[string]*starts.Stage{}, answers: map[string]string{}}
	fs := flag.NewFlagSet("bench gpu", flag.ContinueOnError)
	asJSON := fs.Bool("json", false, "print JSON instead of a table")
	python := fs.String("python", "", "interpreter with PyTorch; default: the first one of the machine that has it")
	device := fs.String("device", "all", "the first of these is measured: all, or UUIDs and indices by commas; cpu: without a GPU, to try all of it")
	sizes := fs.String("size", "5.4GB,1GB,100MB,14GB", "of stages' parameters, by commas, the most important first")
	paths := fs.String("paths", strings.Join(gpuPaths, ","), "ways to start a stage, by commas")
	fs.IntVar(&g.often, "rounds", 5, "starts on each path; by hand, and cold, it is half of them")
	fs.StringVar(&g.weights, "weights", "", "folder that keeps generated weights for later runs; default: a temporary one")
	lines := fs.String("json-lines", "", "file to which each result is appended as soon as it is there, as a line of JSON; what it has already is not measured again")
	budget := fs.Duration("budget", 0, "time for all of it: what does not fit is not run, and said so; 0: as long as it takes")
	if i := slices.IndexFunc(args, func(a string) bool {
		name, _, _ := strings.Cut(strings.TrimLeft(a, "-"), "=")
		return name == "sizes" && a[0] == '-'
	}); i >= 0 {
		return fmt.Errorf("bench gpu: got %s, which is --size now, such as --size 1GB,5.4GB", args[i])
	}
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	if err := g.choose(*sizes, *paths); err != nil {
		return fmt.Errorf("bench gpu: %w", err)
	}
	g.report = bench.NewReport("gpu", os.Stderr)
	g.cells = &gpuCells{report: g.report, host: hostFree}
	if *budget > 0 {
		g.cells.end = time.Now().Add(*budget)
	}
	var file *os.File
	if *lines != "" {
		var err error
		const how = os.O_CREATE | os.O_APPEND | os.O_RDWR
		file, err = os.OpenFile(*lines, how, 0o644) //nolint:gosec // results are for everybody
		if err != nil {
			return fmt.Errorf("bench gpu: --json-lines: %w", err)
		}
		defer file.Close() // all lines have been written by then
	}
	var err error
	if g.at, g.py, err = openGPU(ctx, m.Devices, *device, *python, g.report); err != nil {
		return fmt.Errorf("bench gpu: %w", err)
	}
	defer g.at.close()
	if file != nil {
		if err := g.cells.resume(file); err != nil {
			return fmt.Errorf("bench gpu: %w", err)
		}
	}
	g.measure(ctx)
	// The report is printed even if cells failed.
	return errors.Join(g.cells.err(), bench.Print(g.report, *asJSON, out))
}

// choose reads the flags that choose cells.
func (g *gpuBench) choose(sizes, paths string) error {
	if g.often < 2 {
		return fmt.Errorf("--rounds %d, want at least 2", g.often)
	}
	for name := range strings.SplitSeq(sizes, ",") {
		bytes, err := synthetic.ParseSize(name)
		if err != nil {
			return fmt.Errorf("--size: %w", err)
		}
		g.sizes = append(g.sizes, gpuSize{name, bytes})
	}
	wanted := strings.Split(paths, ",")
	for _, p := range wanted {
		if !slices.Contains(gpuPaths, p) {
			return fmt.Errorf("--paths: got %q, want some of %s", p, strings.Join(gpuPaths, ","))
		}
	}
	g.paths = slices.DeleteFunc(slices.Clone(gpuPaths), func(p string) bool { return !slices.Contains(wanted, p) })
	return nil
}

// Turns of a run, the most important first: the figures with goals, then figures that explain them.
// Every size is measured in the first turn before the second turn begins, so a run that is too
// short leaves out the least important figures.
const (
	turnGoals  = iota // pinned, ring, plain, fork, parked, resident, four forks at once
	turnOthers        // heap, cold
	turnAtOnce        // four at once on the other paths
	turnBare          // fork without accounts, cgroups and networks
	turns
)

// measure measures all sizes, turn by turn. It continues after failures, because a machine with a
// GPU may not be available again soon.
func (g *gpuBench) measure(ctx context.Context) {
	g.cells.look = func(ctx context.Context) (int64, error) {
		d, err := g.at.look(ctx)
		return d.Memory - d.Used, err
	}
	g.cells.begin()
	g.cells.run(ctx, gpuCell{name: deviceCell, takes: 4 * g.times.start, measure: g.contexts})
	defer func() {
		for _, b := range g.stages {
			if b != nil {
				b.Close()
			}
		}
	}()
	for turn := range turns {
		for _, s := range g.sizes {
			g.size(ctx, s, turn)
		}
	}
	for _, s := range g.sizes {
		g.cells.goals(g.goals(s))
	}
}

// figure returns a figure of the report, or 0 if there is none.
func (g *gpuBench) figure(name, metric string) float64 {
	for _, r := range g.report.Results {
		if r.Case == name && r.Metric == metric {
			return r.Value
		}
	}
	return 0
}

// pinned returns the best GB/s of copies from pinned memory; 0: they were not measured.
func (g *gpuBench) pinned(s gpuSize) (best float64) {
	for _, streams := range pinnedStreams {
		best = max(best, g.figure(s.name+"_pinned_"+streams+"_streams", "copy_gb_per_s"))
	}
	return best
}
