package recorded

import (
	"bytes"
	"encoding/json"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/autoscaler/record"
	"github.com/stagecoach-serving/stagecoach/bench/load/arrivals"
	"github.com/stagecoach-serving/stagecoach/sim"
)

const ms = time.Millisecond

var begin = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// measured returns a function with the usual measurements.
func measured(name string, rate float64, mean time.Duration, replicas int) plan.Function {
	f := plan.Function{Name: name + ".shop", Min: 1, Max: 9, ZeroAge: time.Minute, Batch: 1, Slots: 1, CPUMilli: 250, Memory: 64 << 20}
	f.Accuracy = 1
	f.Demand = plan.Demand{Known: true, Rate: rate, CV: 2}
	f.Service = plan.Service{Known: true, Mean: mean, CV: 0.5, Batches: []plan.Batched{{Size: 1, Mean: mean, N: 10}}}
	f.Replicas = make([]plan.Replica, replicas)
	f.Starts = []plan.Start{{Path: "process", Mean: 80 * ms, N: 2}}
	return f
}

// moments of a made-up record: one line per second. Pipeline order is a, then b for each item;
// pipeline mail is c, then b. Stage a has a variant, and d gets requests under its own name.
func madeUpLines() []record.Line {
	var out []record.Line
	for i := range 6 {
		a, b, c, d := measured("a", 20, 40*ms, 2), measured("b", 40, 10*ms, 1+i), measured("c", 5, 20*ms, 1), measured("d", 2, 5*ms, 1)
		idle := measured("idle", 0, 5*ms, 1)
		idle.Demand, idle.Service = plan.Demand{}, plan.Service{}
		small := measured("small", 3, 15*ms, 1)
		small.VariantOf, small.Accuracy, small.MaxLength = "a.shop", 0.8, 64
		a.Lengths = []plan.LengthShare{{MaxLength: 64, Share: 0.5}, {Share: 0.5}}
		a.GPU, a.DeviceMemory = 1, 2<<30
		a.Starts = []plan.Start{{Path: "cold", Mean: 3 * time.Second, N: 1}, {Path: "fork", Mean: 200 * ms, N: 4}, {Path: "parked", Mean: 50 * ms, N: 1}}
		a.Items = plan.Items{Known: true, Mean: 2.5}
		b.Batch = 4
		b.Service = plan.Service{Known: true, Mean: 8 * ms, CV: 0.2, Batches: []plan.Batched{{Size: 1, Mean: 10 * ms, N: 30}, {Size: 3, Mean: 18 * ms, N: 10}}}
		c.Profile = []plan.Point{{CPUMilli: 1000, Batch: 1, Length: 8, Mean: 10 * ms, N: 9}, {CPUMilli: 1000, Batch: 1, Length: 64, Mean: 20 * ms, CV: 0.1, N: 9}}
		c.CPULimit = 1000
		at := begin.Add(time.Duration(i) * time.Second)
		s := plan.Snapshot{
			Rev: uint64(i + 1), At: at, Epoch: 1, Budget: 30,
			Nodes: []plan.Node{{
				Name: "n", Memory: 16 << 30, CPUMilli: 8000, Devices: []plan.Device{{ID: "0", Memory: 8 << 30}, {ID: "1", Memory: 4 << 30}},
				Zygotes: []plan.Zygote{{Function: "a.shop", Bytes: 1 << 30}},
			}},
			Functions: []plan.Function{a, b, c, d, idle, small},
			Pipelines: []plan.Pipeline{
				{Name: "mail.shop", Stages: []string{"c.shop", "b.shop"}, Edges: []plan.Edge{{From: 0, To: 1}}, Chosen: plan.Chosen{Allocator: "uniform"}},
				{Name: "order.shop", Stages: []string{"a.shop", "b.shop"}, Edges: []plan.Edge{{From: 0, To: 1, Each: true}}, SLO: time.Second},
			},
		}
		l := record.Line{Version: record.Version, Policies: policy.Names{Allocator: "sizer", Corrector: "none"}, Snapshot: s, Memory: json.RawMessage("[]")}
		l.Traffic = &record.Traffic{From: at.Add(-time.Second), To: at, Apps: []record.App{
			{Name: "d.shop", Arrived: 2, Gaps: []int64{100_000, 300_000}, Answered: 2, InTime: 2, Sum: 20 * ms, Latencies: [][2]int64{{10_000, 2}}},
			{Name: "mail.shop", Arrived: 4, CV: 1, Answered: 3, InTime: 3, Failed: 1, Sum: 90 * ms, Latencies: [][2]int64{{30_000, 3}}},
			{Name: "order.shop", Arrived: 3, Gaps: []int64{1, 500_000, 2}, Answered: 4, InTime: 2, Sum: 4 * time.Second, Latencies: [][2]int64{{500_000, 2}, {1_500_000, 2}}},
		}}
		out = append(out, l)
	}
	return out
}

