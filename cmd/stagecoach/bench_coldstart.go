package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
)

// startSize is a synthetic stage to be started. How often is that of the fast paths; a slow one is started a fifth as often.
type startSize struct {
	name  string
	bytes int64
	often int
	alive []int // how many replicas are alive when their memory is measured
}

// startCase is a way to start a replica.
type startCase struct {
	name string
	slow bool
	full bool // only with --full
	how  func(*benchStage) func(context.Context) (launched, error)
	path string // of the KeysManager, whose replicas share memory; empty: they do not
}

func startCases() []startCase {
	ordered := func(path string) func(*benchStage) func(context.Context) (launched, error) {
		return func(b *benchStage) func(context.Context) (launched, error) { return b.order(path) }
	}
	return []startCase{
		{name: "fork", how: ordered("fork"), path: "fork"},
		{name: "forkheap", how: ordered("heap"), path: "heap"},
		{name: "map", slow: true, how: ordered("map"), path: "map"},
		{name: "cold", slow: true, how: ordered("cold")},
		{name: "coldprepacked", slow: true, full: true, how: func(b *benchStage) func(context.Context) (launched, error) { return b.prepacked }},
		{name: "colddisk", slow: true, full: true, how: func(b *benchStage) func(context.Context) (launched, error) { return b.fromDisk }},
	}
}

// benchColdstart measures order → hello and → first output of replicas of synthetic ONNX stages, on each start path, what each
// of several live ones adds to the memory, and how often one zygote forks.
func benchColdstart(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("bench coldstart", flag.ContinueOnError)
	asJSON, images := reportFlags(fs)
	ort := fs.String("ort", "build/ort/libonnxruntime.so.1", "ONNX Runtime's shared library")
	full := fs.Bool("full", false, "4 GB too, more cases and more starts; takes about half an hour, 20 GB of memory and 16 GB of disk")
	if err := parseFlags(fs, args); err != nil {
		return err
	}
	sizes := []startSize{{"onnx_100MB", 100 << 20, 20, []int{8}}, {"onnx_1GB", 1 << 30, 20, []int{8}}}
	if *full {
		sizes = []startSize{
			{"onnx_100MB", 100 << 20, 200, []int{1, 8, 32}}, {"onnx_1GB", 1 << 30, 100, []int{1, 8, 32}}, {"onnx_4GB", 4 << 30, 30, []int{1, 8, 32}},
		}
	}
	cases := slices.DeleteFunc(startCases(), func(c startCase) bool { return c.full && !*full })
	report := bench.NewReport("coldstart", os.Stderr)
	var failed error
	for _, size := range sizes {
		if err := size.measure(ctx, report, cases, *images, *ort); err != nil {
			failed = fmt.Errorf("%s: %w", size.name, err)
			break
		}
	}
	return errors.Join(failed, printReport(report, *asJSON, out)) // what was measured is not lost
}

func (s startSize) measure(ctx context.Context, report *bench.Report, cases []startCase, images, ort string) error {
	progress("bench coldstart: %s: generating weights", s.name)
	b, err := newBenchStage(s.bytes, images, ort)
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
		progress("bench coldstart: %s: %d MB of memory are not enough to take turns, so the cases follow one another", s.name, available>>20)
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
		samples[c.name].report(report, s.name+"_"+c.name)
	}
	cold, ok := bench.Quantile(samples["cold"].first, 0.5)
	for _, c := range cases {
		if p50, has := bench.Quantile(samples[c.name].first, 0.5); ok && has && c.name != "cold" {
			report.Add(s.name+"_"+c.name, "speedup_over_cold", float64(cold)/float64(p50), len(samples["cold"].first))
		}
	}
	return nil
}

// group measures cases in turns, then their memory, and frees it.
func (s startSize) group(ctx context.Context, report *bench.Report, b *benchStage, cases []startCase, samples map[string]*startSamples) error {
	for _, c := range cases {
		progress("bench coldstart: %s_%s: the first start, which loads what the others share", s.name, c.name)
		r, err := b.start(ctx, c.how(b)) // colddisk included: the disk's own cache is as warm for the first as for the others
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
			if err := samples[c.name].add(ctx, b, c.how(b)); err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
		}
		if (i+1)%10 == 0 {
			progress("bench coldstart: %s: %d of %d rounds", s.name, i+1, s.often)
		}
	}
	for _, c := range cases {
		if c.path == "" {
			continue
		}
		if err := s.memory(ctx, report, b, c); err != nil {
			return fmt.Errorf("%s: memory: %w", c.name, err)
		}
		if c.path == "fork" {
			rate, err := b.forksPerSecond(ctx, 200)
			if err != nil {
				return err
			}
			report.Add(s.name+"_fork", "forks_per_second", rate, 200)
		}
	}
	for _, c := range cases {
		if c.path != "" {
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
			r, err := b.start(ctx, c.how(b))
			if err != nil {
				return err
			}
			defer r.end()
			pids = append(pids, r.pid)
		}
		progress("bench coldstart: %s_%s: memory of %d replicas", s.name, c.name, n)
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
		report.Add(s.name+"_"+c.name, fmt.Sprintf("extra_per_replica_at_%d_mb", n), float64(pss-alone)/float64(n)/1e6, n)
		report.Add(s.name+"_"+c.name, fmt.Sprintf("all_at_%d_mb", n), float64(pss)/1e6, n)
	}
	return nil
}

// memAvailable is how many bytes this machine can give to processes.
func memAvailable() int64 {
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) != nil {
		return 0
	}
	return int64(info.Totalram) * int64(info.Unit)
}

// startSamples is what several starts took.
type startSamples struct {
	hello, first, again []time.Duration
	phases              map[string][]time.Duration
}

func (s *startSamples) add(ctx context.Context, b *benchStage, how func(context.Context) (launched, error)) error {
	r, err := b.start(ctx, how)
	if err != nil {
		return err
	}
	r.end()
	s.hello, s.first, s.again = append(s.hello, r.hello), append(s.first, r.first), append(s.again, r.again)
	if s.phases == nil {
		s.phases = map[string][]time.Duration{}
	}
	for _, p := range r.phases {
		s.phases[p.Name] = append(s.phases[p.Name], p.Took)
	}
	return nil
}

func (s *startSamples) report(r *bench.Report, name string) {
	r.AddMillis(name, "first_output_p50_ms", s.first, 0.5)
	r.AddMillis(name, "first_output_p99_ms", s.first, 0.99)
	r.AddMillis(name, "hello_p50_ms", s.hello, 0.5)
	r.AddMillis(name, "hello_p99_ms", s.hello, 0.99)
	r.AddMillis(name, "inference_p50_ms", s.again, 0.5)
	for _, phase := range []string{"order", "fork", "spawn"} {
		r.AddMillis(name, phase+"_p50_ms", s.phases[phase], 0.5)
	}
}
