package gpu

import (
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/bench/starts"
)

//go:embed device.py
var devicePython []byte

// ask runs a verb of device.py in a process that sees the device alone.
func (g *gpuBench) ask(ctx context.Context, out any, args ...string) error {
	dir, err := os.MkdirTemp("", "stagecoach-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	script := filepath.Join(dir, "device.py")
	if err := os.WriteFile(script, devicePython, 0o600); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, g.py.Program, append([]string{script}, args...)...)
	cmd.Env = append(os.Environ(), "CUDA_VISIBLE_DEVICES="+g.at.ID, "PYTHONDONTWRITEBYTECODE=1")
	cmd.Stderr, cmd.WaitDelay = os.Stderr, 5*time.Second
	said, err := cmd.Output()
	if err == nil {
		err = json.Unmarshal(said, out)
	}
	if err != nil {
		return fmt.Errorf("device.py %q: %w: %.200s", args, err, said)
	}
	return nil
}

// contexts measures how long a process takes to make a context and run its first kernels. Later
// estimates are based on that time.
func (g *gpuBench) contexts(ctx context.Context) error {
	var made map[string][]float64
	if err := g.ask(ctx, &made, "context", g.at.Name); err != nil {
		return err
	}
	start := 0.0
	for _, what := range []string{"import", "context", "kernels"} {
		g.report.AddMillis("device", what+"_p50_ms", durations(made[what+"_s"]), 0.5)
		start += slices.Max(made[what+"_s"])
		if bytes := made[what+"_bytes"]; g.at.onGPU() && len(bytes) > 0 {
			g.report.Add("device", what+"_device_mb", bench.Median(bytes)/1e6, len(bytes))
		}
	}
	g.times.start = 2 * starts.Seconds(start) // the KeysManager and the handler take time, too
	return nil
}

// pinnedStreams are the numbers of streams that pinned copies are measured with.
var pinnedStreams = []string{"1", "2", "4"}

// pinnedCopy measures the bandwidth of the bus, with copies of s.bytes bytes from pinned memory.
func (g *gpuBench) pinnedCopy(ctx context.Context, s gpuSize) error {
	var took map[string][]float64
	if err := g.ask(ctx, &took, "copies", g.at.Name, strconv.FormatInt(s.bytes, 10)); err != nil {
		return err
	}
	for _, streams := range pinnedStreams {
		if len(took[streams]) == 0 {
			continue // the CPU has no pinned copies
		}
		name, half := s.name+"_pinned_"+streams+"_streams", bench.Median(took[streams])
		g.report.Add(name, "copy_p50_ms", half*1e3, len(took[streams]))
		g.report.Add(name, "copy_gb_per_s", float64(s.bytes)/1e9/half, len(took[streams]))
	}
	return nil
}

// ring measures how fast a stage's parameters are copied from the mapped file to the device.
func (g *gpuBench) ring(ctx context.Context, b *starts.Stage, s gpuSize) error {
	model := filepath.Join(b.Root, modelFile)
	info, err := os.Stat(model)
	if err != nil {
		return err
	}
	var took struct{ Seconds []float64 }
	if err := g.ask(ctx, &took, "ring", g.at.Name, b.Root, model); err != nil {
		return err
	}
	g.copied(s, s.name+"_ring", float64(info.Size()), bench.Median(took.Seconds), len(took.Seconds))
	return nil
}

// copied reports the speed of a copy, also as a share of the speed of a pinned copy. On the CPU
// there is no copy.
func (g *gpuBench) copied(s gpuSize, name string, bytes, took float64, n int) {
	if took <= 0 || !g.at.onGPU() {
		return
	}
	rate := bytes / 1e9 / took
	g.report.Add(name, "copy_gb_per_s", rate, n)
	if pinned := g.pinned(s); pinned > 0 {
		g.report.Add(name, "share_of_pinned", rate/pinned, n)
	}
}

// onGPU reports whether the device is a GPU. If it is, parameters are copied to it, and it has its
// own memory.
func (d gpuDevice) onGPU() bool { return d.Device != starts.OnCPU }

func durations(all []float64) []time.Duration {
	var out []time.Duration
	for _, s := range all {
		out = append(out, starts.Seconds(s))
	}
	return out
}
