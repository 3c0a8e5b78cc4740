package sim

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

// burst is a scenario that uses every feature: loads of parameters, forks, parked children,
// batches, one call per item, a join, replicas that die, functions that sleep, several policies,
// and several kinds of arrivals.
const burst = `
name: everything
duration: 60s
warmup: 5s
seeds: 2
budget: 20
policies:
- {name: sizer, corrector: none}
- {name: quart, corrector: quart, sharer: gain}
nodes:
- {name: gpu, count: 2, memory: 8Gi, cpu: 8, gpus: 2, gpuMemory: 16Gi}
- {name: cpu, memory: 4Gi, cpu: 8}
pipelines:
- {name: p, slo: 400ms, timeout: 5s, items: 2, arrivals: {rate: "5:20s,40:20s,5:20s", cv: 3}}
- {name: q, arrivals: {mmpp: "2:5s,20:2s"}}
stages:
- {name: a, pipelines: [p], next: [b, c], each: true, service: {dist: gamma, mean: 20ms, cv: 0.5}, start: {cold: 2s, fork: 50ms}, parameters: 1Gi, memory: 100Mi}
- {name: b, pipelines: p, next: d, items: 2, batch: 4, service: {dist: lognormal, mean: 30ms, batchCost: 0.3}, start: {cold: 3s, fork: 200ms, parked: 20ms}, parameters: 2Gi, gpu: 1, gpuMemory: 4Gi, diesEvery: 40s}
- {name: c, pipelines: p, next: d, service: {profile: [{cpu: 500m, batch: 1, mean: 60ms, cv: 0.2}, {cpu: 1, batch: 1, mean: 30ms}, {cpu: 2, batch: 1, mean: 15ms}]}, cpuLimit: 1, start: {cold: 100ms}}
- {name: d, service: {dist: deterministic, mean: 5ms}, start: {cold: 100ms}, slots: 2}
- {name: e, pipelines: q, next: d, zero: true, zeroAge: 3s, service: {mean: 50ms}, start: {cold: 1s, fork: 100ms}, parameters: 3Gi}
`

// TestSameSeedSameBytes checks that a result depends only on its scenario, not on how many runs go
// on at a time.
func TestSameSeedSameBytes(t *testing.T) {
	var r Result
	outputs := func() (all [3]string) {
		r = simulate(t, burst)
		var markdown, svg strings.Builder
		if err := errors.Join(r.WriteMarkdown(&markdown), r.WriteSVG(&svg)); err != nil {
			t.Fatal(err)
		}
		return [3]string{toJSON(t, r), markdown.String(), svg.String()}
	}
	before := runtime.GOMAXPROCS(1)
	defer runtime.GOMAXPROCS(before)
	one := outputs()
	runtime.GOMAXPROCS(2)
	for i, again := range outputs() {
		if again != one[i] {
			t.Errorf("output %d differs:\n%s\nonce:\n%s", i, again, one[i])
		}
	}
	if other := simulate(t, strings.Replace(burst, "seeds: 2", "seeds: 2\nseed: 7", 1)); toJSON(t, other.Policies) == toJSON(t, r.Policies) {
		t.Error("another seed gives the same")
	}
}

