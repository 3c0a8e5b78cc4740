package baseline

import (
	"fmt"
	"math"
	"slices"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// This file reads snapshots for the policies of papers. The papers' authors measure service times
// in a profile before a run. Here, service times come from Function.Profile, or from recent
// measurements if a function has no profile.

// functions returns the functions of a domain.
func functions(s *plan.Snapshot, d plan.Domain) ([]*plan.Function, error) {
	out := make([]*plan.Function, len(d.Functions))
	finder := s.Finder()
	for i, name := range d.Functions {
		f, ok := finder.Function(name)
		if !ok {
			return nil, fmt.Errorf("function %q of the domain: not in snapshot %d, want domains of the same snapshot", name, s.Rev)
		}
		out[i] = f
	}
	return out, nil
}

// arriving returns how many tasks arrive at f per second. It returns 0 if there are none, or if the
// rate is unknown.
func arriving(f *plan.Function) float64 {
	if f.Demand.Known && f.Demand.Rate > 0 { // not NaN
		return min(f.Demand.Rate, math.MaxInt32)
	}
	return 0
}

// batchTime returns the mean time in seconds of a batch of the given size, with the CPU that f
// declares. It returns 0 if nothing is known. Between measured sizes, it interpolates. For smaller
// and larger sizes, it uses the time per call of the nearest measured size.
func batchTime(f *plan.Function, size int) float64 {
	known := measured(f)
	if len(known) == 0 {
		if f.Service.Known && f.Service.Mean > 0 {
			return f.Service.Mean.Seconds() * float64(size)
		}
		return 0
	}
	i, _ := slices.BinarySearchFunc(known, size, func(b plan.Batched, size int) int { return b.Size - size })
	if i == 0 || i == len(known) {
		b := known[min(i, len(known)-1)]
		return b.Mean.Seconds() / float64(b.Size) * float64(size)
	}
	a, b := known[i-1], known[i]
	return a.Mean.Seconds() + (b.Mean-a.Mean).Seconds()*float64(size-a.Size)/float64(b.Size-a.Size)
}

// measured returns the mean times of batches, sorted by size. They come from f's profile, at the
// quota nearest to f's CPU limit, or at the largest quota if f has no limit. Without a profile,
// they are the recent measurements.
func measured(f *plan.Function) []plan.Batched {
	quota, off := 0, math.Inf(1)
	for _, p := range f.Profile {
		d := math.Abs(float64(p.CPUMilli) - float64(f.CPULimit))
		if f.CPULimit <= 0 {
			d = -float64(p.CPUMilli)
		}
		if p.CPUMilli > 0 && p.Mean > 0 && d < off {
			quota, off = p.CPUMilli, d
		}
	}
	var out []plan.Batched
	for _, p := range f.Profile {
		if p.CPUMilli == quota && p.Mean > 0 && p.Batch > 0 && p.Length == f.Profile[0].Length {
			out = append(out, plan.Batched{Size: p.Batch, Mean: p.Mean, N: p.N})
		}
	}
	if len(out) == 0 {
		for _, b := range f.Service.Batches {
			if b.Size > 0 && b.Mean > 0 {
				out = append(out, b)
			}
		}
	}
	return out
}

// objectives returns for each function the longest time that a task may spend there, in seconds,
// its wait included. A pipeline's objective is split among its stages in proportion to their
// service times. A function in several pipelines gets the smallest of its parts. A function without
// an objective gets twice its service time. 0 means that the service time is unknown.
func objectives(s *plan.Snapshot, d plan.Domain, functions []*plan.Function) []float64 {
	out := make([]float64, len(functions))
	for _, name := range d.Pipelines {
		p, ok := s.Pipeline(name)
		if !ok || p.SLO <= 0 {
			continue
		}
		var sum float64
		for _, stage := range p.Stages {
			if i, ok := slices.BinarySearch(d.Functions, stage); ok {
				sum += batchTime(functions[i], 1)
			}
		}
		for _, stage := range p.Stages {
			if i, ok := slices.BinarySearch(d.Functions, stage); ok && sum > 0 {
				if part := p.SLO.Seconds() * batchTime(functions[i], 1) / sum; out[i] == 0 || part < out[i] {
					out[i] = part
				}
			}
		}
	}
	for i, f := range functions {
		if out[i] == 0 {
			out[i] = 2 * batchTime(f, 1)
		}
	}
	return out
}

// entry is a function whose tasks are a pipeline's requests. They arrive at the pipeline's other
// stages later.
type entry struct {
	of     int   // index in the domain's functions
	stages []int // all stages of its pipeline, each once
}

// entries returns the entries of a domain's pipelines, and the functions that are in no pipeline.
func entries(s *plan.Snapshot, d plan.Domain) (out []entry) {
	in := make([]bool, len(d.Functions))
	for _, name := range d.Pipelines {
		p, ok := s.Pipeline(name)
		if !ok {
			continue
		}
		e := entry{of: -1}
		for _, stage := range p.Stages {
			i, ok := slices.BinarySearch(d.Functions, stage)
			if !ok || slices.Contains(e.stages, i) {
				continue
			}
			if e.of < 0 {
				e.of = i
			}
			e.stages, in[i] = append(e.stages, i), true
		}
		if e.of >= 0 {
			out = append(out, e)
		}
	}
	for i := range in {
		if !in[i] {
			out = append(out, entry{i, []int{i}})
		}
	}
	return out
}

// ceil rounds n up, except for a rounding error of arithmetic.
func ceil(n float64) int {
	if !(n < math.MaxInt32) {
		return math.MaxInt32
	}
	return int(math.Ceil(max(n, 0) - 1e-9))
}

// bounded keeps a count within f's bounds. A function may sleep only if nothing waits or runs and
// its idle time has passed.
func bounded(s *plan.Snapshot, f *plan.Function, count int) int {
	least, most := f.Bounds()
	if busy := f.Waiting > 0 || f.Running > 0; busy || s.At.Sub(f.Demand.Last) < f.ZeroAge {
		least = max(least, 1)
	}
	return min(max(count, least), most)
}
