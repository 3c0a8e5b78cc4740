// Package coldstart measures the time from an order to the first output on each start path.
package coldstart

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
	"github.com/stagecoach-serving/stagecoach/bench/starts"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/keysmanager/container"
)

// Size is a synthetic stage to start. Slow paths are started a fifth as often as the others.
type Size struct {
	Kind  *Kind
	Size  string
	Bytes int64
	Often int
	Alive []int // how many replicas are alive when their memory is measured

	Machine starts.Machine
	// Contained is the machine of a second stage, whose processes are in containers; nil: there is
	// none. The starts of both stages take turns.
	Contained *starts.Machine
}

// way is a case of one of the stages of a Size.
type way struct {
	starts.Case
	b    *starts.Stage
	name string // in the report
}

// suffix ends the names of cases whose processes are in containers.
const suffix = "_" + containerd

// ways returns the cases of a stage with names that end with suffix.
func ways(b *starts.Stage, cases []starts.Case, suffix string) (out []way) {
	for _, c := range cases {
		out = append(out, way{c, b, c.Name + suffix})
	}
	return out
}

// Kind is a kind of stages: what they compute with, and the ways to start them.
type Kind struct {
	Name  string
	Stage func(ctx context.Context, m starts.Machine, bytes int64) (*starts.Stage, error)
	Cases []starts.Case
	// Contained are further ways of stages in containers.
	Contained []starts.Case
}

func onnxCases() []starts.Case {
	return []starts.Case{
		{Name: "fork", Path: "fork", Shares: true},
		{Name: "forkheap", Path: "heap", Shares: true},
		{Name: "map", Path: "map", Shares: true, Slow: true},
		{Name: "cold", Path: "cold", Slow: true},
		{Name: "coldprepacked", Slow: true, Full: true},
		{Name: "colddisk", Slow: true, Full: true},
	}
}

// TorchCases returns the ways to start a stage in PyTorch.
func TorchCases() []starts.Case {
	return []starts.Case{
		{Name: "fork", Path: "fork", Shares: true},
		{Name: "cold", Path: "cold", Slow: true},
		{Name: "plain", Slow: true}, // torch.load by hand, without Stagecoach
	}
}

// The runtimes.
const (
	process    = "process"
	containerd = "containerd"
)

// coldstart has the values of the flags.
type coldstart struct {
	runtime, address, namespace string
	machine                     starts.Machine
	images, ort, python, match  string
	full                        bool
}

// Run measures how long replicas take to start: from their order to the stage's first message
// (hello), and to its first output. It measures synthetic stages in ONNX and PyTorch on each start
// path, and a program that speaks HTTP in each kind of network. It also measures how much memory
// each of several live replicas adds, and how many times per second one zygote forks.
func Run(ctx context.Context, m starts.Machine, args []string, out io.Writer) error {
	c := coldstart{machine: m}
	fs := flag.NewFlagSet("bench coldstart", flag.ContinueOnError)
	asJSON, images := bench.Flags(fs)
	fs.StringVar(&c.ort, "ort", "build/ort/libonnxruntime.so.1", "ONNX Runtime's shared library")
	fs.StringVar(&c.python, "python", "", "interpreter with PyTorch; default: python3, or else /usr/bin/python3")
	fs.StringVar(&c.match, "match", "", "only stages whose name begins so, such as http, torch or onnx_1GB")
	fs.StringVar(&c.runtime, "runtime", process, "process, or containerd to measure both in turns, without cases that no KeysManager starts")
	fs.StringVar(&c.address, "containerd-address", container.Address, "path of containerd's socket")
	fs.StringVar(&c.namespace, "containerd-namespace", container.Namespace, "namespace of containerd for the containers")
	fs.BoolVar(&c.full, "full", false, "4 GB too, more cases and more starts; takes about half an hour, 20 GB of memory and 16 GB of disk")
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	if c.runtime != process && c.runtime != containerd {
		return fmt.Errorf("bench coldstart: --runtime %q, want %s or %s", c.runtime, process, containerd)
	}
	c.images = *images
	report := bench.NewReport("coldstart", os.Stderr)
	sizes, err := c.sizes(ctx, report)
	if err != nil {
		return err
	}
	var failed error
	for _, size := range sizes {
		if err := size.Measure(ctx, report); err != nil {
			failed = fmt.Errorf("%s: %w", size.name(), err)
			break
		}
	}
	// Measured figures are printed also after an error.
	return errors.Join(failed, bench.Print(report, *asJSON, out))
}

