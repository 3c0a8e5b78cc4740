package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/functions/torch/synthetic"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
)

// noDevice is the exit status of a benchmark whose device this machine does not have.
const noDevice = 3

// gpuBench measures how stages in PyTorch come up on a device.
type gpuBench struct {
	py      torchPython
	at      torchDevice
	report  *bench.Report
	often   int
	sizes   []gpuSize
	watched func() []keysmanager.Device // the device alone
	pinned  float64                     // GB/s of copies from pinned memory, at best
}

// gpuSize is a stage's size.
type gpuSize struct {
	name  string // as it was given, such as 5.4G
	bytes int64
}

// benchGPU measures, on one device, what a context takes, how fast copies from pinned memory are, how fast a stage's parameters get there,
// and order → first output of stages on each start path beside torch.load by hand. It needs this program, an interpreter with PyTorch, and
// no network.
func benchGPU(ctx context.Context, args []string, out io.Writer) error {
	g := gpuBench{}
	fs := flag.NewFlagSet("bench gpu", flag.ContinueOnError)
	asJSON := fs.Bool("json", false, "print JSON instead of a table")
	python := fs.String("python", "", "interpreter with PyTorch; default: python3, or else /usr/bin/python3")
	device := fs.String("device", "all", "the first of these is measured: all, or UUIDs and indices by commas; cpu: without a GPU, to try all of it")
	sizes := fs.String("sizes", "0.7G,2.7G,5.4G", "of stages' parameters, by commas")
	fs.IntVar(&g.often, "rounds", 5, "starts on each path; by hand, and cold, it is half of them")
	if err := parseFlags(fs, args); err != nil {
		return err
	}
	if g.often < 2 {
		return fmt.Errorf("bench gpu: --rounds %d, want at least 2", g.often)
	}
	for name := range strings.SplitSeq(*sizes, ",") {
		bytes, err := synthetic.ParseSize(name)
		if err != nil {
			return fmt.Errorf("bench gpu: --sizes: %w", err)
		}
		g.sizes = append(g.sizes, gpuSize{name, bytes})
	}
	done, err := g.open(ctx, *device, *python)
	if err != nil {
		return err
	}
	defer done()
	failed := g.measure(ctx)
	if g.at != onCPU {
		g.report.Goals = gpuGoals(g.report, g.sizes)
	}
	return errors.Join(failed, printReport(g.report, *asJSON, out)) // what was measured is not lost
}

// open finds the device and an interpreter for it.
func (g *gpuBench) open(ctx context.Context, device, python string) (done func(), err error) {
	g.at, g.watched, done = onCPU, standIn, func() {}
	versions := map[string]string{}
	if device != "cpu" {
		var all func() []keysmanager.Device
		if all, done, err = openDevices(device, slog.New(slog.DiscardHandler)); err != nil {
			return nil, fmt.Errorf("bench gpu: --device: %w", err)
		}
		d, err := firstWell(all())
		if err != nil {
			done()
			return nil, exitError{noDevice, fmt.Errorf("bench gpu: --device %s: %w; --device cpu tries all of it without a GPU", device, err)}
		}
		g.at, g.watched = torchDevice{"cuda:0", d.ID, "BF16"}, only(all, d.ID)
		versions["device"] = fmt.Sprintf("%s, %d MB", d.Name, d.Memory/1e6)
	}
	if g.py, err = findTorch(ctx, python, g.at != onCPU); err != nil {
		done()
		return nil, err
	}
	g.report = bench.NewReport("gpu", os.Stderr)
	g.py.tell(g.report)
	for name, version := range versions {
		g.report.With(name, version)
	}
	return done, nil
}

// firstWell returns the first device that may be used.
func firstWell(all []keysmanager.Device) (keysmanager.Device, error) {
	if len(all) == 0 {
		return keysmanager.Device{}, errors.New("NVML shows no GPU on this machine")
	}
	i := slices.IndexFunc(all, func(d keysmanager.Device) bool { return d.Unhealthy == "" })
	if i < 0 {
		return keysmanager.Device{}, fmt.Errorf("no GPU is well: %s: %s", all[0].ID, all[0].Unhealthy)
	}
	return all[i], nil
}

// standIn is what the KeysManager takes for a device where stages compute on the CPU, as its name says to CUDA and to them.
func standIn() []keysmanager.Device {
	return []keysmanager.Device{{ID: onCPU.id, Name: "CPU", Memory: memAvailable(), Utilisation: -1}}
}

// only leaves one of the devices.
func only(all func() []keysmanager.Device, id string) func() []keysmanager.Device {
	return func() []keysmanager.Device {
		return slices.DeleteFunc(all(), func(d keysmanager.Device) bool { return d.ID != id })
	}
}

// measure measures all of it. What fails keeps nothing else from being measured: a machine with a GPU may not be at hand again soon.
func (g *gpuBench) measure(ctx context.Context) error {
	failed := []error{g.limits(ctx)}
	for _, size := range g.sizes {
		if ctx.Err() != nil {
			break
		}
		if err := g.size(ctx, size); err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", size.name, err))
		}
	}
	return errors.Join(append(failed, ctx.Err())...)
}

// gpuGoals compares figures with what is wanted of them.
func gpuGoals(r *bench.Report, sizes []gpuSize) []bench.Goal {
	var out []bench.Goal
	goal := func(what, name, metric string, most bool, want float64) {
		i := slices.IndexFunc(r.Results, func(f bench.Result) bool { return f.Case == name && f.Metric == metric })
		if i < 0 {
			return
		}
		got, sign := r.Results[i].Value, "at least"
		met := got >= want
		if most {
			sign, met = "at most", got <= want
		}
		out = append(out, bench.Goal{Goal: fmt.Sprintf("%s: %s %g", what, sign, want), Figure: got, Met: met})
	}
	for _, s := range sizes {
		goal(s.name+": parameters to the device, share of what a pinned copy does", s.name+"_ring", "share_of_pinned", false, 0.8)
	}
	const largest = "5.4G"
	for _, p := range []struct {
		path string
		most float64
	}{{"fork", 1000}, {"parked", 300}, {"resident", 300}} {
		goal(largest+" "+p.path+": ms from order to first output", largest+"_"+p.path, "first_output_p50_ms", true, p.most)
	}
	for _, s := range sizes {
		for _, path := range []string{"fork", "parked", "resident"} {
			goal(s.name+" "+path+": times as fast as torch.load by hand", s.name+"_"+path, "speedup_over_plain", false, 5)
		}
	}
	return out
}
