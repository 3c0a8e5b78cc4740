package gpu

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/bench/starts"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
)

// gpuSaid collects what replicas print about the parts of their start on a device.
type gpuSaid struct {
	mu    sync.Mutex
	parts map[string]chan starts.DeviceParts // by replica
}

// expect returns a channel that gets the parts of a replica's start. Call it before ordering the
// replica.
func (s *gpuSaid) expect(replica string) <-chan starts.DeviceParts {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := make(chan starts.DeviceParts, 1)
	s.parts[replica] = c
	return c
}

// told reads a line of a replica. Lines that nobody expects are passed on to the user.
func (s *gpuSaid) told(replica, line string) {
	p, ok := deviceLine(line)
	if !ok {
		console.Progress("%s: %s", replica, line)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.parts[replica]; c != nil {
		c <- p // a replica has only one such line
		delete(s.parts, replica)
	}
}

// footprint is used memory, in bytes.
type footprint struct {
	device int64 // by all programs
	host   int64 // by the replicas and what they fork from, as proportional set sizes
}

// memory measures the memory in use while replicas live.
func (w *gpuWay) memory(ctx context.Context, live []starts.Started) (f footprint, err error) {
	d, err := w.g.at.look(ctx)
	if err != nil {
		return f, err
	}
	f.device = d.Used
	pids := map[int]bool{}
	if w.path != "" {
		for _, z := range w.b.Keys.Inventory().Zygotes {
			if z.PID == 0 {
				continue
			}
			for _, pid := range starts.Family(z.PID) {
				pids[pid] = true
			}
		}
	}
	for _, r := range live {
		if w.path != keysmanager.PathResident { // a resident replica is a thread
			pids[r.PID] = true
		}
	}
	f.host, _, err = starts.SharedMemory(slices.Sorted(maps.Keys(pids)))
	if err != nil {
		console.Progress("bench gpu: %s: memory of processes: %v", w.cell, err)
		f.host, err = -1, nil // a replica has ended, or the kernel does not tell: the figure is left out
	}
	return f, err
}

// gpuSamples has the figures of several starts on a path.
type gpuSamples struct {
	starts.Samples
	way    *gpuWay
	suffix string // of the case
	parts  []starts.DeviceParts
	paths  map[string]int // number of starts by path
}

func (s *gpuSamples) add(r starts.Started) {
	s.Samples.Add(r)
	s.parts = append(s.parts, r.Parts)
	if s.paths == nil {
		s.paths = map[string]int{}
	}
	s.paths[r.Path]++
}

// memory reports the memory that each of n replicas takes.
func (s *gpuSamples) memory(before, after footprint, n int) {
	name := s.way.cell + s.suffix
	if s.way.g.at.onGPU() && after.device > 0 { // otherwise the used memory is unknown
		s.way.g.report.Add(name, "device_mb_per_replica", float64(after.device-before.device)/float64(n)/1e6, n)
	}
	if before.host >= 0 && after.host >= 0 {
		s.way.g.report.Add(name, "host_mb_per_replica", float64(after.host-before.host)/float64(n)/1e6, n)
	}
}

// report adds the figures of the starts to the report.
func (s *gpuSamples) report() {
	g, size, name := s.way.g, s.way.s, s.way.cell+s.suffix
	p50, ok := bench.Quantile(s.First, 0.5)
	if !ok {
		return
	}
	s.Samples.Report(g.report, name)
	g.report.AddMillis(name, "load_p50_ms", s.Load, 0.5)
	g.report.AddMillis(name, "place_p50_ms", s.Place, 0.5)
	var after []time.Duration // from hello to the first output
	for i := range s.Hello {
		after = append(after, s.First[i]-s.Hello[i])
	}
	g.report.AddMillis(name, "first_call_p50_ms", after, 0.5)
	copied := s.partsReport(g.report, name)
	if together := s.suffix != ""; together {
		g.report.Add(name, "first_output_last_ms", float64(slices.Max(s.First))/1e6, len(s.First))
		if len(copied) > 0 { // all bytes in the time of the slowest copy
			g.copied(size, name, float64(size.bytes)*float64(len(copied)), slices.Max(copied), len(copied))
		}
	} else if len(copied) > 0 {
		g.copied(size, name, float64(size.bytes), bench.Median(copied), len(copied))
	}
	if s.paths[s.way.path] < len(s.First) {
		var took []string
		for _, path := range slices.Sorted(maps.Keys(s.paths)) {
			took = append(took, fmt.Sprintf("%d %s", s.paths[path], path))
		}
		g.report.Note(name, "paths: "+strings.Join(took, ", "))
	}
	if s.way.name == "plain" {
		if s.suffix == "" {
			g.answers[size.name] = s.Said[0]
		}
		return
	}
	if pinned := g.pinned(size); pinned > 0 && g.at.onGPU() && s.suffix == "" {
		g.report.Add(name, "beyond_pinned_p50_ms", float64(p50)/1e6-float64(size.bytes)/1e6/pinned, len(s.First))
	}
	if plain := g.figure(size.name+"_plain", "first_output_p50_ms"); plain > 0 && s.suffix == "" {
		g.report.Add(name, "speedup_over_plain", plain/(float64(p50)/1e6), len(s.First))
	}
	// The answer is unknown if an earlier run measured it.
	if answer, known := g.answers[size.name]; known && s.suffix == "" {
		by := &starts.Samples{Said: []string{answer}}
		if other := s.Unlike(by); len(other) > 0 { // kernels may add numbers in another order
			g.report.Note(name, fmt.Sprintf("%d of %d answers are %q, and by hand %q", len(other), len(s.Said), other, by.Said))
		}
	}
}

// partsReport adds the times of the parts of starts on the device, and returns the seconds of the
// copies.
func (s *gpuSamples) partsReport(r *bench.Report, name string) (copied []float64) {
	for _, part := range []struct {
		metric string
		of     func(starts.DeviceParts) time.Duration
	}{
		{"import", func(p starts.DeviceParts) time.Duration { return p.Imports }},
		{"context", func(p starts.DeviceParts) time.Duration { return p.Context }},
		{"copy", func(p starts.DeviceParts) time.Duration { return p.Copied }},
		{"kernels", func(p starts.DeviceParts) time.Duration { return p.Kernels }},
	} {
		var took []time.Duration
		for _, p := range s.parts {
			if d := part.of(p); d > 0 {
				took = append(took, d)
				if part.metric == "copy" {
					copied = append(copied, d.Seconds())
				}
			}
		}
		r.AddMillis(name, part.metric+"_p50_ms", took, 0.5)
	}
	return copied
}
