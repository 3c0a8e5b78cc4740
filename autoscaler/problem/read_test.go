package problem

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
)

// good is a problem without faults.
const good = `
nodes: [{name: a, memory: 16Gi, cpu: 8}]
pipelines: [{name: p, slo: 1s, rate: 5}]
stages: [{name: s, next: [t], service: {mean: 10ms}}, {name: t, service: {mean: 20ms}}]
`

func read(t *testing.T, text string) *Problem {
	t.Helper()
	p, err := Read(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// decide makes decisions on a clock that stands still.
func decide(t *testing.T, p *Problem, n policy.Names, steps int) []Decision {
	t.Helper()
	all, err := p.Decide(n, steps, func() time.Duration { return 0 })
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// TestErrorsNameTheField checks that each error has the path, what was got and what was wanted.
func TestErrorsNameTheField(t *testing.T) {
	for name, tc := range map[string]struct{ from, to, want string }{
		"unknown field":     {"mean: 10ms", "meen: 10ms", "stages[0].service.meen: line 4: no such field, want one of batches, cv, mean"},
		"no duration":       {"10ms", "10", `stages[0].service.mean: line 4: got "10", want a duration such as 100ms`},
		"a short service":   {"10ms", "10ns", "stages[0].service.mean: got 10ns, want 1µs to 24h0m0s"},
		"a CV alone":        {"mean: 10ms", "cv: 2", "stages[0].service.mean: got none, want one beside cv and batches"},
		"not a number":      {"rate: 5", "rate: .nan", "pipelines[0].rate: got NaN, want 0 to 1e+09"},
		"no nodes":          {"[{name: a, memory: 16Gi, cpu: 8}]", "[]", "nodes: got none, want one or more"},
		"no CPU":            {", cpu: 8", "", "nodes[0].cpu: got 0, want some"},
		"devices of none":   {"cpu: 8", "cpu: 8, gpus: 1", "nodes[0].gpuMemory: got 0, want some"},
		"too many nodes":    {"[{name: a, memory: 16Gi, cpu: 8}]", "[{name: a, count: 9000, memory: 1Gi, cpu: 8}, {name: b, count: 9000, memory: 1Gi, cpu: 8}]", "nodes: got 18000 in all, want at most 10000"},
		"nodes that meet":   {"[{name: a, memory: 16Gi, cpu: 8}]", "[{name: a, count: 2, memory: 1Gi, cpu: 8}, {name: a-1, memory: 1Gi, cpu: 8}]", "nodes: got \"a-1\" twice, want names that stay apart"},
		"an odd name":       {"name: s", "name: S", `stages[0].name: got "S", want a name of 1 to 63`},
		"twice":             {"name: t", "name: s", `stages[1].name: got "s" twice, want a name of its own`},
		"a variant's name":  {"name: t,", "name: t, variants: [{name: s}],", `stages[1].variants[0].name: got "s" twice`},
		"a negative price":  {"nodes:", "policies: {price: -1}\nnodes:", "policies.price: got -1, want 0 to 1000000"},
		"a price of NaN":    {"nodes:", "policies: {price: .nan}\nnodes:", "policies.price: got NaN, want 0 to 1000000"},
		"an allocator":      {"nodes:", "policies: {allocator: magic}\nnodes:", `policies.allocator: got "magic", want one of accuracy, accuracy-greedy, accuracy-waits, fixed`},
		"a pipeline's":      {"slo: 1s", "slo: 1s, rank: lifo", `pipelines[0].rank: got "lifo", want one of fair, fifo, least-slack`},
		"no such pipeline":  {"name: t,", "name: t, pipelines: [q],", `stages[1].pipelines[0]: got "q", want one of the problem's pipelines`},
		"no such stage":     {"next: [t]", "next: [u]", `stages[0].next: got "u"`},
		"a cycle":           {"name: t,", "name: t, next: [s],", "stages[0].next: got the cycle"},
		"shares":            {"name: t,", "name: t, share: 0.5, variants: [{name: v, share: 0.2}],", "stages[1].share: got 0.5, and 0.2 of its variants, want 1 together"},
		"variants' shares":  {"name: t,", "name: t, variants: [{name: v, share: 0.7}, {name: w, share: 0.7}],", "stages[1].variants: got shares of 1.4 together, want at most 1"},
		"no such node":      {"name: t,", "name: t, replicas: [{node: b}],", `stages[1].replicas[0].node: got "b", want one of the nodes`},
		"a full node":       {"name: t,", "name: t, memory: 10Gi, replicas: [{node: a, count: 2}],", "stages[1].replicas[0].count: got 20 GiB of a in use, want at most 16 GiB"},
		"a device too many": {"name: t,", "name: t, replicas: [{node: a, device: gpu0}],", `stages[1].replicas[0].device: got "gpu0", want as many devices as gpu says, 0`},
		"many replicas":     {"name: t,", "name: t, replicas: [{node: a, count: 60000}, {node: a, count: 60000}],", "stages[1].replicas: got 120000 in all, want at most 100000"},
		"a point twice":     {"name: t,", "name: t, profile: [{cpu: 1, batch: 1, mean: 1ms}, {cpu: 1, batch: 1, mean: 2ms}],", "stages[1].profile[1]: got a second point with its cpu, batch and length"},
		"batches":           {"mean: 20ms", "mean: 20ms, batches: [{size: 2, mean: 1s}, {size: 1, mean: 1s}]", "stages[1].service.batches[1].size: got 1, want more than the one before, 2"},
		"too long an item":  {"rate: 5}]\nstages: [{name: s,", "rate: 5, length: 900}]\nstages: [{name: s, maxLength: 512,", "pipelines[0].length: got 900, want at most 512, which is the most that stage s takes"},
		"nothing":           {good, "", "problem: got nothing, want a mapping with nodes, pipelines and stages"},
	} {
		t.Run(name, func(t *testing.T) {
			if !strings.Contains(good, tc.from) {
				t.Fatalf("no %q in the good problem", tc.from)
			}
			_, err := Read(strings.NewReader(strings.Replace(good, tc.from, tc.to, 1)))
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
	read(t, good)
	const two = `
nodes: [{name: a, memory: 1Gi, cpu: 1, gpus: 1, gpuMemory: 8Gi}]
pipelines: [{name: p}]
stages: [{name: s, gpu: 1, gpuMemory: 1Gi, replicas: [{node: a, device: gpu0}, {node: a, device: gpu0}]}]
`
	if _, err := Read(strings.NewReader(two)); err == nil || !strings.Contains(err.Error(), "stages[0].replicas[1].count: got two on gpu0 of a, want one") {
		t.Errorf("got %v, want one replica per device", err)
	}
}

// TestJSONIsAProblem reads a problem in JSON.
func TestJSONIsAProblem(t *testing.T) {
	p := read(t, `{"nodes": [{"memory": "1Gi", "cpu": 1}], "pipelines": [{"name": "p", "rate": 2}], "stages": [{"name": "s"}]}`)
	if f := p.snapshot.Functions[0]; f.Demand.Rate != 2 || f.Service.Known {
		t.Errorf("got %+v", f)
	}
}

// TestDemandFollowsFromThePipelines checks the calls per second of stages: those of all pipelines,
// with one call per item, and one for the results of all items.
func TestDemandFollowsFromThePipelines(t *testing.T) {
	p := read(t, `
nodes: [{memory: 16Gi, cpu: 8}]
pipelines: [{name: p, rate: 4, cv: 2}, {name: q, rate: 12}]
stages:
  - {name: cut, pipelines: [p], next: [left, right], items: 3}
  - {name: left, pipelines: [p], next: join, each: true}
  - {name: right, pipelines: [p], next: join}
  - {name: join, pipelines: [p], next: [shared, words], items: 10}
  - {name: words, pipelines: [p], each: true}
  - {name: entry, pipelines: [q], next: shared}
  - {name: shared, service: {mean: 1ms}, variants: [{name: v, share: 0.25, service: {mean: 1ms}}]}
`)
	given := read(t, strings.Replace(good, "name: t,", "name: t, demand: {rate: 7, cv: 3},", 1))
	if f, _ := given.snapshot.Function("t"); f.Demand.Rate != 7 || f.Demand.CV != 3 {
		t.Errorf("got %+v, want the stage's own demand", f.Demand)
	}
	for name, want := range map[string]float64{"cut": 4, "left": 12, "right": 4, "join": 4, "words": 40, "entry": 12, "shared": 16 * 0.75, "v": 16 * 0.25} {
		f, _ := p.snapshot.Function(name)
		if f.Demand.Rate != want {
			t.Errorf("%s: %v calls per second, want %v", name, f.Demand.Rate, want)
		}
	}
	if f, _ := p.snapshot.Function("v"); f.Stage.Rate != 16 || f.VariantOf != "shared" || f.Stage.CV <= 1 || f.Stage.CV >= 2 {
		t.Errorf("got %+v, want a variant of shared with 16 calls per second and a CV of 1 to 2", f)
	}
}

// TestServiceFollowsFromTheProfile: without a measured time, the profile's point nearest to the CPU
// limit counts.
func TestServiceFollowsFromTheProfile(t *testing.T) {
	const profile = "profile: [{cpu: 1, batch: 2, mean: 80ms}, {cpu: 2, batch: 2, mean: 40ms}, {cpu: 2, batch: 4, mean: 60ms}]"
	for name, tc := range map[string]struct {
		with string
		want time.Duration
	}{
		"the limit":     {profile + ", cpuLimit: 1100m", 40 * time.Millisecond},
		"no limit":      {profile, 20 * time.Millisecond},
		"measured wins": {profile + ", service: {mean: 5ms}", 5 * time.Millisecond},
	} {
		p := read(t, strings.Replace(good, "service: {mean: 20ms}", tc.with, 1))
		if f, _ := p.snapshot.Function("t"); f.Service.Mean != tc.want || len(f.Profile) != 3 {
			t.Errorf("%s: got %v, want %v", name, f.Service.Mean, tc.want)
		}
	}
}

// FuzzRead checks that every text is refused or decided, and never causes a panic.
func FuzzRead(f *testing.F) {
	full, err := os.ReadFile("testdata/full.yml")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add(string(full))
	f.Add("a: &a {<<: *a}\nstages: [*a]")
	f.Add("nodes: [{memory: 1e15, cpu: 1e6}]\npipelines: [{name: p, rate: 1e9, cv: 1e3, slo: 1ns}]\nstages: [{name: s, items: 1e4, service: {mean: 24h, cv: 1e3}}]")
	f.Fuzz(func(t *testing.T, text string) {
		p, err := Read(strings.NewReader(text))
		if err != nil || len(p.snapshot.Nodes)*len(p.snapshot.Functions) > 1e4 {
			return
		}
		n := p.Policies
		for _, n.Allocator = range []string{"sizer", "accuracy", "uniform", "fixed"} {
			all, err := p.Decide(n, 2, func() time.Duration { return 0 })
			if err != nil || len(all) != 2 || len(all[1].Held) > 0 {
				t.Fatalf("%s: %+v, %v", n.Allocator, all, err)
			}
			for _, x := range all[1].Pipelines {
				if !(x.Wait >= 0 && x.Accuracy >= 0 && x.Accuracy <= 1+1e-9) {
					t.Fatalf("%s: %+v", n.Allocator, x)
				}
			}
		}
	})
}
