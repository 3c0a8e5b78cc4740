package sim

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// pages is a stage with a random number of outputs, and a stage that has one call per output.
const pages = `
duration: 60s
seeds: 1
policies: [{allocator: fixed, corrector: none}]
nodes: [{memory: 16Gi, cpu: 64}]
pipelines: [{name: p, slo: 400ms, arrivals: {rate: "20"}}]
stages:
- {name: find, next: [read], OUTPUTS, min: 4, max: 4, service: {dist: deterministic, mean: 10ms}}
- name: read
  each: true
  autoBatch: true
  batch: 8
  min: 1
  max: 1
  service: {dist: deterministic, profile: [{cpu: 1000, batch: 1, mean: 12ms}, {cpu: 1000, batch: 2, mean: 16ms}, {cpu: 1000, batch: 4, mean: 24ms}, {cpu: 1000, batch: 8, mean: 40ms}]}
`

// finished returns the world of the scenario's first policy and seed after its run, with the
// decision of the last tick.
func finished(t *testing.T, scenario string) *world {
	t.Helper()
	w, err := model(t, scenario).newWorld(0, 1)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.run(t.Context(), func() {}); err != nil {
		t.Fatal(err)
	}
	return w
}

// TestNumbersOfOutputsAreRandom checks how many calls the next stage gets, what the learner learns
// of that, and that policies see it.
func TestNumbersOfOutputsAreRandom(t *testing.T) {
	for outputs, mean := range map[string]float64{
		"outputs: {list: [0, 1, 2, 5]}": 2, "outputs: {mean: 3, cv: 0.5}": 3, "outputs: {constant: 2}": 2, "items: 4": 4, "outputs: {list: [0]}": 0,
	} {
		scenario := fill(pages, "OUTPUTS", outputs)
		p := simulate(t, scenario).Policies[0]
		find, read := p.Stages[0], p.Stages[1]
		if got := read.Rate.Mean / find.Rate.Mean; math.Abs(got-mean) > 0.1*max(mean, 1) && mean > 0 || p.Pipelines[0].Failed.Mean > 0 {
			t.Errorf("%s: %.3g calls per request, %g failed, want %g and none", outputs, got, p.Pipelines[0].Failed.Mean, mean)
		}
		w := finished(t, scenario)
		app, known := w.control.learning.learner.App("p.sim", w.clock)
		if !known || len(app.Stages) != 2 && mean > 0 || len(app.Stages[0].Next) != 1 || math.Abs(app.Stages[0].Next[0].Factor-mean) > 0.1*max(mean, 1) {
			t.Errorf("%s: learned %+v, want a factor of %g", outputs, app.Stages, mean)
		}
		if f := w.control.snap.Functions[0]; !f.Learned.Known || math.Abs(f.Learned.Factor-mean) > 0.1*max(mean, 1) || math.Abs(f.Learned.Mean.Seconds()-0.01) > 0.001 {
			t.Errorf("%s: policies know %+v, want 10 ms and a factor of %g", outputs, f.Learned, mean)
		}
	}
	scenario := fill(pages, "OUTPUTS", "outputs: {mean: 3, cv: 0.5}", "duration: 60s", "duration: 10s")
	if a, b := toJSON(t, simulate(t, scenario)), toJSON(t, simulate(t, scenario)); a != b {
		t.Error("two runs of a seed differ")
	}
}

// TestAutoBatchesFollowTheProfile checks that batches are as large as the profile and the objective
// allow, that a smaller batch of a plan holds, and that a batch takes the time of one run.
func TestAutoBatchesFollowTheProfile(t *testing.T) {
	w := finished(t, fill(pages, "OUTPUTS", "outputs: {list: [0, 4, 8]}"))
	read := w.control.snap.Functions[1]
	// find takes 10 ms and read 12 ms, so read's share of 400 ms is 218 ms, and 40 ms fit in half.
	largest := read.Service.Batches[len(read.Service.Batches)-1] // of a class of sizes
	if want := 8*time.Millisecond + 4*time.Millisecond*time.Duration(largest.Size); read.Batch != 8 || largest.Size < 6 || largest.Size > 8 || (largest.Mean-want).Abs() > 4*time.Millisecond {
		t.Errorf("batch %d, times %v, want 8, and %v", read.Batch, read.Service.Batches, want)
	}
	if read.AutoBatch != 8 || !read.Items.Known {
		t.Errorf("policies see %+v", read)
	}
	tight := finished(t, fill(pages, "OUTPUTS", "outputs: {list: [0, 4, 8]}", "slo: 400ms", "slo: 100ms", "duration: 60s", "duration: 20s"))
	if got := tight.control.snap.Functions[1].Batch; got != 4 {
		t.Errorf("batch %d, want 4: half of the share is 27 ms", got)
	}
	// Four replicas with single calls take 4/12 ms = 333 calls per second, and 80 arrive.
	small := fill(pages, "OUTPUTS", "outputs: {list: [0, 4, 8]}", "slo: 400ms, ", "", "min: 1\n  max: 1", "min: 4\n  max: 4")
	for _, b := range finished(t, small).control.snap.Functions[1].Service.Batches {
		if b.Size > 1 {
			t.Errorf("a batch of %d without an objective, want 1", b.Size)
		}
	}
}