// encode returns the text of a record.
func encode(lines []record.Line) (out []byte) {
	for i := range lines {
		b, err := json.Marshal(lines[i])
		if err != nil {
			panic(err)
		}
		out = append(append(out, b...), '\n')
	}
	return out
}

func madeUp() []byte { return encode(madeUpLines()) }

// TestARecordBecomesAScenario checks each part of a scenario.
func TestARecordBecomesAScenario(t *testing.T) {
	t.Parallel()
	run := mustRead(t, madeUp(), Options{Trace: "x.csv"})
	s := run.Scenario
	if s.Duration != 6*time.Second || s.Budget != 30 || len(s.Stages) != 4 || len(s.Pipelines) != 3 {
		t.Fatalf("%+v", s)
	}
	if n := s.Nodes; len(n) != 1 || n[0] != (sim.Node{Name: "n", Count: 1, Memory: 16 << 30, CPU: 8000, GPUs: 2, GPUMemory: 4 << 30}) {
		t.Errorf("nodes %+v", n)
	}
	stage := func(name string) sim.Stage {
		return s.Stages[slices.IndexFunc(s.Stages, func(s sim.Stage) bool { return s.Name == name })]
	}
	a, b, c, d := stage("a"), stage("b"), stage("c"), stage("d")
	if a.Start != (sim.Start{Cold: 3 * time.Second, Fork: 200 * ms, Parked: 50 * ms}) || a.Parameters != 1<<30 || a.GPU != 1 || a.GPUMemory != 2<<30 {
		t.Errorf("starts of a: %+v", a)
	}
	if !reflect.DeepEqual(a.Next, []string{"b"}) || a.Each || !b.Each || !reflect.DeepEqual(b.Pipelines, []string{"mail", "order"}) || !reflect.DeepEqual(d.Pipelines, []string{"d"}) {
		t.Errorf("graph: %+v, %+v", a, b)
	}
	if len(a.Variants) != 1 || a.Variants[0].Name != "small" || a.Variants[0].MaxLength != 64 || a.Variants[0].Accuracy != 0.8 {
		t.Errorf("variants %+v", a.Variants)
	}
	if mean := sum(a.Outputs.List) / 10; mean != 2.5 {
		t.Errorf("items %v, want 2.5 on average", a.Outputs.List)
	}
	// 10 ms for one call, 4 ms for each further one
	if b.Service.Mean != 10*ms || *b.Service.BatchCost != 0.4 || b.Batch != 4 || a.Service.Mean != 40*ms || *a.Service.CV != 0.5 {
		t.Errorf("service %+v, cost %v", b.Service, *b.Service.BatchCost)
	}
	if want := []sim.Point{{CPU: 1000, Batch: 1, Mean: 20 * ms, CV: 0.1}}; !reflect.DeepEqual(c.Service.Profile, want) {
		t.Errorf("profile %+v, want the slower length", c.Service.Profile)
	}
	order := s.Pipelines[2]
	if order.Name != "order" || order.SLO != time.Second || order.Arrivals.Trace != (sim.Trace{File: "x.csv", Format: arrivals.Instants, Column: "order"}) {
		t.Errorf("pipelines %+v", s.Pipelines)
	}
	if l := order.Length.List; len(l) != 50 || slices.Max(l) != 65 || slices.Min(l) != 64 {
		t.Errorf("lengths %v", l)
	}
	if x := s.Pipelines[1].Allocator; x != "uniform" || !slices.ContainsFunc(run.Notes, func(n string) bool { return strings.HasPrefix(n, "mail asks for the allocator uniform") }) {
		t.Errorf("allocator %q, notes %q", x, run.Notes)
	}
	want := []sim.Replicas{{Stage: "a", Count: 2}, {Stage: "b", Count: 4}, {Stage: "c", Count: 1}, {Stage: "d", Count: 1}, {Stage: "small", Count: 1}}
	if len(s.Policies) != 3 || s.Policies[0].Corrector != "none" || !reflect.DeepEqual(s.Policies[1].Replicas, want) || s.Policies[2].Name != "quart" {
		t.Errorf("policies %+v", s.Policies)
	}
}

func sum(values []int) (out float64) {
	for _, v := range values {
		out += float64(v)
	}
	return out
}