// TestBusyScenarioShowsEveryFeature checks the figures of a busy scenario.
func TestBusyScenarioShowsEveryFeature(t *testing.T) {
	r := simulate(t, burst)
	for _, p := range r.Policies {
		for _, x := range p.Pipelines {
			if x.Offered.Mean == 0 || x.P50.Mean <= 0 || x.P50.Mean > x.P95.Mean || x.P95.Mean > x.P99.Mean || x.Attainment.Mean < 0 || x.Attainment.Mean > 1 {
				t.Errorf("%s, %s: %+v", p.Name, x.Name, x)
			}
		}
		a, b, e := p.Stages[0], p.Stages[1], p.Stages[4]
		if ratio := a.Rate.Mean / b.Rate.Mean; math.Abs(ratio-2) > 0.1 {
			t.Errorf("%s: a has %g calls to one of b, want the 2 items of each request", p.Name, ratio)
		}
		if b.Deaths == 0 || b.Starts["parked"] == 0 || b.Starts["fork"] == 0 {
			t.Errorf("%s: b died %d times and started %v, want deaths, and starts from parked children and from others", p.Name, b.Deaths, b.Starts)
		}
		if e.Starts["fork"] == 0 {
			t.Errorf("%s: e started %v, want forks: its parameters stay when it sleeps", p.Name, e.Starts)
		}
		if p.QNAError.Mean <= 0 {
			t.Errorf("%s: no prediction of CVs", p.Name)
		}
	}
	first, second := r.Policies[0], r.Policies[1]
	if toJSON(t, first.Pipelines[0].Offered) != toJSON(t, second.Pipelines[0].Offered) || len(second.Versus) != 2 || first.Versus != nil {
		t.Errorf("the policies have not seen the same requests, or are not compared: %+v", second.Versus)
	}
	var back Result
	if err := json.Unmarshal([]byte(toJSON(t, r)), &back); err != nil || back.Schema != Schema {
		t.Errorf("JSON: %v, schema %q", err, back.Schema)
	}
	var b bytes.Buffer
	if err := r.WriteSVG(&b); err != nil || strings.Contains(b.String(), "NaN") || strings.Count(b.String(), "<svg") != 5 {
		t.Errorf("SVG: %v", err)
	}
}

// TestStartTakesTheTimeOfItsPath checks that a replica's start takes the time of its path, and that
// the path depends on what the node keeps.
func TestStartTakesTheTimeOfItsPath(t *testing.T) {
	const scenario = `
duration: 60s
seeds: 1
nodes: [{memory: MEMORY, cpu: 100, gpus: 1, gpuMemory: 80Gi}]
pipelines: [{name: p, timeout: 60s, arrivals: {rate: "0.01:20s,0.3"}}]
stages: [{name: s, zero: true, zeroAge: 1s, service: {dist: deterministic, mean: 10ms}, start: START}]
`
	for name, tc := range map[string]struct {
		memory, start, path string
		took                float64 // seconds that the quickest request waits for a replica
	}{
		"no parameters": {"16Gi", "{cold: 2s}", "cold", 2},
		"fork":          {"16Gi", "{cold: 2s, fork: 500ms}, parameters: 8Gi, gpu: 1", "fork", 0.5},
		// not a key stage
		"not parked": {"16Gi", "{cold: 2s, fork: 500ms, parked: 100ms}, parameters: 8Gi, gpu: 1", "fork", 0.5},
	} {
		t.Run(name, func(t *testing.T) {
			r := simulate(t, fill(scenario, "MEMORY", tc.memory, "START", tc.start))
			s, p := r.Policies[0].Stages[0], r.Policies[0].Pipelines[0]
			if s.Starts[tc.path] == 0 || math.Abs(p.P50.Mean-0.01-tc.took) > 0.1 {
				t.Errorf("started %v, half of the requests took %g s, want %s and %g s", s.Starts, p.P50.Mean, tc.path, tc.took)
			}
		})
	}
}

