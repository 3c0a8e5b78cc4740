package sim

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// good is a scenario without faults.
const good = `
nodes: [{memory: 16Gi, cpu: 8}]
pipelines: [{name: p, arrivals: {rate: "5"}}]
stages: [{name: s, service: {mean: 10ms}}]
`

// TestErrorsNameTheField checks that each error has the path, what was got and what was wanted.
func TestErrorsNameTheField(t *testing.T) {
	for name, tc := range map[string]struct{ from, to, want string }{
		"unknown field":        {"mean: 10ms", "meen: 10ms", `stages[0].service.meen: line 4: no such field, want one of batchCost, cpuShare, cv, dist, length, mean, perLength, profile, profileFile`},
		"unknown at the top":   {"nodes:", "node: 3\nnodes:", "node: line 2: no such field"},
		"inlined":              {"nodes:", "policies: [{alocator: sizer}]\nnodes:", "policies[0].alocator: line 2: no such field, want one of allocator, corrector, name"},
		"twice":                {"cpu: 8", "cpu: 8, cpu: 9", "nodes[0].cpu: line 2: given twice"},
		"no duration":          {"10ms", "10", `stages[0].service.mean: line 4: got "10", want a duration such as 100ms`},
		"negative duration":    {"10ms", "-10ms", `stages[0].service.mean: line 4: got "-10ms"`},
		"no number":            {"name: s,", "name: s, batch: many,", `stages[0].batch: line 4: got "many", want a whole number`},
		"a fraction":           {"name: s,", "name: s, batch: 1.5,", `stages[0].batch: line 4: got "1.5", want a whole number`},
		"no size":              {"16Gi", "16GG", `nodes[0].memory: line 2: got "16GG", want a size`},
		"no share":             {"cpu: 8", "cpu: -1", `nodes[0].cpu: line 2: got "-1", want cores`},
		"a list":               {"{mean: 10ms}", "[1]", "stages[0].service: line 4: want a mapping with some of"},
		"no list":              {"[{memory: 16Gi, cpu: 8}]", "{memory: 16Gi}", "nodes: line 2: want a list"},
		"a mapping":            {"10ms", "{a: 1}", "stages[0].service.mean: line 4: got a list or mapping, want a duration"},
		"no YAML":              {"nodes:", "nodes: [", "scenario: yaml:"},
		"no mean":              {"mean: 10ms", "cpuShare: 0.5", "stages[0].service.mean: 0s, want 1µs to 24h0m0s"},
		"no such distribution": {"mean: 10ms", "mean: 10ms, dist: weibull", `stages[0].service.dist: "weibull", want one of deterministic, exponential, gamma, lognormal`},
		"a CV of exponentials": {"mean: 10ms", "mean: 10ms, cv: 2", "stages[0].service.cv: 2, want none: that of exponential is known"},
		"not a number":         {"mean: 10ms", "mean: 10ms, dist: gamma, cv: .nan", "stages[0].service.cv: NaN, want 0 to 30"},
		"a profile's point":    {"mean: 10ms", "profile: [{cpu: 1, batch: 1, mean: 10ms}, {cpu: 1, mean: 5ms}]", "stages[0].service.profile[1].batch: 0, want 1 to 1024"},
		"two points alike":     {"mean: 10ms", "profile: [{cpu: 1, batch: 1, mean: 10ms}, {cpu: 1, batch: 1, mean: 5ms}]", "stages[0].service.profile[1]: a second point"},
		"bounds":               {"name: s,", "name: s, min: 5, max: 2,", "stages[0].max: 2, want 5 to 100000"},
		"fork without":         {"name: s,", "name: s, start: {cold: 1s, fork: 10ms},", "stages[0].parameters: none, want their size"},
		"slower fork":          {"name: s,", "name: s, start: {cold: 1s, fork: 2s}, parameters: 1Gi,", "stages[0].start.fork: 2s, want 0s to 1s"},
		"parked on nothing":    {"name: s,", "name: s, start: {cold: 1s, fork: 10ms, parked: 1ms}, parameters: 1Gi,", "stages[0].start.parked: 1ms, want none"},
		"no memory":            {"memory: 16Gi, ", "", "nodes[0].memory: 0, want some"},
		"too many devices":     {"cpu: 8", "cpu: 8, count: 10000, gpus: 64, gpuMemory: 1Gi", "nodes[0].gpus: 640000 in all, want at most 65536"},
		"devices of nothing":   {"cpu: 8", "cpu: 8, gpus: 1", "nodes[0].gpuMemory: 0, want some"},
		"too many nodes":       {"cpu: 8", "cpu: 8, count: 10001", "nodes[0].count: 10001, want 1 to 10000"},
		"no arrivals":          {`{rate: "5"}`, "{}", "pipelines[0].arrivals: 0 of rate, mmpp and trace are given, want one"},
		"two kinds":            {`{rate: "5"}`, `{rate: "5", mmpp: "1:1s,2:1s"}`, "pipelines[0].arrivals: 2 of rate, mmpp and trace are given, want one"},
		"a rate":               {`"5"`, `"5x"`, `pipelines[0].arrivals.rate: rate "5x": got "5x", want a number per second`},
		"a burstiness":         {`rate: "5"`, `rate: "5", cv: 99`, "pipelines[0].arrivals.cv: 99, want 0 to 30"},
		"a negative CV":        {`rate: "5"`, `rate: "5", cv: -1`, "pipelines[0].arrivals.cv: -1, want 0 to 30"},
		"a CV that is no one":  {`rate: "5"`, `rate: "5", cv: .nan`, "pipelines[0].arrivals.cv: NaN, want 0 to 30"},
		"a rate of zero":       {`"5"`, `"0"`, `pipelines[0].arrivals.rate: rate "0": every rate is 0, want one above 0`},
		"a negative rate":      {`"5"`, `"-5"`, `pipelines[0].arrivals.rate: rate "-5": segment 1: rate -5, want 0 to 1e+07 per second`},
		"a rate of no number":  {`"5"`, `nan`, `pipelines[0].arrivals.rate: rate "nan": segment 1: rate NaN, want 0 to 1e+07 per second`},
		"states of zero":       {`rate: "5"`, `mmpp: "0:1s,0:1s"`, `pipelines[0].arrivals.mmpp: mmpp "0:1s,0:1s": every rate is 0, want one above 0`},
		"a state of no number": {`rate: "5"`, `mmpp: "nan:1s,2:1s"`, `pipelines[0].arrivals.mmpp: mmpp "nan:1s,2:1s": state 1: rate NaN`},
		"a negative service":   {"mean: 10ms", "mean: 10ms, dist: gamma, cv: -1", "stages[0].service.cv: -1, want 0 to 30"},
		"a point of no time":   {"mean: 10ms", "profile: [{cpu: 1, batch: 1, mean: 0s}]", "stages[0].service.profile[0].mean: 0s, want 1µs to 24h0m0s"},
		"a point's CV":         {"mean: 10ms", "profile: [{cpu: 1, batch: 1, mean: 1s, cv: -1}]", "stages[0].service.profile[0].cv: -1, want 0 to 30"},
		"no objective":         {"name: p,", "name: p, slo: -1s,", `pipelines[0].slo: line 3: got "-1s"`},
		"no such pipeline":     {"name: s,", "name: s, pipelines: x,", `stages[0].pipelines[0]: "x", want one of the scenario's pipelines`},
		"no such stage":        {"name: s,", "name: s, next: x,", `stages[0].next: got "x", which is not deployed`},
		"a cycle":              {"stages: [", "stages: [{name: a, next: b, service: {mean: 1s}}, {name: b, next: a, service: {mean: 1s}}, ", "stages[0].next: got the cycle a > b > a"},
		"two entries":          {"stages: [", "stages: [{name: a, service: {mean: 1s}}, ", "stages[1].pipeline"},
		"stage twice":          {"stages: [", "stages: [{name: s, service: {mean: 1s}}, ", `stages: "s" twice`},
		"no policy":            {"nodes:", "policies: [{allocator: magic}]\nnodes:", `policies[0]: policy: allocator "magic", want one of`},
		"a negative price":     {"nodes:", "policies: [{}, {name: b, price: -1}]\nnodes:", "policies[1].price: -1, want 0 to 1000000"},
		"a price of no number": {"nodes:", "policies: [{price: .nan}]\nnodes:", "policies[0].price: NaN, want 0 to 1000000"},
		"an infinite price":    {"nodes:", "policies: [{price: .inf}]\nnodes:", "policies[0].price: +Inf, want 0 to 1000000"},
		"policy twice":         {"nodes:", "policies: [{}, {}]\nnodes:", `policies[1].name: "default" twice`},
		"too warm":             {"nodes:", "duration: 10s\nwarmup: 10s\nnodes:", "warmup: 10s, want less than the duration, which is 10s"},
		"a fast tick":          {"nodes:", "tick: 1us\nnodes:", "tick: 1µs, want 10ms to 1h0m0s"},
		"too long":             {"nodes:", "duration: 90000h\nnodes:", "duration: 90000h0m0s, want at most 9600h0m0s"},
		"nothing":              {good, "", "scenario: got nothing"},
	} {
		t.Run(name, func(t *testing.T) {
			if !strings.Contains(good, tc.from) {
				t.Fatalf("no %q in the good scenario", tc.from)
			}
			s, err := Parse(strings.NewReader(strings.Replace(good, tc.from, tc.to, 1)))
			if err == nil {
				_, err = s.Model(nothing)
			}
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
	model(t, good)
}

// TestOwnFieldsWinOverMergedMappings checks that a mapping's own fields win over merged ones. A
// list or mapping replaces the merged one as a whole.
func TestOwnFieldsWinOverMergedMappings(t *testing.T) {
	s, err := Parse(strings.NewReader(`
nodes: [{memory: 16Gi, cpu: 8}]
pipelines: [{name: p, arrivals: {rate: "5"}}]
stages:
- &a {name: a, next: [b], service: {mean: 10ms, dist: gamma, cv: 3}, batch: 4}
- {<<: *a, name: b, next: [], service: {mean: 20ms}}
`))
	if err != nil {
		t.Fatal(err)
	}
	b := s.Stages[1]
	if b.Name != "b" || b.Batch != 4 || len(b.Next) != 0 || b.Service.Dist != "" || b.Service.CV != nil || s.Stages[0].Service.Dist != Gamma {
		t.Errorf("got %+v", b)
	}
}

// TestShippedScenariosRun checks and runs the scenarios in bench/scenarios. It leaves out those
// whose traces may be missing.
func TestShippedScenariosRun(t *testing.T) {
	files, err := filepath.Glob("../bench/scenarios/*.yml")
	if err != nil || len(files) < 3 {
		t.Fatalf("%d scenarios: %v", len(files), err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		s, err := Parse(strings.NewReader(string(text)))
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		for i := range s.Pipelines {
			if a := &s.Pipelines[i].Arrivals; a.Trace.File != "" {
				*a = Arrivals{Rate: "1", CV: pointer(1.0)}
			}
		}
		if _, err := s.Model(nothing); err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
}

// FuzzParse checks that no text causes a panic or a model outside the bounds.
func FuzzParse(f *testing.F) {
	f.Add(good)
	f.Add(burst)
	f.Add("a: &a {<<: *a}\nstages: [*a]")
	f.Add("stages: &s [{<<: [*s]}]")
	f.Add("x: &x {name: s}\nstages: [{<<: *x}, *x]\npolicies: null\nnodes: [{count: 0x10}]")
	f.Fuzz(func(t *testing.T, text string) {
		s, err := Parse(strings.NewReader(text))
		if err != nil {
			return
		}
		m, err := s.Model(nothing)
		if err != nil {
			return
		}
		if len(m.nodes) == 0 || len(m.stages) == 0 || len(m.pipelines) == 0 || m.duration <= 0 || m.duration > maxDuration {
			t.Fatalf("%d nodes, %d stages, %d pipelines, %v", len(m.nodes), len(m.stages), len(m.pipelines), m.duration)
		}
		if _, err := m.newWorld(0, 1); err != nil {
			t.Fatal(err)
		}
	})
}