// TestWhatHappenedIsCounted checks the outcome, and that arrivals come when they came.
func TestWhatHappenedIsCounted(t *testing.T) {
	t.Parallel()
	run := mustRead(t, madeUp(), Options{Pipeline: "order"})
	o := run.Outcome
	if len(o.Pipelines) != 2 || o.Seconds != 5 { // mail shares b
		t.Fatalf("%+v", o)
	}
	order, mail := o.Pipelines[1], o.Pipelines[0]
	// a 2, small 1, and b 2 to 6, since the line before
	if order.Requests != 18 || order.InTime != 0.5 || order.Mean != 1 || order.Failed != 0 || order.ReplicaSeconds != 5*(2+1)+2+3+4+5+6 {
		t.Errorf("%+v", order)
	}
	if mail.Requests != 24 || mail.Failed != 0.25 || mail.InTime != 0.75 || math.Abs(mail.P50-0.03) > 0.03/64 || math.Abs(order.P99-1.5) > 1.5/64 {
		t.Errorf("%+v", mail)
	}
	var at []time.Duration
	for _, a := range run.Arrivals {
		if a.Pipeline == "order" {
			at = append(at, a.At)
		}
		if second := a.At.Truncate(time.Second); a.Pipeline == "mail" && second > 5*time.Second {
			t.Errorf("a request of mail after %v", a.At)
		}
	}
	if want := []time.Duration{time.Microsecond, 500001 * time.Microsecond, 500003 * time.Microsecond, time.Second + time.Microsecond}; !slices.Equal(at[:4], want) {
		t.Errorf("arrivals at %v, want %v", at[:4], want)
	}
}

// TestMissingLinesAreFilledByRates checks lines that were dropped, and a restart.
func TestMissingLinesAreFilledByRates(t *testing.T) {
	t.Parallel()
	lines := madeUpLines()
	run := mustRead(t, encode(append(lines[:2:2], lines[4:]...)), Options{Pipeline: "order"})
	order := run.Outcome.Pipelines[1]
	if order.Requests != 4*3+2*20 { // two seconds at 20 per second
		t.Errorf("%d requests, want 52", order.Requests)
	}
	if !slices.ContainsFunc(run.Notes, func(n string) bool {
		return strings.HasPrefix(n, "The arrivals of 2s of 6s are made from measured rates")
	}) {
		t.Errorf("notes %q", run.Notes)
	}
	for i := range lines[3:] {
		lines[3+i].Snapshot.Epoch = 2
		lines[3+i].Traffic.From, lines[3+i].Traffic.To = lines[3+i].Traffic.From.Add(time.Hour), lines[3+i].Traffic.To.Add(time.Hour)
		lines[3+i].Snapshot.At = lines[3+i].Snapshot.At.Add(time.Hour)
	}
	run = mustRead(t, encode(lines), Options{Pipeline: "order"})
	if order := run.Outcome.Pipelines[1]; order.Requests != 18 || run.Outcome.Seconds != 4 || order.ReplicaSeconds != 4*3+2+3+5+6 {
		t.Errorf("after a restart: %+v in %v s, want nothing in between", order, run.Outcome.Seconds)
	}
}

// TestAStaticStageCanAnswer checks the fixed numbers of functions that had nearly no replicas.
func TestAStaticStageCanAnswer(t *testing.T) {
	t.Parallel()
	lines := madeUpLines()
	for i := range lines {
		stage, variant := &lines[i].Snapshot.Functions[2], &lines[i].Snapshot.Functions[5]
		stage.Zero, stage.Min, stage.Replicas, variant.Replicas = true, 0, nil, nil
		variant.Zero, variant.Min = true, 0
	}
	run := mustRead(t, encode(lines), Options{Trace: "x", Policies: []string{"static"}})
	for name, want := range map[string]int{"c": 1, "small": 0} {
		if got := run.Scenario.Policies[0].Replicas; !slices.Contains(got, sim.Replicas{Stage: name, Count: want}) {
			t.Errorf("%+v, want %d of %s", got, want, name)
		}
	}
}