// TestSleepingStagesStartTogether checks that a request waits for one start, not for one per stage.
// All starts begin with the request, even if its first stage is awake.
func TestSleepingStagesStartTogether(t *testing.T) {
	const scenario = `
duration: 300s
seeds: 1
nodes: [{memory: 16Gi, cpu: 100}]
pipelines: [{name: p, timeout: 60s, arrivals: {rate: "0.05"}}]
stages:
- {name: a, pipelines: [p], next: b, FIRST}
- {name: b, pipelines: [p], next: c, zero: true, zeroAge: 1s, service: {dist: deterministic, mean: 10ms}, start: {cold: 2s}}
- {name: c, pipelines: [p], zero: true, zeroAge: 1s, service: {dist: deterministic, mean: 10ms}, start: {cold: 2s}}
`
	for first, want := range map[string]float64{
		"zero: true, zeroAge: 1s, service: {dist: deterministic, mean: 10ms}, start: {cold: 2s}": 2.03,
		"service: {dist: deterministic, mean: 900ms}, start: {cold: 2s}":                         2.02,
	} {
		r := simulate(t, fill(scenario, "FIRST", first))
		p := r.Policies[0].Pipelines[0]
		if p.Offered.Mean == 0 || math.Abs(p.P50.Mean-want) > 0.05 {
			t.Errorf("%s: half of %g requests took %g s, want %g s", first, p.Offered.Mean, p.P50.Mean, want)
		}
		for _, s := range r.Policies[0].Stages[1:] {
			if s.Starts["cold"] < 2 {
				t.Errorf("stage %s started %v, want it to sleep between requests", s.Name, s.Starts)
			}
		}
	}
}

// TestOnlyKeyStagesHaveAParkedChild checks that a key stage has a child parked on the device, and
// another one a while after the first was used. Other stages have none.
func TestOnlyKeyStagesHaveAParkedChild(t *testing.T) {
	w, err := model(t, `
nodes: [{memory: 16Gi, cpu: 100, gpus: 1, gpuMemory: 80Gi}]
pipelines: [{name: p, arrivals: {rate: "1"}}]
stages: [{name: s, service: {mean: 10ms}, gpu: 1, start: {cold: 2s, fork: 500ms, parked: 100ms}, parameters: 8Gi}]
`).newWorld(0, 1)
	if err != nil {
		t.Fatal(err)
	}
	n, l := w.nodes[0], w.lines[0]
	start := func(at time.Duration, key bool, want string) {
		t.Helper()
		w.now, w.clock = int64(at), epoch.Add(at)
		if n.keys = nil; key {
			n.keys = []int{0}
		}
		n.mark(w)
		n.warm(w, l, key, false)
		if at < 1500*time.Millisecond {
			return
		}
		if z := n.zygotes[0]; !z.ready() {
			z.arrive(w)
		}
		if path, _, ok := n.start(w, l, false); path != want || !ok {
			t.Errorf("at %v: %s, %v, want %s", at, path, ok, want)
		}
	}
	start(0, false, "")
	start(2*time.Second, false, "fork")
	start(3*time.Second, true, "fork") // the child is not parked yet
	start(4*time.Second, true, "parked")
	start(4100*time.Millisecond, true, "fork")
	start(4500*time.Millisecond, true, "parked")
	start(6*time.Second, false, "fork")
}

// TestNodeEvictsLeastRecentlyUsedParameters checks that a node without room for a replica's
// parameters evicts others, least recently used first. The next start of an evicted stage must be
// cold.
func TestNodeEvictsLeastRecentlyUsedParameters(t *testing.T) {
	r := simulate(t, `
duration: 120s
seeds: 1
nodes: [{memory: 10Gi, cpu: 100}]
pipelines: [{name: p, timeout: 60s, arrivals: {rate: "0.2"}}, {name: q, timeout: 60s, arrivals: {rate: "0.2"}}]
stages:
- {name: s, pipelines: p, zero: true, zeroAge: 1s, service: {mean: 10ms}, start: {cold: 1s, fork: 10ms}, parameters: 5Gi}
- {name: t, pipelines: q, zero: true, zeroAge: 1s, service: {mean: 10ms}, start: {cold: 1s, fork: 10ms}, parameters: 5Gi}
`)
	for _, s := range r.Policies[0].Stages {
		if s.Evictions == 0 || s.Starts["cold"] == 0 {
			t.Errorf("%s: %d evictions, starts %v, want some of each other's", s.Name, s.Evictions, s.Starts)
		}
	}
}

