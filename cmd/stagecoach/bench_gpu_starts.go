package main

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
)

//go:embed bench_device.py
var devicePython []byte

// ask runs a verb of bench_device.py in a process that sees the device alone.
func (g *gpuBench) ask(ctx context.Context, dir string, out any, args ...string) error {
	script := filepath.Join(dir, "device.py")
	if err := os.WriteFile(script, devicePython, 0o600); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, g.py.Program, append([]string{script}, args...)...)
	cmd.Env = append(os.Environ(), "CUDA_VISIBLE_DEVICES="+g.at.id, "PYTHONDONTWRITEBYTECODE=1")
	cmd.Stderr, cmd.WaitDelay = os.Stderr, 5*time.Second
	said, err := cmd.Output()
	if err == nil {
		err = json.Unmarshal(said, out)
	}
	if err != nil {
		return fmt.Errorf("bench_device.py %q: %w: %.200s", args, err, said)
	}
	return nil
}

// limits measures what PyTorch alone does with the device.
func (g *gpuBench) limits(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "stagecoach-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	progress("bench gpu: %s: contexts", g.at.name)
	var made map[string][]float64
	if err := g.ask(ctx, dir, &made, "context", g.at.name); err != nil {
		return err
	}
	for _, what := range []string{"import", "context", "kernels"} {
		g.report.AddMillis("device", what+"_p50_ms", durations(made[what+"_s"]), 0.5)
		if bytes := made[what+"_bytes"]; g.at != onCPU && len(bytes) > 0 {
			g.report.Add("device", what+"_mb", median(bytes)/1e6, len(bytes))
		}
	}
	const most = 2e9
	size := g.sizes[len(g.sizes)-1].bytes
	for _, s := range g.sizes {
		size = min(most, max(size, s.bytes))
	}
	progress("bench gpu: %s: copies of %d MB", g.at.name, size/1e6)
	var took map[string][]float64
	if err := g.ask(ctx, dir, &took, "copies", g.at.name, strconv.FormatInt(size, 10)); err != nil {
		return err
	}
	for streams, seconds := range took {
		rate := float64(size) / 1e9 / median(seconds)
		g.report.Add("device", "pinned_"+streams+"_streams_gb_per_s", rate, len(seconds))
		g.pinned = max(g.pinned, rate)
	}
	return nil
}

// size measures a stage of a size.
func (g *gpuBench) size(ctx context.Context, s gpuSize) error {
	progress("bench gpu: %s: generating weights", s.name)
	b, err := newTorchStage(ctx, g.py, s.bytes, g.at)
	if err != nil {
		return err
	}
	defer b.close()
	failed := []error{g.ring(ctx, b, s)}
	if err := b.open(keysmanager.Config{Devices: g.watched}); err != nil {
		return errors.Join(append(failed, err)...)
	}
	var plain time.Duration
	var first *startSamples
	for _, p := range g.paths(b, s) {
		if ctx.Err() != nil {
			break
		}
		name, samples := s.name+"_"+p.name, &startSamples{}
		progress("bench gpu: %s", name)
		if err := p.measure(ctx, g.often, samples); err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", p.name, err))
		}
		p50, ok := bench.Quantile(samples.first, 0.5)
		if !ok {
			continue
		}
		samples.report(g.report, name)
		g.report.AddMillis(name, "load_p50_ms", samples.load, 0.5)
		g.report.AddMillis(name, "place_p50_ms", samples.place, 0.5)
		if first == nil {
			plain, first = p50, samples // by hand
			continue
		}
		g.report.Add(name, "speedup_over_plain", float64(plain)/float64(p50), len(first.first))
		if other := samples.unlike(first); len(other) > 0 { // kernels may add up in another order
			progress("bench gpu: %s answers %q, and by hand %q", name, other, first.said)
			g.report.Add(name, "other_answers", float64(len(other)), len(samples.said))
		}
	}
	return errors.Join(failed...)
}