// TestARateIsNotTakenTwice checks lines without counts of pipelines that begin with one function,
// which also gets requests under its own name.
func TestARateIsNotTakenTwice(t *testing.T) {
	t.Parallel()
	lines := madeUpLines()
	for i := range lines {
		s := &lines[i].Snapshot
		s.Pipelines = append(s.Pipelines, plan.Pipeline{Name: "other.shop", Stages: []string{"a.shop"}})
		if i != 2 {
			lines[i].Traffic.Apps = []record.App{{Name: "a.shop", Arrived: 1, Gaps: []int64{1}}}
		} else {
			lines[i].Traffic = nil
		}
	}
	run := mustRead(t, encode(lines), Options{Trace: "x", Pipeline: "order"})
	counts := map[string]int{}
	for _, a := range run.Arrivals {
		counts[a.Pipeline]++
	}
	// one second at 20 per second, in two parts; mail's rate is 5, and no other pipeline begins with c
	if counts["a"] != 5 || counts["order"] != 10 || counts["other"] != 10 || counts["mail"] != 5 {
		t.Errorf("%v", counts)
	}
	if !slices.ContainsFunc(run.Notes, func(n string) bool { return strings.HasPrefix(n, "other begins with a as other pipelines do") }) {
		t.Errorf("notes %q", run.Notes)
	}
	for i := range lines {
		lines[i].Traffic = nil
		lines[i].Snapshot.Functions[2].Demand.Rate = 0.4
	}
	if got := mustRead(t, encode(lines), Options{Trace: "x", Pipeline: "mail"}).Outcome.Pipelines[0]; got.Name != "mail" || got.Requests != 2 {
		t.Errorf("%+v, want 2 requests in 5 s at 0.4 per second", got)
	}
	lines[2].Snapshot.Functions[0].Demand.Rate = 2e8
	if _, err := Read(bytes.NewReader(encode(lines)), Options{Trace: "x"}); err == nil || !strings.Contains(err.Error(), "want at most 50000000 requests in all") {
		t.Errorf("an endless rate: %v", err)
	}
}

// TestCountsAreSpreadExactly checks arrivals whose instants are unknown.
func TestCountsAreSpreadExactly(t *testing.T) {
	t.Parallel()
	lines := madeUpLines()
	const n = 20_000
	for i := range lines {
		lines[i].Traffic.Apps[1] = record.App{Name: "mail.shop", Arrived: n, CV: 2, Answered: 1}
	}
	run := mustRead(t, encode(lines), Options{Pipeline: "mail"})
	var gaps []float64
	last, counts := time.Duration(0), make([]int, 6)
	for _, a := range run.Arrivals {
		if a.Pipeline == "mail" {
			counts[int(a.At/time.Second)]++
			gaps, last = append(gaps, (a.At-last).Seconds()), a.At
		}
	}
	if slices.ContainsFunc(counts, func(k int) bool { return k != n }) {
		t.Errorf("%v, want %d per second", counts, n)
	}
	mean, squares := 0.0, 0.0
	for _, g := range gaps {
		mean, squares = mean+g/float64(len(gaps)), squares+g*g/float64(len(gaps))
	}
	if cv := math.Sqrt(squares/(mean*mean) - 1); math.Abs(cv-2) > 0.1 {
		t.Errorf("CV %v, want 2", cv)
	}
}

// TestWhatIsUnknownIsSaid checks the notes on what the record lacks.
func TestWhatIsUnknownIsSaid(t *testing.T) {
	t.Parallel()
	lines := madeUpLines()
	for i := range lines {
		s := &lines[i].Snapshot
		s.Functions[0].Lengths, s.Nodes[0].Zygotes = nil, nil
		s.Functions[1].Service, s.Functions[1].Starts = plan.Service{}, nil
		s.Functions[3].Starts = []plan.Start{{Path: "fork", Mean: ms, N: 1}}
		s.Functions[5].Service = plan.Service{}
		s.Functions[5].Learned = plan.Learned{Known: true, Mean: 7 * ms, CV: 0.1}
		s.Pipelines = append(s.Pipelines, plan.Pipeline{Name: "quiet.shop", Stages: []string{"idle.shop"}}, plan.Pipeline{Name: "torn.shop", Stages: []string{"idle.shop", "gone.shop"}})
		lines[i].Policies.Rank = []string{"fifo", "fair"}[i%2]
	}
	run := mustRead(t, encode(lines), Options{Trace: "x"})
	for _, want := range []string{
		"a: the lengths of its inputs are unknown", "a: the size of its parameters is unknown", "b has never answered", "b: no start was measured",
		"d: no cold start was measured", "small: no service time was measured in this time; the learned one", "quiet is left out: no request", "torn.shop is left out",
		"The policies were changed", "The devices of node n have different memories",
	} {
		if !slices.ContainsFunc(run.Notes, func(n string) bool { return strings.HasPrefix(n, want) }) {
			t.Errorf("no note %q in %q", want, run.Notes)
		}
	}
	if r := simulate(t, run, run.Scenario); r.Policies[0].Pipelines[0].Offered.Mean == 0 {
		t.Error("nothing was simulated")
	}
}