// TestBatchesWaitToFill checks that a batch waits for its other calls, and no longer.
func TestBatchesWaitToFill(t *testing.T) {
	const scenario = `
duration: 100s
seeds: 1
hop: 0s
policies: [{allocator: fixed, corrector: none}]
nodes: [{memory: 16Gi, cpu: 64}]
pipelines: [{name: p, arrivals: {rate: "0.5"}}]
stages: [{name: s, batch: 4, batchWait: 50ms, service: {dist: deterministic, mean: 10ms}}]
`
	if got := simulate(t, scenario).Policies[0].Pipelines[0].P50.Mean; math.Abs(got-0.060) > 0.001 {
		t.Errorf("a lonely call takes %.4f s, want 50 ms of waiting and 10 ms", got)
	}
	busy := simulate(t, strings.NewReplacer(`"0.5"`, `"200"`, "mean: 10ms", "mean: 10ms, batchCost: 0.1", "name: s,", "name: s, min: 2, max: 2,").Replace(scenario)).Policies[0]
	if got := busy.Stages[0].Wait.Mean; got > 0.030 || got < 0.005 {
		t.Errorf("calls wait for %.4f s, want about the 10 ms in which the next two come", got)
	}
}

// TestErrorsOfBatchesNameTheField checks that each error has the path and what was wanted.
func TestErrorsOfBatchesNameTheField(t *testing.T) {
	for field, want := range map[string]string{
		"outputs: {list: [-1]}":                   "stages[0].outputs.list[0]: -1, want",
		"outputs: {mean: 1, constant: 2}":         "stages[0].outputs: constant and mean are given, want one",
		"outputs: {file: x}":                      `stages[0].outputs.file: "x", want constant, mean or list`,
		"outputs: {mean: 20000}":                  "stages[0].outputs.mean: 20000, want",
		"outputs: {cv: 1}":                        "stages[0].outputs.cv: it is given without mean",
		"items: 3, outputs: {constant: 2}":        "stages[0].items: 3 beside outputs, want one of both",
		"autoBatch: true":                         "stages[0].autoBatch: true without a profile, want service.profile",
		"batchWait: 2s":                           "stages[0].batchWait: 2s, want",
		"variants: [{name: v, batchWait: -1ms, }": "batchWait",
	} {
		if strings.HasPrefix(field, "variants") {
			field += "]"
		}
		s, err := Parse(strings.NewReader(strings.Replace(good, "name: s,", "name: s, "+field+",", 1)))
		if err == nil {
			_, err = s.Model(nothing)
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", field, err, want)
		}
	}
}

// TestSnapshotsHaveAllMeasurements checks that policies of a simulation see every measurement that
// those of the product see.
func TestSnapshotsHaveAllMeasurements(t *testing.T) {
	m := model(t, fill(variants, "min: 2, max: 2", "max: 4"))
	w, err := m.newWorld(0, 1)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.run(t.Context(), func() {}); err != nil {
		t.Fatal(err)
	}
	w.observe()
	for i, l := range w.lines {
		is, f := l.lane.Signals(w.clock), w.control.snap.Functions[i]
		seen := plan.Signals{
			Demand: f.Demand, Stage: f.Stage, Lengths: f.Lengths, Service: f.Service, Items: f.Items, Wait: f.Wait, Busy: f.Busy, Waiting: f.Waiting, Running: f.Running,
		}
		if toJSON(t, is) != toJSON(t, seen) {
			t.Errorf("%s: measured %+v, policies see %+v", l.key, is, seen)
		}
		if len(l.owner.lines) > 1 && !is.Stage.Last.After(epoch) || !is.Items.Known {
			t.Errorf("%s measured nothing of its stage: %+v", l.key, is)
		}
	}
}

// TestAccuracyKnowsLengths checks that the mixer gives enough replicas to the lane that takes long
// inputs, however many inputs are long.
func TestAccuracyKnowsLengths(t *testing.T) {
	for list, least := range map[string]float64{"[50, 50, 50, 50, 50, 50, 50, 50, 50, 300]": 0.97, "[50, 300]": 0.97, "[50, 300, 300, 300, 300, 300, 300, 300, 300, 300]": 0.95} {
		p := simulate(t, fill(`
duration: 60s
warmup: 20s
seeds: 1
budget: 24
policies: [{allocator: accuracy}]
nodes: [{memory: 64Gi, cpu: 64}]
pipelines: [{name: p, slo: 400ms, length: {list: LIST}, arrivals: {rate: "100"}}]
stages:
- name: s
  max: 24
  accuracy: 0.9
  service: {dist: lognormal, mean: 150ms, cv: 0.3}
  start: {cold: 1s}
  variants:
  - {name: best, accuracy: 0.99, maxLength: 128, max: 24, service: {dist: lognormal, mean: 80ms, cv: 0.3}, start: {cold: 1s}}
  - {name: quick, accuracy: 0.8, max: 24, service: {dist: lognormal, mean: 40ms, cv: 0.3}, start: {cold: 1s}}
`, "LIST", list)).Policies[0].Pipelines[0]
		if p.Attainment.Mean < least || p.Accuracy.Mean < 0.9 {
			t.Errorf("lengths %s: %.3f in time with accuracy %.3f, want %g and 0.9", list, p.Attainment.Mean, p.Accuracy.Mean, least)
		}
	}
}