// sizes returns the stages to measure. If no interpreter has PyTorch, it leaves out the stages in
// PyTorch. If a flag asks for them, it returns an error instead.
func (c coldstart) sizes(ctx context.Context, report *bench.Report) (out []Size, err error) {
	ofONNX := &Kind{"onnx", func(_ context.Context, m starts.Machine, bytes int64) (*starts.Stage, error) {
		return starts.NewONNXStage(m, bytes, c.images, c.ort)
	}, onnxCases(), nil}
	ofTorch := &Kind{"torch", nil, TorchCases(), nil}
	ofHTTP := &Kind{"http", func(_ context.Context, m starts.Machine, _ int64) (*starts.Stage, error) {
		return starts.NewHTTPStage(m, c.images)
	}, starts.HTTPCases(), []starts.Case{starts.SpareCase}}
	size := func(k *Kind, name string, bytes int64, often int, alive []int) Size {
		s := Size{Kind: k, Size: name, Bytes: bytes, Often: often, Alive: alive, Machine: c.machine}
		if c.runtime == containerd {
			m := c.machine.Contain(c.address, c.namespace)
			s.Contained = &m
		}
		return s
	}
	out = []Size{
		size(ofHTTP, "echo", 0, 40, nil),
		size(ofONNX, "100MB", 100<<20, 20, []int{8}),
		size(ofONNX, "1GB", 1<<30, 20, []int{8}),
		size(ofTorch, "100MB", 100e6, 20, []int{8}),
		size(ofTorch, "1GB", 1e9, 20, []int{8}),
	}
	if c.full {
		some := []int{1, 8, 32}
		out = []Size{
			size(ofHTTP, "echo", 0, 200, nil),
			size(ofONNX, "100MB", 100<<20, 200, some),
			size(ofONNX, "1GB", 1<<30, 100, some),
			size(ofONNX, "4GB", 4<<30, 30, some),
			size(ofTorch, "100MB", 100e6, 100, some),
			size(ofTorch, "1GB", 1e9, 50, some),
		}
	}
	if c.runtime == containerd {
		for _, k := range []*Kind{ofONNX, ofTorch} {
			k.Cases = slices.DeleteFunc(k.Cases, func(s starts.Case) bool { return s.Path == "" })
		}
	}
	for _, k := range []*Kind{ofONNX, ofTorch} {
		k.Cases = slices.DeleteFunc(k.Cases, func(s starts.Case) bool { return s.Full && !c.full })
	}
	out = slices.DeleteFunc(out, func(s Size) bool { return !strings.HasPrefix(s.name(), c.match) })
	if len(out) == 0 {
		return nil, fmt.Errorf("bench coldstart: --match %q: no stage's name begins so, want http, torch, onnx_1GB, …", c.match)
	}
	if !slices.ContainsFunc(out, func(s Size) bool { return s.Kind == ofTorch }) {
		return out, nil
	}
	py, err := starts.FindTorch(ctx, c.python, false)
	if err != nil && c.python == "" && c.match == "" {
		console.Progress("bench coldstart: no stages in PyTorch: %v", err)
		return slices.DeleteFunc(out, func(s Size) bool { return s.Kind == ofTorch }), nil
	}
	if err == nil {
		py.Tell(report)
	}
	ofTorch.Stage = func(ctx context.Context, m starts.Machine, bytes int64) (*starts.Stage, error) {
		return starts.NewTorchStage(ctx, m, py, bytes, starts.OnCPU)
	}
	return out, err
}

func (s Size) name() string { return s.Kind.Name + "_" + s.Size }