// ring measures how fast a stage's parameters get to the device.
func (g *gpuBench) ring(ctx context.Context, b *benchStage, s gpuSize) error {
	progress("bench gpu: %s: parameters to the device", s.name)
	model := filepath.Join(b.root, "model.safetensors")
	info, err := os.Stat(model)
	if err != nil {
		return err
	}
	var took struct{ Seconds []float64 }
	if err := g.ask(ctx, b.dir, &took, "ring", g.at.name, b.root, model); err != nil {
		return err
	}
	if g.at == onCPU || g.pinned == 0 {
		return nil // they stay where they are; or nothing is known to compare with
	}
	rate := float64(info.Size()) / 1e9 / median(took.Seconds)
	g.report.Add(s.name+"_ring", "gb_per_s", rate, len(took.Seconds))
	g.report.Add(s.name+"_ring", "share_of_pinned", rate/g.pinned, len(took.Seconds))
	return nil
}

// gpuPath is a way to start a replica on the device.
type gpuPath struct {
	name  string
	path  string // of the KeysManager, that it has to take; empty: it is not the KeysManager's
	start starter
	slow  bool
	ready func(ctx context.Context) error // waits until the next start is one on that path; nil: it is one
}

// paths are the ways to start a stage, each of a function of its own. By hand is the first: what the others are compared with.
func (g *gpuBench) paths(b *benchStage, s gpuSize) []gpuPath {
	spec := func(name, start string) keysmanager.Spec {
		out := b.spec(start)
		out.Function, out.Devices, out.DeviceMemory = name+"."+benchNamespace, 1, s.bytes+s.bytes/8+1<<30
		return out
	}
	ordered := func(spec keysmanager.Spec) starter {
		return func(ctx context.Context) (started, error) {
			return b.start(ctx, func(ctx context.Context) (launched, error) {
				return b.order(ctx, keysmanager.Order{Spec: spec, Device: g.at.id})
			})
		}
	}
	parked, resident := spec("parked", "auto"), spec("resident", "auto")
	resident.Worker = "bench"
	return []gpuPath{
		{name: "plain", start: b.others["plain"], slow: true},
		{name: "fork", path: keysmanager.PathFork, start: ordered(spec("fork", "fork"))},
		{name: "cold", path: keysmanager.PathCold, start: ordered(spec("cold", "cold")), slow: true},
		{name: "resident", path: keysmanager.PathResident, start: ordered(resident)},
		{name: "parked", path: keysmanager.PathParked, start: ordered(parked), ready: func(ctx context.Context) error { return b.park(ctx, parked) }},
	}
}

// park has a child of a function parked.
func (b *benchStage) park(ctx context.Context, spec keysmanager.Spec) error {
	const most = time.Minute
	for began := time.Now(); time.Since(began) < most; {
		if err := b.keys.Warm(ctx, []keysmanager.Wanted{{Spec: spec, Key: true}}); err != nil {
			return err
		}
		for _, d := range b.keys.Inventory().Devices {
			if len(d.ParkedFor) > 0 {
				return nil
			}
		}
		select {
		case <-time.After(200 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return fmt.Errorf("no child is parked after %v", most)
}

// measure starts replicas, one after the other. The first, which loads what the others share, is not counted.
func (p gpuPath) measure(ctx context.Context, often int, samples *startSamples) error {
	if p.slow {
		often = max(2, often/2)
	}
	for i := range 1 + often {
		if p.ready != nil {
			if err := p.ready(ctx); err != nil {
				return err
			}
		}
		r, err := p.start(ctx)
		if err != nil {
			return err
		}
		r.end()
		if r.path != p.path {
			return fmt.Errorf("start %d took path %q, want %q", i+1, r.path, p.path)
		}
		if i > 0 {
			samples.add(r)
		}
	}
	return nil
}

// median returns the median of figures of which there is at least one: of an even number, the mean of the two in the middle.
func median(of []float64) float64 {
	sorted := slices.Sorted(slices.Values(of))
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}

func durations(seconds []float64) []time.Duration {
	var out []time.Duration
	for _, s := range seconds {
		out = append(out, time.Duration(s*1e9))
	}
	return out
}
