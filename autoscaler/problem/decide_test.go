package problem

import (
	"encoding/json"
	"math"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
)

func near(a, b float64) bool { return math.Abs(a-b) < 1e-6 }

// TestPredictionFollowsTheTables checks a pipeline of two stages with two functions each, which are
// routed in equal parts: rates, waits, accuracy and the path.
func TestPredictionFollowsTheTables(t *testing.T) {
	p := read(t, `
policies: {corrector: none, route: even}
nodes: [{name: n, memory: 64Gi, cpu: 64}]
pipelines: [{name: p, slo: 400ms, rate: 8, cv: 1}]
stages:
  - {name: a, next: b, accuracy: 0.9, service: {mean: 100ms}, variants: [{name: a2, accuracy: 0.8, share: 0.5, service: {mean: 50ms}}]}
  - {name: b, service: {mean: 100ms}, variants: [{name: b2, accuracy: 0.5, share: 0.5, service: {mean: 100ms}}]}
`)
	d := decide(t, p, p.Policies, 1)[0]
	sojourn := map[string]float64{}
	for _, l := range d.Functions {
		mean := 0.1
		if l.Function == "a2" {
			mean = 0.05
		}
		if want := mmc(4, mean, l.Count); !near(l.Rate, 4) || !near(l.Share, 0.5) || !near(l.Wait, want) || !near(l.Busy, 4*mean/float64(l.Count)) {
			t.Errorf("%s: got %+v, want half of 8/s and a wait of %v s", l.Function, l, want)
		}
		sojourn[l.Function] = l.Sojourn
	}
	got := d.Pipelines[0]
	if want := (sojourn["a"]+sojourn["a2"])/2 + (sojourn["b"]+sojourn["b2"])/2; !near(got.Sojourn, want) || !near(got.Service, 0.075+0.1) || !near(got.Wait, want-0.175) {
		t.Errorf("got %+v, want a sojourn of %v s", got, want)
	}
	if !near(got.Accuracy, 0.85*0.75) || got.Met == nil || *got.Met != (got.Sojourn <= 0.4) {
		t.Errorf("got %+v, want an accuracy of %v", got, 0.85*0.75)
	}
	if len(d.Tables) != 2 || len(d.Tables[1].Rows) != 3 || d.Tables[1].Rows[0].From != "client" || d.Tables[1].Rows[2].From != "a2" {
		t.Errorf("got tables %+v, want rows of b for the client, a and a2", d.Tables)
	}
}

// TestTheLongestPathCounts checks a graph with two branches.
func TestTheLongestPathCounts(t *testing.T) {
	p := read(t, `
nodes: [{memory: 64Gi, cpu: 64}]
pipelines: [{name: p, slo: 250ms, rate: 1}]
stages:
  - {name: cut, next: [slow, fast], service: {mean: 10ms}}
  - {name: slow, next: end, service: {mean: 200ms}, min: 20}
  - {name: fast, next: end, service: {mean: 50ms}, min: 20}
  - {name: end, service: {mean: 20ms}, min: 20}
`)
	if got := decide(t, p, p.Policies, 1)[0].Pipelines[0]; !near(got.Service, 0.23) || got.Sojourn < 0.23 || got.Sojourn > 0.24 {
		t.Errorf("got %+v, want a service of 230 ms, and little more", got)
	}
}

// TestUnknownServiceTimesAreNamed: a pipeline with one is neither in time nor late.
func TestUnknownServiceTimesAreNamed(t *testing.T) {
	p := read(t, strings.Replace(good, "service: {mean: 20ms}", "min: 1", 1))
	if got := decide(t, p, p.Policies, 1)[0].Pipelines[0]; got.Met != nil || !reflect.DeepEqual(got.Unknown, []string{"t"}) {
		t.Errorf("got %+v, want t to be unknown", got)
	}
}

// TestStepsHaveAMemory makes decisions in a row: a function that nothing calls goes to sleep after
// its idle time, and only then.
func TestStepsHaveAMemory(t *testing.T) {
	p := read(t, `
tick: 1m
nodes: [{name: n, memory: 64Gi, cpu: 64}]
pipelines: [{name: p, rate: 3}, {name: q}]
stages:
  - {name: busy, pipelines: [p], zero: true, zeroAge: 3m, service: {mean: 10ms}}
  - {name: idle, pipelines: [q], zero: true, zeroAge: 3m, min: 1, service: {mean: 10ms}}
`)
	var counts []int
	for i, d := range decide(t, p, p.Policies, 5) {
		if d.Step != i+1 || d.At != float64(60*i) || d.Functions[0].Count != 1 {
			t.Errorf("step %d: got %+v, want one replica of busy after %d minutes", i+1, d, i)
		}
		counts = append(counts, d.Functions[1].Count)
	}
	if want := []int{1, 1, 1, 0, 0}; !reflect.DeepEqual(counts, want) {
		t.Errorf("idle has %v replicas, want %v", counts, want)
	}
	if _, err := p.Decide(p.Policies, 0, nil); err == nil || !strings.Contains(err.Error(), "steps: got 0, want 1 to 1000") {
		t.Errorf("0 steps: %v", err)
	}
}

// TestDecisionsRepeat: two reads of a problem give the same decisions, whichever the policy, and
// each is complete in JSON.
func TestDecisionsRepeat(t *testing.T) {
	text, err := os.ReadFile("testdata/full.yml")
	if err != nil {
		t.Fatal(err)
	}
	for _, allocator := range []string{"sizer", "accuracy", "uniform", "fixed"} {
		var results [2]string
		for i := range results {
			p := read(t, strings.Replace(string(text), "allocator: accuracy, ", "", 1))
			n := p.Policies
			n.Allocator = allocator
			b, err := json.Marshal(decide(t, p, n, 3))
			if err != nil {
				t.Fatal(err)
			}
			results[i] = string(b)
		}
		if results[0] != results[1] {
			t.Errorf("%s: got %s, then %s", allocator, results[0], results[1])
		}
		if strings.Contains(results[0], "null") {
			t.Errorf("%s: %s, want no null", allocator, results[0])
		}
	}
}

// TestTheClockMeasuresThePolicies: the time that a decision took is that between two calls of the
// clock.
func TestTheClockMeasuresThePolicies(t *testing.T) {
	calls := time.Duration(0)
	all, err := read(t, good).Decide(policy.Names{}, 2, func() time.Duration { calls++; return calls * time.Second })
	if err != nil || all[0].Took != 1 || all[1].Took != 1 || calls != 4 {
		t.Errorf("got %+v, %v after %d calls, want one second each", all, err, calls)
	}
}

// TestRunningReplicasTakeTheirPlaces: existing replicas stay where they are, and new ones use the
// room that is left, on devices as well. What does not fit is said.
func TestRunningReplicasTakeTheirPlaces(t *testing.T) {
	p := read(t, `
policies: {corrector: none}
nodes: [{name: n, count: 2, memory: 10Gi, cpu: 8, gpus: 1, gpuMemory: 8Gi}]
pipelines: [{name: p, rate: 40}]
stages: [{name: s, gpu: 1, gpuMemory: 3Gi, memory: 1Gi, min: 9, service: {mean: 10ms}, replicas: [{node: n-2, device: gpu0}]}]
`)
	d := decide(t, p, p.Policies, 1)[0]
	l := d.Functions[0]
	if l.Count != 2 || l.Short == "" || d.Used.Devices != 2 || d.Used.Nodes != 2 || d.Used.Memory != 2<<30 {
		t.Errorf("got %+v, %+v, want two replicas on two devices, and why not nine", l, d.Used)
	}
}
