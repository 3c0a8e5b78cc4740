package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
)

// startSize is a synthetic stage to be started. How often is that of the fast paths; a slow one is started a fifth as often.
type startSize struct {
	kind  *startKind
	size  string
	bytes int64
	often int
	alive []int // how many replicas are alive when their memory is measured
}

// startKind is what stages compute with.
type startKind struct {
	name  string
	stage func(ctx context.Context, bytes int64) (*benchStage, error)
	cases []startCase
}

func onnxCases() []startCase {
	return []startCase{
		{name: "fork", path: "fork", shares: true},
		{name: "forkheap", path: "heap", shares: true},
		{name: "map", path: "map", shares: true, slow: true},
		{name: "cold", path: "cold", slow: true},
		{name: "coldprepacked", slow: true, full: true},
		{name: "colddisk", slow: true, full: true},
	}
}

func torchCases() []startCase {
	return []startCase{
		{name: "fork", path: "fork", shares: true},
		{name: "cold", path: "cold", slow: true},
		{name: "plain", slow: true}, // torch.load by hand, without Stagecoach
	}
}

// coldstart is what the flags say.
type coldstart struct {
	machine                    machine
	images, ort, python, match string
	full                       bool
}

// benchColdstart measures order → hello and → first output of replicas of synthetic stages in ONNX and PyTorch, on each
// start path, and of a program that speaks HTTP, in each kind of network. It also measures what each of several live ones
// adds to the memory, and how often one zygote forks.
func benchColdstart(ctx context.Context, m machine, args []string, out io.Writer) error {
	c := coldstart{machine: m}
	fs := flag.NewFlagSet("bench coldstart", flag.ContinueOnError)
	asJSON, images := reportFlags(fs)
	fs.StringVar(&c.ort, "ort", "build/ort/libonnxruntime.so.1", "ONNX Runtime's shared library")
	fs.StringVar(&c.python, "python", "", "interpreter with PyTorch; default: python3, or else /usr/bin/python3")
	fs.StringVar(&c.match, "match", "", "only stages whose name begins so, such as http, torch or onnx_1GB")
	fs.BoolVar(&c.full, "full", false, "4 GB too, more cases and more starts; takes about half an hour, 20 GB of memory and 16 GB of disk")
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	c.images = *images
	report := bench.NewReport("coldstart", os.Stderr)
	sizes, err := c.sizes(ctx, report)
	if err != nil {
		return err
	}
	var failed error
	for _, size := range sizes {
		if err := size.measure(ctx, report); err != nil {
			failed = fmt.Errorf("%s: %w", size.name(), err)
			break
		}
	}
	return errors.Join(failed, printReport(report, *asJSON, out)) // what was measured is not lost
}

// sizes are the stages to be measured. Those in PyTorch are passed over where no interpreter has it, unless one was named.
func (c coldstart) sizes(ctx context.Context, report *bench.Report) (out []startSize, err error) {
	ofONNX := &startKind{"onnx", func(_ context.Context, bytes int64) (*benchStage, error) {
		return newONNXStage(c.machine, bytes, c.images, c.ort)
	}, onnxCases()}
	ofTorch := &startKind{"torch", nil, torchCases()}
	ofHTTP := &startKind{"http", func(context.Context, int64) (*benchStage, error) { return newHTTPStage(c.machine, c.images) }, httpCases()}
	out = []startSize{
		{ofHTTP, "echo", 0, 40, nil},
		{ofONNX, "100MB", 100 << 20, 20, []int{8}},
		{ofONNX, "1GB", 1 << 30, 20, []int{8}},
		{ofTorch, "100MB", 100e6, 20, []int{8}},
		{ofTorch, "1GB", 1e9, 20, []int{8}},
	}
	if c.full {
		some := []int{1, 8, 32}
		out = []startSize{
			{ofHTTP, "echo", 0, 200, nil},
			{ofONNX, "100MB", 100 << 20, 200, some},
			{ofONNX, "1GB", 1 << 30, 100, some},
			{ofONNX, "4GB", 4 << 30, 30, some},
			{ofTorch, "100MB", 100e6, 100, some},
			{ofTorch, "1GB", 1e9, 50, some},
		}
	}
	for _, k := range []*startKind{ofONNX, ofTorch} {
		k.cases = slices.DeleteFunc(k.cases, func(s startCase) bool { return s.full && !c.full })
	}
	out = slices.DeleteFunc(out, func(s startSize) bool { return !strings.HasPrefix(s.name(), c.match) })
	if len(out) == 0 {
		return nil, fmt.Errorf("bench coldstart: --match %q: no stage's name begins so, want http, torch, onnx_1GB, …", c.match)
	}
	if !slices.ContainsFunc(out, func(s startSize) bool { return s.kind == ofTorch }) {
		return out, nil
	}
	py, err := findTorch(ctx, c.python, false)
	if err != nil && c.python == "" && c.match == "" {
		console.Progress("bench coldstart: no stages in PyTorch: %v", err)
		return slices.DeleteFunc(out, func(s startSize) bool { return s.kind == ofTorch }), nil
	}
	if err == nil {
		py.tell(report)
	}
	ofTorch.stage = func(ctx context.Context, bytes int64) (*benchStage, error) {
		return newTorchStage(ctx, c.machine, py, bytes, onCPU)
	}
	return out, err
}