// TestRequestsEndAtTheirDeadlineOrAreRefused checks that a request that takes too long ends at its
// deadline, and that a request that cannot be done in time is refused.
func TestRequestsEndAtTheirDeadlineOrAreRefused(t *testing.T) {
	r := simulate(t, `
duration: 60s
seeds: 1
nodes: [{memory: 10Gi, cpu: 100}]
pipelines: [{name: p, timeout: 500ms, arrivals: {rate: "20"}}]
stages: [{name: s, max: 1, service: {mean: 100ms}}]
`)
	p := r.Policies[0].Pipelines[0]
	if p.Failed.Mean < 0.3 || p.Failures["429"] == 0 || p.Failures["504"] == 0 || p.P99.Mean > 0.5 {
		t.Errorf("%+v, want half of the requests to fail, with 429 and 504, and none to take longer than 500 ms", p)
	}
}

// TestServiceTimesFollowTheProfile checks service times that come from a profile.
func TestServiceTimesFollowTheProfile(t *testing.T) {
	s := newService(Variant{Service: Service{Dist: Deterministic, BatchCost: pointer(1.0), Profile: []Point{
		{CPU: 1000, Batch: 1, Mean: 100 * time.Millisecond}, {CPU: 2000, Batch: 1, Mean: 60 * time.Millisecond}, {CPU: 2000, Batch: 4, Mean: 120 * time.Millisecond},
	}}})
	for _, tc := range []struct {
		batch, cpu int
		want       time.Duration
	}{
		{1, 2000, 60}, {1, 0, 60}, {1, 1000, 100}, {1, 500, 180}, {2, 2000, 80}, {4, 2000, 120}, {8, 2000, 200}, {4, 1000, 400},
	} {
		if got := time.Duration(s.base(tc.batch, tc.cpu, 0)).Round(time.Microsecond); got != tc.want*time.Millisecond {
			t.Errorf("a batch of %d on %dm takes %v, want %v", tc.batch, tc.cpu, got, tc.want*time.Millisecond)
		}
	}
	plain := newService(Variant{CPULimit: 1000, Service: Service{Dist: Deterministic, Mean: 100 * time.Millisecond, BatchCost: pointer(0.5), CPUShare: 0.8}})
	for _, tc := range []struct {
		batch, cpu int
		want       float64
	}{{1, 0, 100e6}, {3, 1000, 200e6}, {1, 2000, 60e6}, {1, 500, 180e6}} {
		if got := plain.base(tc.batch, tc.cpu, 0); math.Abs(got-tc.want) > 1 {
			t.Errorf("a batch of %d on %dm takes %g ns, want %g", tc.batch, tc.cpu, got, tc.want)
		}
	}
}

// TestIdleCoresSaveDevicesAndTime checks that a pipeline on devices needs fewer of them, and is
// faster, if it gets idle CPU. CPU that others declare must not be given.
func TestIdleCoresSaveDevicesAndTime(t *testing.T) {
	const scenario = `
{name: idle, duration: 2m, warmup: 40s, seeds: 2, policies: [{name: whole}, {name: without, corrector: quart-no-cpu}],
 nodes: [{name: gpu, count: 2, cpu: CORES, memory: 64Gi, gpus: 8, gpuMemory: 24Gi}],
 stages: [{name: a, next: b, STAGE}, {name: b, STAGE}], pipelines: [{name: p, slo: 240ms, arrivals: {rate: 60, cv: 2}}]}`
	const stage = `gpu: 1, cpu: 2, cpuLimit: 2, start: {cold: 3s}, service: {dist: gamma, cv: 0.2, profile: [{cpu: 2, batch: 1, mean: 60ms}, {cpu: 3, batch: 1, mean: 50ms}, {cpu: 4, batch: 1, mean: 45ms}]}`
	figures := func(cores string, policy int) (mean, devices float64) {
		f, err := model(t, fill(scenario, "STAGE", stage, "CORES", cores)).One(t.Context(), policy, 1)
		if err != nil {
			t.Fatal(err)
		}
		if f.Held+f.Refused+f.Pipelines[0].Failed > 0 {
			t.Errorf("%s cores a node: %g domains held, %g plans refused (%s), %g requests failed", cores, f.Held, f.Refused, f.Complaint, f.Pipelines[0].Failed)
		}
		return f.Pipelines[0].Mean, f.DeviceSeconds
	}
	for cores, part := range map[string]float64{"64": 0.9, "16": 1.05} {
		mean, devices := figures(cores, 0)
		meanWithout, devicesWithout := figures(cores, 1)
		t.Logf("%s cores a node: %.3g s with %.4g device-seconds; without CPU %.3g s with %.4g", cores, mean, devices, meanWithout, devicesWithout)
		if mean > part*meanWithout || devices > part*devicesWithout {
			t.Errorf("%s cores a node: %.3g s with %.4g device-seconds, without CPU %.3g s with %.4g, want at most %g of each", cores, mean, devices, meanWithout, devicesWithout, part)
		}
	}
}