// Measure measures all cases of a size, and adds their figures to the report.
func (s Size) Measure(ctx context.Context, report *bench.Report) error {
	console.Progress("bench coldstart: %s: generating weights", s.name())
	b, err := s.Kind.Stage(ctx, s.Machine, s.Bytes)
	if err != nil {
		return err
	}
	defer b.Close()
	if err := b.Manage(); err != nil {
		return err
	}
	all := ways(b, s.Kind.Cases, "")
	if s.Contained != nil {
		other, err := s.Kind.Stage(ctx, *s.Contained, s.Bytes)
		if err != nil {
			return err
		}
		defer other.Close()
		if err := other.Manage(); err != nil {
			return err
		}
		all = append(all, ways(other, slices.Concat(s.Kind.Cases, s.Kind.Contained), suffix)...)
	}
	// All paths together keep about nine times the weights in memory. If that does not fit, the paths
	// are measured one after the other.
	groups := [][]way{all}
	if available := starts.MemAvailable(); 10*s.Bytes > available {
		console.Progress("bench coldstart: %s: %d MB of memory are not enough to take turns, so the cases follow one another", s.name(), available>>20)
		groups = nil
		for _, c := range all {
			groups = append(groups, []way{c})
		}
	}
	samples := map[string]*starts.Samples{}
	for _, c := range all {
		samples[c.name] = &starts.Samples{}
	}
	for _, g := range groups {
		if err := s.group(ctx, report, g, samples); err != nil {
			return err
		}
	}
	for _, c := range all {
		samples[c.name].Report(report, s.name()+"_"+c.name)
	}
	for _, c := range all {
		if other := samples[c.name].Unlike(samples[all[0].name]); len(other) > 0 {
			return fmt.Errorf("%s answers %q, and %s %q", c.name, other, all[0].name, samples[all[0].name].Said)
		}
	}
	slow := samples["cold"]
	if slow == nil {
		return nil
	}
	cold, ok := bench.Quantile(slow.First, 0.5)
	for _, c := range all {
		if p50, has := bench.Quantile(samples[c.name].First, 0.5); ok && has && c.name != "cold" {
			report.Add(s.name()+"_"+c.name, "speedup_over_cold", float64(cold)/float64(p50), len(slow.First))
		}
	}
	return nil
}

// group measures cases in turns, then their memory, and frees it.
func (s Size) group(ctx context.Context, report *bench.Report, cases []way, samples map[string]*starts.Samples) error {
	for _, c := range cases {
		console.Progress("bench coldstart: %s_%s: the first start, which loads what the others share", s.name(), c.name)
		// This holds for colddisk, too: the disk's cache is as warm for the first start as for others.
		r, err := c.b.Way(c.Case)(ctx)
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		r.End()
	}
	for i := range s.Often {
		for _, c := range cases {
			if c.Slow && i%5 != 0 {
				continue
			}
			r, err := c.b.Way(c.Case)(ctx)
			if err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
			samples[c.name].Add(r)
			r.End()
		}
		if (i+1)%10 == 0 {
			console.Progress("bench coldstart: %s: %d of %d rounds", s.name(), i+1, s.Often)
		}
	}
	for _, c := range cases {
		if !c.Shares {
			continue
		}
		if err := s.memory(ctx, report, c); err != nil {
			return fmt.Errorf("%s: memory: %w", c.name, err)
		}
		if c.Path == "fork" {
			forks := min(200, 10*s.Often)
			rate, err := c.b.ForksPerSecond(ctx, forks)
			if err != nil {
				return err
			}
			report.Add(s.name()+"_"+c.name, "forks_per_second", rate, forks)
		}
	}
	for _, c := range cases {
		if c.Shares {
			if _, err := c.b.Keys.Evict(ctx, c.b.Spec(c.Path).Function); err != nil {
				return err
			}
		}
	}
	return nil
}

// memory measures the memory of several live replicas: the total, and how much each replica adds.
// Totals are proportional set sizes. They include what the replicas share, such as their zygote. A
// replica adds (total − total before the replicas started) / number of replicas.
func (s Size) memory(ctx context.Context, report *bench.Report, c way) error {
	b := c.b
	all := b.Keys.Inventory().Zygotes
	i := slices.IndexFunc(all, func(z keysmanager.ZygoteInfo) bool { return z.Function == b.Spec(c.Path).Function })
	if i < 0 {
		return fmt.Errorf("nothing is kept for it: %+v", all)
	}
	alone, pids := all[i].Bytes, []int(nil)
	if pid := all[i].PID; pid != 0 {
		var err error
		if alone, _, err = starts.SharedMemory(starts.Family(pid)); err != nil {
			return err
		}
	}
	live := 0
	for _, n := range s.Alive {
		for ; live < n; live++ {
			r, err := b.Way(c.Case)(ctx)
			if err != nil {
				return err
			}
			defer r.End()
			pids = append(pids, r.PID)
		}
		console.Progress("bench coldstart: %s_%s: memory of %d replicas", s.name(), c.name, n)
		if pid := all[i].PID; pid != 0 {
			pids = starts.Family(pid)
		}
		pss, memfds, err := starts.SharedMemory(pids)
		if err != nil {
			return err
		}
		if all[i].PID == 0 {
			pss += alone - memfds // all of it, also pages that nobody maps
		}
		report.Add(s.name()+"_"+c.name, fmt.Sprintf("extra_per_replica_at_%d_mb", n), float64(pss-alone)/float64(n)/1e6, n)
		report.Add(s.name()+"_"+c.name, fmt.Sprintf("all_at_%d_mb", n), float64(pss)/1e6, n)
	}
	return nil
}