func (s startSize) name() string { return s.kind.name + "_" + s.size }

func (s startSize) measure(ctx context.Context, report *bench.Report) error {
	cases := s.kind.cases
	console.Progress("bench coldstart: %s: generating weights", s.name())
	b, err := s.kind.stage(ctx, s.bytes)
	if err != nil {
		return err
	}
	defer b.close()
	if err := b.manage(); err != nil {
		return err
	}
	// What all paths keep in memory at once is about nine times the weights; with less, they are measured one after the other.
	groups := [][]startCase{cases}
	if available := memAvailable(); 10*s.bytes > available {
		console.Progress("bench coldstart: %s: %d MB of memory are not enough to take turns, so the cases follow one another", s.name(), available>>20)
		groups = nil
		for _, c := range cases {
			groups = append(groups, []startCase{c})
		}
	}
	samples := map[string]*startSamples{}
	for _, c := range cases {
		samples[c.name] = &startSamples{}
	}
	for _, g := range groups {
		if err := s.group(ctx, report, b, g, samples); err != nil {
			return err
		}
	}
	for _, c := range cases {
		samples[c.name].report(report, s.name()+"_"+c.name)
	}
	for _, c := range cases {
		if other := samples[c.name].unlike(samples[cases[0].name]); len(other) > 0 {
			return fmt.Errorf("%s answers %q, and %s %q", c.name, other, cases[0].name, samples[cases[0].name].said)
		}
	}
	slow := samples["cold"]
	if slow == nil {
		return nil
	}
	cold, ok := bench.Quantile(slow.first, 0.5)
	for _, c := range cases {
		if p50, has := bench.Quantile(samples[c.name].first, 0.5); ok && has && c.name != "cold" {
			report.Add(s.name()+"_"+c.name, "speedup_over_cold", float64(cold)/float64(p50), len(slow.first))
		}
	}
	return nil
}

// group measures cases in turns, then their memory, and frees it.
func (s startSize) group(ctx context.Context, report *bench.Report, b *benchStage, cases []startCase, samples map[string]*startSamples) error {
	for _, c := range cases {
		console.Progress("bench coldstart: %s_%s: the first start, which loads what the others share", s.name(), c.name)
		r, err := b.way(c)(ctx) // colddisk included: the disk's own cache is as warm for the first as for the others
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		r.end()
	}
	for i := range s.often {
		for _, c := range cases {
			if c.slow && i%5 != 0 {
				continue
			}
			r, err := b.way(c)(ctx)
			if err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
			samples[c.name].add(r)
			r.end()
		}
		if (i+1)%10 == 0 {
			console.Progress("bench coldstart: %s: %d of %d rounds", s.name(), i+1, s.often)
		}
	}
	for _, c := range cases {
		if !c.shares {
			continue
		}
		if err := s.memory(ctx, report, b, c); err != nil {
			return fmt.Errorf("%s: memory: %w", c.name, err)
		}
		if c.path == "fork" {
			forks := min(200, 10*s.often)
			rate, err := b.forksPerSecond(ctx, forks)
			if err != nil {
				return err
			}
			report.Add(s.name()+"_fork", "forks_per_second", rate, forks)
		}
	}
	for _, c := range cases {
		if c.shares {
			if _, err := b.keys.Evict(ctx, b.spec(c.path).Function); err != nil {
				return err
			}
		}
	}
	return nil
}

// memory measures what each of several live replicas adds: (ΣPSS of what they share and they − PSS of what they share alone) /
// replicas, and what it is all together.
func (s startSize) memory(ctx context.Context, report *bench.Report, b *benchStage, c startCase) error {
	all := b.keys.Inventory().Zygotes
	i := slices.IndexFunc(all, func(z keysmanager.ZygoteInfo) bool { return z.Function == b.spec(c.path).Function })
	if i < 0 {
		return fmt.Errorf("nothing is kept for it: %+v", all)
	}
	alone, pids := all[i].Bytes, []int(nil)
	if pid := all[i].PID; pid != 0 {
		var err error
		if alone, _, err = sharedMemory(family(pid)); err != nil {
			return err
		}
	}
	live := 0
	for _, n := range s.alive {
		for ; live < n; live++ {
			r, err := b.way(c)(ctx)
			if err != nil {
				return err
			}
			defer r.end()
			pids = append(pids, r.pid)
		}
		console.Progress("bench coldstart: %s_%s: memory of %d replicas", s.name(), c.name, n)
		if pid := all[i].PID; pid != 0 {
			pids = family(pid)
		}
		pss, memfds, err := sharedMemory(pids)
		if err != nil {
			return err
		}
		if all[i].PID == 0 {
			pss += alone - memfds // all of it, also what nobody maps
		}
		report.Add(s.name()+"_"+c.name, fmt.Sprintf("extra_per_replica_at_%d_mb", n), float64(pss-alone)/float64(n)/1e6, n)
		report.Add(s.name()+"_"+c.name, fmt.Sprintf("all_at_%d_mb", n), float64(pss)/1e6, n)
	}
	return nil
}