// TestServiceTimesFollowAProfileFile checks service times that come from the output of stagecoach
// profile.
func TestServiceTimesFollowAProfileFile(t *testing.T) {
	const measured = `{"version": 1, "function": "f.openfaas-fn", "image": "x", "at": "2026-01-01T00:00:00Z", "relative": 0.05, "points": [
		{"cpuMilli": 500, "batch": 1, "length": 64, "meanSeconds": 0.08, "errSeconds": 0.001, "cv": 0.1, "n": 50},
		{"cpuMilli": 1000, "batch": 1, "length": 64, "meanSeconds": 0.04, "errSeconds": 0.001, "cv": 0.1, "n": 50},
		{"cpuMilli": 1000, "batch": 1, "length": 128, "meanSeconds": 0.09, "errSeconds": 0.001, "cv": 0.1, "n": 50}]}`
	for length, want := range map[string]float64{"64": 0.04, "128": 0.09} {
		s, err := Parse(strings.NewReader(fill(`
duration: 60s
seeds: 2
nodes: [{memory: 10Gi, cpu: 100}]
pipelines: [{name: p, arrivals: {rate: "5"}}]
stages: [{name: s, service: {profileFile: f.json, length: LENGTH}}]
`, "LENGTH", length)))
		if err != nil {
			t.Fatal(err)
		}
		with := func(text string) (*Model, error) {
			return s.Model(func(string) (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(text)), nil })
		}
		m, err := with(measured)
		if err != nil {
			t.Fatal(err)
		}
		r, err := m.Run(t.Context(), nil)
		if got := r.Policies[0].Stages[0]; err != nil || math.Abs(got.Service.Mean-want) > 0.05*want || math.Abs(got.ServiceCV.Mean-0.1) > 0.03 {
			t.Errorf("length %s: %v, %+v, want %g s", length, err, got, want)
		}
		for text, wrong := range map[string]string{
			"{}": "stages[0].service.profileFile: f.json: profile: ",
			strings.ReplaceAll(measured, `"length": `+length, `"length": 1`+length): "no points with inputs of length " + length + ", want service.length to be one of [",
		} {
			if _, err := with(text); err == nil || !strings.Contains(err.Error(), wrong) {
				t.Errorf("got %v, want %q", err, wrong)
			}
		}
	}
}

// TestServiceTimeDependsOnlyOnTheCall checks that a call's service time depends only on its seed,
// request, stage, task and attempt, not on earlier draws.
func TestServiceTimeDependsOnlyOnTheCall(t *testing.T) {
	w, err := model(t, burst).newWorld(0, 1)
	if err != nil {
		t.Fatal(err)
	}
	draw := func(seed uint64, request string, number uint32, attempt uint8, stage int) float64 {
		w.seed = seed
		w.reseed(&task.Task{Key: task.Key{Request: request, Task: number, Attempt: attempt}}, stage, 0)
		return w.rand.Float64()
	}
	first := draw(1, "a", 1, 1, 0)
	others := []float64{draw(2, "a", 1, 1, 0), draw(1, "b", 1, 1, 0), draw(1, "ab", 1, 1, 0), draw(1, "a", 2, 1, 0), draw(1, "a", 1, 2, 0), draw(1, "a", 1, 1, 1)}
	if slices.Contains(others, first) || draw(1, "a", 1, 1, 0) != first {
		t.Errorf("%g, again %g, of others %g", first, draw(1, "a", 1, 1, 0), others)
	}
}

// TestLatencyHasTwoHopsPerStage checks that a request without any wait takes its service times and
// two hops per stage.
func TestLatencyHasTwoHopsPerStage(t *testing.T) {
	r := simulate(t, `
duration: 60s
seeds: 1
hop: 1ms
nodes: [{memory: 1Gi, cpu: 4}]
pipelines: [{name: p, arrivals: {rate: "1", cv: 0}}]
stages: [{name: a, next: b, service: {dist: deterministic, mean: 10ms}}, {name: b, service: {dist: deterministic, mean: 20ms}}]
`)
	if got := r.Policies[0].Pipelines[0]; math.Abs(got.Mean.Mean-0.034) > 1e-6 || math.Abs(got.P99.Mean-0.034) > 1e-4 {
		t.Errorf("%+v, want 34 ms", got)
	}
}

// TestCanceledRunsLeaveNoGoroutine checks that a cancelled context ends the runs and leaves no
// goroutine (TestMain looks).
func TestCanceledRunsLeaveNoGoroutine(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	_, err := model(t, strings.Replace(burst, "60s", "9000h", 1)).Run(ctx, func(p Progress) {
		if p.Events > 0 {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want that it was canceled", err)
	}
}

// TestTraceFileIsPlayed plays a trace from a file.
func TestTraceFileIsPlayed(t *testing.T) {
	s, err := Parse(strings.NewReader(`
seeds: 1
nodes: [{memory: 10Gi, cpu: 100}]
pipelines: [{name: p, arrivals: {trace: {file: counts.csv, spread: even}}}]
stages: [{name: s, service: {mean: 10ms}}]
`))
	if err != nil {
		t.Fatal(err)
	}
	m, err := s.Model(func(name string) (io.ReadCloser, error) {
		if name != "counts.csv" {
			return nil, fmt.Errorf("asked for %q", name)
		}
		return io.NopCloser(strings.NewReader(strings.Repeat("5\n", 60))), nil
	})
	if err != nil {
		t.Fatal(err)
	}
	r, err := m.Run(t.Context(), nil)
	if p := r.Policies[0]; err != nil || r.Duration != 60 || p.Pipelines[0].Offered.Mean != 300 || p.Stages[0].CV.Mean > 0.01 {
		t.Errorf("%v: %g s, %+v, %+v; want 60 s, 300 requests at even distances", err, r.Duration, p.Pipelines[0].Offered, p.Stages[0].CV)
	}
	s.Pipelines[0].Arrivals.Trace.File = "none"
	if _, err = s.Model(nothing); err == nil || !strings.Contains(err.Error(), "pipelines[0].arrivals.trace: no file none") {
		t.Errorf("a file that is not there: %v", err)
	}
}

// TestEventsInOrder checks the order of events: by time, and within one instant by scheduling.
func TestEventsInOrder(t *testing.T) {
	var h events
	for i := range 1000 {
		h.push(int64(i*7919%50), ticks, i, nil)
	}
	last := event{at: -1}
	for range 1000 {
		e := h.pop()
		if !last.before(&e) {
			t.Fatalf("%+v after %+v", e, last)
		}
		last = e
		if len(h.heap) > 900 { // also while more are scheduled
			h.push(e.at, ticks, 0, nil)
		}
	}
}
