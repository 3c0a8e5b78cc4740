package sim

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	format "github.com/stagecoach-serving/stagecoach/autoscaler/record"
	loop "github.com/stagecoach-serving/stagecoach/control"
)

// variants is a scenario with two pipelines that share a stage of three functions. Counts are
// fixed, so its figures depend only on routing and on lines.
const variants = `
name: variants
duration: 60s
warmup: 5s
seeds: 2
policies:
- {name: even, allocator: fixed, corrector: none, route: even}
- {name: best, allocator: fixed, corrector: none, rank: least-slack}
nodes: [{memory: 16Gi, cpu: 64}]
pipelines:
- {name: chat, slo: 300ms, arrivals: {rate: "30", cv: 2}, length: {mean: 80, cv: 0.7, max: 500}}
- {name: bulk, slo: 3s, timeout: 10s, weight: 2, items: 3, arrivals: {rate: "3"}, length: {list: [64, 128, 600]}}
stages:
- {name: entry, each: true, next: classify, min: 2, max: 2, service: {mean: 2ms}}
- name: classify
  each: true
  min: 4
  max: 4
  service: {dist: lognormal, mean: 60ms, perLength: 200us, cv: 0.2}
  variants:
  - {name: short, maxLength: 128, min: 2, max: 2, service: {dist: lognormal, mean: 40ms, cv: 0.2}}
  - {name: small, accuracy: 0.8, min: 2, max: 2, service: {dist: lognormal, mean: 20ms, cv: 0.2}, diesEvery: 20s, start: {cold: 500ms}}
`

// TestVariantsGolden compares the figures of a scenario with variants with those that were once
// checked. To accept others, run the test with SIM_GOLDEN=write.
func TestVariantsGolden(t *testing.T) {
	const file = "testdata/variants.txt"
	var got bytes.Buffer
	if err := simulate(t, variants).WriteMarkdown(&got); err != nil {
		t.Fatal(err)
	}
	if os.Getenv("SIM_GOLDEN") == "write" {
		if err := os.WriteFile(file, got.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil || !bytes.Equal(got.Bytes(), want) {
		t.Errorf("%v: got\n%s\nwant\n%s", err, got.Bytes(), want)
	}
}

// fixedLanes has a stage of three lanes with fixed counts.
const fixedLanes = `
duration: 60s
seeds: 1
policies: [{allocator: fixed, corrector: none, route: ROUTE}]
nodes: [{memory: 16Gi, cpu: 64}]
pipelines: [{name: p, arrivals: {rate: "50"}LENGTH}]
stages:
- name: s
  min: 4
  max: 4
  maxLength: MOST
  service: {dist: deterministic, mean: 20ms}
  variants:
  - {name: a, min: 4, max: 4, maxLength: 100, service: {dist: deterministic, mean: 10ms}}
  - {name: b, accuracy: 0.5, min: 4, max: 4, maxLength: MOST, service: {dist: deterministic, mean: 5ms}}
`

// TestSharesOfTheTableAreMet checks that lanes get the shares of the table, give or take the number
// of lanes, and that answers have the accuracy of the lanes that gave them.
func TestSharesOfTheTableAreMet(t *testing.T) {
	p := simulate(t, fill(fixedLanes, "ROUTE", "even", "LENGTH", ", length: {constant: 50}", "MOST", "0")).Policies[0]
	offered := p.Pipelines[0].Offered.Mean
	for i, mean := range map[int]float64{0: 0.01, 1: 0.005, 2: 0.02} {
		s := p.Stages[i]
		if s.Lane == nil || s.Lane.Stage != "s" || math.Abs(s.Lane.Tasks.Mean-offered/3) > 3 || math.Abs(s.Lane.Share.Mean-1./3) > 3/offered || math.Abs(s.Service.Mean-mean) > 1e-6 {
			t.Errorf("%s answered %+v of %g, each in %g s, want a third of them, each in %g s", s.Name, s.Lane, offered, s.Service.Mean, mean)
		}
	}
	if got := p.Pipelines[0].Accuracy.Mean; math.Abs(got-2.5/3) > 0.002 {
		t.Errorf("the accuracy of answers is %g, want a mean of 1, 1 and 0.5", got)
	}
}

// TestLengthsChooseLanes checks that inputs go only to lanes that take their length, that the best
// lane gets those that it takes, and that inputs that no lane takes are dropped.
func TestLengthsChooseLanes(t *testing.T) {
	r := simulate(t, fill(fixedLanes, "ROUTE", "best", "LENGTH", ", length: {list: [50, 50, 150, 250]}", "MOST", "200"))
	p := r.Policies[0]
	x, a, b, s := p.Pipelines[0], p.Stages[0], p.Stages[1], p.Stages[2]
	dropped := float64(x.Drops["length"])
	if dropped != x.Offered.Mean*x.Failed.Mean && math.Abs(dropped-x.Offered.Mean*x.Failed.Mean) > 0.5 || x.Failures["503"] != x.Drops["length"] || math.Abs(dropped/x.Offered.Mean-0.25) > 0.03 {
		t.Errorf("%g of %g requests were dropped, and %v failed, want a quarter, with 503", dropped, x.Offered.Mean, x.Failures)
	}
	if b.Lane.Tasks.Mean != 0 || math.Abs(a.Lane.Share.Mean-2./3) > 0.04 || math.Abs(s.Lane.Share.Mean-1./3) > 0.04 {
		t.Errorf("shares a %g, b %g, s %g, want two thirds, none and one third", a.Lane.Share.Mean, b.Lane.Share.Mean, s.Lane.Share.Mean)
	}
	if a.Lane.MaxLength != 100 || s.Lane.MaxLength != 200 {
		t.Errorf("max-length a %d, s %d, want 100 and 200", a.Lane.MaxLength, s.Lane.MaxLength)
	}
}

// TestOneLaneHasALongestInput checks that a stage without variants drops inputs that are too long.
func TestOneLaneHasALongestInput(t *testing.T) {
	x := simulate(t, strings.NewReplacer("name: p,", "name: p, length: {list: [100, 101]},", "name: s,", "name: s, maxLength: 100,").Replace(good)).Policies[0].Pipelines[0]
	if got := x.Failed.Mean; math.Abs(got-0.5) > 0.05 || x.Drops["length"] == 0 || x.Drops["length"] != x.Failures["503"] {
		t.Errorf("%g of the requests failed, %v, dropped %v, want half of them dropped", got, x.Failures, x.Drops)
	}
}

// TestAccuracyOfAnAnswerIsAProduct checks that the accuracies of an answer's stages are multiplied,
// and that the calls of a stage are averaged.
func TestAccuracyOfAnAnswerIsAProduct(t *testing.T) {
	x := simulate(t, `
duration: 20s
seeds: 1
policies: [{allocator: fixed, corrector: none, route: even}]
nodes: [{memory: 16Gi, cpu: 64}]
pipelines: [{name: p, items: 2, arrivals: {rate: "5"}}]
stages:
- {name: a, next: b, items: 2, accuracy: 0.9, service: {mean: 5ms}}
- {name: b, each: true, accuracy: 0.8, service: {mean: 5ms}, variants: [{name: c, accuracy: 0.4, service: {mean: 5ms}}]}
`).Policies[0].Pipelines[0]
	// the two items of a request go to different lanes
	if got, want := x.Accuracy.Mean, 0.9*0.6; math.Abs(got-want) > 1e-6 {
		t.Errorf("the accuracy of answers is %g, want %g", got, want)
	}
}

// TestLengthsDependOnlyOnTheRequest checks the kinds of lengths: their bounds, their means, that a
// file is played in turn, and that all policies get the same.
func TestLengthsDependOnlyOnTheRequest(t *testing.T) {
	const scenario = `
nodes: [{memory: 16Gi, cpu: 8}]
pipelines: [{name: p, items: 2, arrivals: {rate: "5"}, length: LENGTH}]
stages: [{name: s, service: {mean: 10ms}}]
`
	draw := func(length string, number uint64) (out [2]int64) {
		t.Helper()
		s, err := Parse(strings.NewReader(fill(scenario, "LENGTH", length)))
		if err != nil {
			t.Fatal(err)
		}
		m, err := s.Model(func(string) (io.ReadCloser, error) {
			return io.NopCloser(strings.NewReader("At,Tokens\n1,10\n2,20\n3,30\n")), nil
		})
		if err != nil {
			t.Fatal(err)
		}
		w, err := m.newWorld(0, 1)
		if err != nil {
			t.Fatal(err)
		}
		c := w.coordinators[0]
		c.number = number
		o := c.outline(w)
		return [2]int64{o[0].Bytes, o[1].Bytes}
	}
	if got := draw("{constant: 7}", 5); got != [2]int64{7, 7} {
		t.Errorf("constant: %v", got)
	}
	for number, want := range map[uint64][2]int64{1: {10, 20}, 2: {30, 10}, 3: {20, 30}, 4: {10, 20}} {
		if got := draw("{file: f.csv, column: Tokens}", number); got != want {
			t.Errorf("file: request %d has %v, want %v", number, got, want)
		}
	}
	sum, most := 0.0, int64(0)
	const n = 300
	for number := range uint64(n) {
		got := draw("{mean: 100, cv: 0.5, max: 300}", number+1)
		if got != draw("{mean: 100, cv: 0.5, max: 300}", number+1) || got[0] < 1 || got[1] < 1 {
			t.Fatalf("request %d: %v, and then something else", number, got)
		}
		sum, most = sum+float64(got[0]+got[1]), max(most, got[0], got[1])
	}
	if mean := sum / (2 * n); math.Abs(mean-100) > 6 || most > 300 {
		t.Errorf("lognormal: mean %g, at most %d, want 100 and 300", mean, most)
	}
}

// TestServiceTimesFollowLengths checks that a batch takes longer by its longest input.
func TestServiceTimesFollowLengths(t *testing.T) {
	s := newService(Variant{CPULimit: 1000, Service: Service{Dist: Deterministic, Mean: 10 * time.Millisecond, PerLength: 100 * time.Microsecond, BatchCost: pointer(0.5), CPUShare: 1}})
	for _, tc := range []struct {
		batch, cpu, length int
		want               float64
	}{{1, 0, 0, 10e6}, {1, 0, 100, 20e6}, {3, 0, 100, 40e6}, {1, 2000, 100, 10e6}} {
		if got := s.base(tc.batch, tc.cpu, tc.length); math.Abs(got-tc.want) > 1 {
			t.Errorf("a batch of %d of length %d on %dm takes %g ns, want %g", tc.batch, tc.length, tc.cpu, got, tc.want)
		}
	}
	r := simulate(t, `
duration: 60s
seeds: 1
nodes: [{memory: 16Gi, cpu: 8}]
pipelines: [{name: p, items: 3, arrivals: {rate: "1", cv: 0}, length: {constant: 100}}]
stages: [{name: a, each: true, next: b, min: 3, service: {dist: deterministic, mean: 10ms, perLength: 100us}}, {name: b, service: {dist: deterministic, mean: 10ms, perLength: 100us}}]
`)
	a, b := r.Policies[0].Stages[0], r.Policies[0].Stages[1]
	if math.Abs(a.Service.Mean-0.020) > 1e-6 || math.Abs(b.Service.Mean-0.040) > 1e-6 {
		t.Errorf("one item of length 100 takes %g s, three take %g s, want 0.02 and 0.04", a.Service.Mean, b.Service.Mean)
	}
}

// TestFairRankSharesByWeight checks that two pipelines that both overload a stage share it by their
// weights.
func TestFairRankSharesByWeight(t *testing.T) {
	m := model(t, `
duration: 60s
policies: [{name: fifo, allocator: fixed, corrector: none}, {name: fair, allocator: fixed, corrector: none, rank: fair}]
nodes: [{memory: 16Gi, cpu: 8}]
pipelines:
- {name: heavy, weight: 3, timeout: 1h, arrivals: {rate: "60"}}
- {name: light, timeout: 1h, arrivals: {rate: "60"}}
stages: [{name: s, pipelines: [heavy, light], max: 1, queueLimit: 100000, service: {dist: gamma, mean: 20ms, cv: 0.5}}]
`)
	for i, want := range []float64{1, 3} {
		w, err := m.newWorld(i, 1)
		if err != nil {
			t.Fatal(err)
		}
		until(w, w.end, func(decide func()) { decide() })
		heavy, light := w.rec.pipelines[0].sum.n, w.rec.pipelines[1].sum.n
		if ratio := heavy / light; math.Abs(ratio-want) > 0.1*want || heavy+light < 2900 {
			t.Errorf("%s: in a minute heavy has %g answers and light %g, want %g to 1, and 3000 together", m.scenario.Policies[i].Name, heavy, light, want)
		}
	}
}

// until runs w until an instant. It hands each tick of control to decide.
func until(w *world, end int64, decide func(tick func())) {
	decide(func() { w.tick(true) })
	for _, c := range w.coordinators {
		w.next(c)
	}
	for w.now < end {
		e := w.events.pop()
		w.now, w.clock = e.at, epoch.Add(time.Duration(e.at))
		if e.kind == ticks && w.control.next == e.at {
			decide(func() { w.handle(&e) })
		} else {
			w.handle(&e)
		}
	}
}

// TestLeastSlackMeetsMoreObjectives checks that the order by slack meets more objectives than the
// order of arrival if a stage serves urgent requests and others, and none of these is late.
func TestLeastSlackMeetsMoreObjectives(t *testing.T) {
	r := simulate(t, `
duration: 300s
warmup: 10s
seeds: 2
policies: [{name: fifo, allocator: fixed, corrector: none}, {name: slack, allocator: fixed, corrector: none, rank: least-slack}]
nodes: [{memory: 16Gi, cpu: 8}]
pipelines:
- {name: urgent, slo: 150ms, arrivals: {rate: "20"}}
- {name: patient, slo: 5s, arrivals: {rate: "20", cv: 2}}
stages:
- {name: a, pipelines: [urgent, patient], next: b, max: 1, service: {mean: 20ms}}
- {name: b, pipelines: [urgent, patient], max: 1, service: {mean: 10ms}}
`)
	fifo, slack := r.Policies[0], r.Policies[1]
	if before, after := fifo.Pipelines[0].Attainment.Mean, slack.Pipelines[0].Attainment.Mean; after < before+0.1 {
		t.Errorf("%g of the urgent requests are in time, %g in order of arrival, want more", after, before)
	}
	if got := slack.Pipelines[1].Attainment.Mean; got < 0.99 {
		t.Errorf("%g of the patient requests are in time, want all", got)
	}
}

// TestMoreLoadNeverNeedsFewerReplicas raises the load of a stage with variants. All replicas of the
// stage together must not become fewer.
func TestMoreLoadNeverNeedsFewerReplicas(t *testing.T) {
	const scenario = `
duration: 90s
warmup: 30s
seeds: 1
policies: POLICIES
nodes: [{memory: 16Gi, cpu: 640}]
pipelines: [{name: p, slo: 500ms, arrivals: {rate: "RATE", cv: 0}, length: LENGTH}]
stages:
- name: s
  max: 60
  service: {dist: deterministic, mean: 80ms}
  variants:
  - {name: a, max: 60, maxLength: 100, service: {dist: deterministic, mean: 40ms}}
  - {name: b, max: 60, accuracy: 0.7, service: {dist: deterministic, mean: 20ms}}
`
	for policies, length := range map[string]string{
		"[{name: best, corrector: none}, {name: even, corrector: none, route: even}]": "{list: [50, 200]}",
		"[{name: accuracy, allocator: accuracy}]":                                     "{constant: 50}",
	} {
		before := map[string]float64{}
		for _, rate := range []int{5, 20, 60, 150} {
			for _, p := range simulate(t, fill(scenario, "POLICIES", policies, "LENGTH", length, "RATE", strconv.Itoa(rate))).Policies {
				in := p.Pipelines[0].Attainment.Mean
				if t.Logf("%s at %d/s: %g replicas, %g in time", p.Name, rate, p.Replicas.Mean, in); p.Replicas.Mean < before[p.Name] || in < 0.99 {
					t.Errorf("%s: %g replicas for %d/s, but %g for less; %g in time", p.Name, p.Replicas.Mean, rate, before[p.Name], in)
				}
				before[p.Name] = p.Replicas.Mean
			}
		}
	}
}

// TestReplayDecidesTheSame records the decisions of a run with tables, as `stagecoach up` does, and
// makes them again.
func TestReplayDecidesTheSame(t *testing.T) {
	for policy, name := range []string{"best", "accuracy"} {
		m := model(t, strings.Replace(fill(variants, "min: 2, max: 2", "max: 4", "allocator: fixed", "allocator: sizer"), "- {name: even, allocator: sizer, corrector: none, route: even}\n- {name: best, allocator: sizer, corrector: none, rank: least-slack}",
			"- {name: best, rank: fair}\n- {name: accuracy, allocator: accuracy}", 1))
		w, err := m.newWorld(policy, 1)
		if err != nil {
			t.Fatal(err)
		}
		var file bytes.Buffer
		versions := map[uint64]bool{}
		until(w, w.end, func(tick func()) {
			before := w.control.memory
			tick()
			p, after, _, err := w.set.Decide(w.control.snap, before)
			if err != nil || toJSON(t, after) != toJSON(t, w.control.memory) {
				t.Fatalf("%s: the decision on snapshot %d is another one when it is made again: %v", name, w.control.rev, err)
			}
			for _, table := range p.Tables {
				versions[table.Version] = true
			}
			line := map[string]any{
				"version": format.Version, "policies": w.set.Names(), "snapshot": w.control.snap, "memory": before, "plan": p,
			}
			if err := json.NewEncoder(&file).Encode(line); err != nil {
				t.Fatal(err)
			}
		})
		r, err := loop.ReplayRecord(&file)
		if err != nil || !r.Same() || r.Decisions < 60 || len(versions) == 0 {
			t.Errorf("%s: %v: %d decisions with %d tables, diffs %+v, unread %+v", name, err, r.Decisions, len(versions), r.Diffs, r.Unread)
		}
	}
}

// TestRandomLanes runs random scenarios with variants: every request ends once, figures add up, and
// the same scenario gives the same bytes.
func TestRandomLanes(t *testing.T) {
	for seed := range uint64(12) {
		r := rand.New(rand.NewPCG(seed, 1))
		text := randomLanes(r)
		got := simulate(t, text)
		if toJSON(t, got) != toJSON(t, simulate(t, text)) {
			t.Errorf("seed %d: another result on the second run of\n%s", seed, text)
		}
		for _, p := range got.Policies {
			for _, x := range p.Pipelines {
				failed := 0
				for _, n := range x.Failures {
					failed += n
				}
				if offered := x.Offered.Mean * float64(got.Seeds); x.Offered.Mean == 0 || math.Abs(float64(failed)-x.Failed.Mean*offered) > 0.5 {
					t.Errorf("seed %d: %s: %g offered, %g of them failed, by status %v", seed, x.Name, offered, x.Failed.Mean, x.Failures)
				}
			}
			shares := map[string]float64{}
			for _, s := range p.Stages {
				if s.Lane != nil {
					shares[s.Lane.Stage] += s.Lane.Share.Mean
				}
			}
			for stage, sum := range shares {
				if math.Abs(sum-1) > 1e-4 {
					t.Errorf("seed %d: the shares of %s add up to %g in\n%s", seed, stage, sum, text)
				}
			}
		}
	}
}

// randomLanes returns a scenario of two pipelines over stages with variants.
func randomLanes(r *rand.Rand) string {
	pick := func(all ...string) string { return all[r.IntN(len(all))] }
	function := func(name string) string {
		return "name: " + name + ", service: {dist: gamma, cv: 0.5, mean: " + pick("5ms", "20ms", "60ms") + ", perLength: " + pick("0s", "50us") + "}, start: {cold: " +
			pick("0s", "300ms", "2s") + "}, accuracy: " + pick("0.5", "0.8", "1") + ", maxLength: " + pick("0", "0", "100") + ", batch: " + pick("1", "4") +
			", diesEvery: " + pick("0s", "0s", "10s") + ", queueLimit: " + pick("20", "1000") + ", " + pick("min: 1, max: 6", "max: 3", "zero: true, zeroAge: 2s")
	}
	stage := func(name, next string) string {
		text := "- {" + function(name) + ", each: " + pick("true", "false") + next
		var all []string
		for k := range r.IntN(3) {
			all = append(all, "{"+function(name+strconv.Itoa(k))+"}")
		}
		return text + ", variants: [" + strings.Join(all, ", ") + "]}\n"
	}
	return `
duration: 12s
seeds: 1
budget: ` + pick("0", "12") + `
policies: [{name: one, route: ` + pick("best", "even") + `, rank: ` + pick("fifo", "fair", "least-slack") + `}, {name: two, allocator: accuracy}]
nodes: [{memory: 16Gi, cpu: 64}]
pipelines:
- {name: p, slo: 400ms, timeout: 3s, items: 2, rank: ` + pick("fair", "least-slack") + `, arrivals: {rate: "15", cv: 2}, length: {mean: 60, max: 100}}
- {name: q, weight: 2, timeout: 5s, arrivals: {rate: "5"}, length: ` + pick("{list: [10, 90]}", "{constant: 50}", "{}") + `}
stages:
` + stage("a", ", next: b") + stage("b", "")
}

// TestErrorsOfLanesNameTheField does what TestErrorsNameTheField does, for variants and lengths.
func TestErrorsOfLanesNameTheField(t *testing.T) {
	for name, tc := range map[string]struct{ from, to, want string }{
		"unknown field of a variant": {"name: s,", "name: s, variants: [{name: v, next: x}],", "stages[0].variants[0].next: line 4: no such field, want one of accuracy, autoBatch, batch, batchWait, cpu"},
		"variant without a mean":     {"name: s,", "name: s, variants: [{name: v}],", "stages[0].variants[0].service.mean: 0s, want 1µs to 24h0m0s"},
		"variant without a name":     {"name: s,", "name: s, variants: [{service: {mean: 1s}}],", "stages[0].variants[0].name"},
		"variant with a name taken":  {"name: s,", "name: s, variants: [{name: s, service: {mean: 1s}}],", `stages: "s" twice, want a name of its own`},
		"accuracy":                   {"name: s,", "name: s, accuracy: 1.5,", "stages[0].accuracy: 1.5, want above 0 and at most 1"},
		"accuracy of a variant":      {"name: s,", "name: s, variants: [{name: v, accuracy: -1, service: {mean: 1s}}],", "stages[0].variants[0].accuracy: -1, want above 0"},
		"max-length":                 {"name: s,", "name: s, maxLength: -1,", "stages[0].maxLength: -1, want 0 to"},
		"profile of a variant":       {"name: s,", "name: s, variants: [{name: v, service: {profileFile: x}}],", "stages[0].variants[0].service.profileFile: no file x"},
		"two kinds of length":        {"name: p,", "name: p, length: {constant: 1, mean: 2},", "pipelines[0].length: constant and mean are given, want one of constant, mean, list and file"},
		"length without a kind":      {"name: p,", "name: p, length: {max: 5},", "pipelines[0].length.max: it is given without mean, want both or none"},
		"length of 0":                {"name: p,", "name: p, length: {list: [3, 0]},", "pipelines[0].length.list[1]: 0, want 1 to"},
		"no file of lengths":         {"name: p,", "name: p, length: {file: x},", "pipelines[0].length.file: no file x"},
		"weight":                     {"name: p,", "name: p, weight: 1001,", "pipelines[0].weight: 1001, want 1 to 1000"},
		"allocator":                  {"name: p,", "name: p, allocator: x,", `pipelines[0].allocator: "x", want one of accuracy, accuracy-greedy, accuracy-waits, fixed`},
		"rank":                       {"name: p,", "name: p, rank: x,", `pipelines[0].rank: "x", want one of fair, fifo, least-slack`},
		"route":                      {"name: p,", "name: p, route: x,", `pipelines[0].route: "x", want one of best, even`},
		"rank of a policy":           {"nodes:", "policies: [{rank: x}]\nnodes:", `policies[0]: policy: rank "x", want one of`},
		"per length":                 {"mean: 10ms", "mean: 10ms, perLength: 1h", "stages[0].service.perLength: 1h0m0s, want 0s to 1m0s"},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := Parse(strings.NewReader(strings.Replace(good, tc.from, tc.to, 1)))
			if err == nil {
				_, err = s.Model(nothing)
			}
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
	for text, want := range map[string]string{
		"a,b\n1,2\n": `f: no column "c", want one of a, b`, "": "f: the line of names: EOF", "c\nx\n": `f: line 2: got "x", want a length of 1 to`, "c\n0\n": `f: line 2: got "0"`, "c\n": "f: no lengths",
	} {
		_, err := readLengths("f", "c", func(string) (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(text)), nil })
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want %q", text, err, want)
		}
	}
	if _, err := readLengths("f", "", func(string) (io.ReadCloser, error) { return io.NopCloser(strings.NewReader("1,2\n")), nil }); err == nil || !strings.Contains(err.Error(), "line 1: 2 columns, want one, or the name of a column") {
		t.Errorf("two columns: %v", err)
	}
	if _, err := readLengths("f", "", func(string) (io.ReadCloser, error) { return nil, errors.New("closed") }); err == nil {
		t.Error("a file that cannot be opened is no error")
	}
}

// TestPipelinesChooseTheirPolicies checks that a pipeline's own policies win over the scenario's,
// for its domain alone.
func TestPipelinesChooseTheirPolicies(t *testing.T) {
	m := model(t, `
policies: [{allocator: fixed, corrector: none}]
nodes: [{memory: 16Gi, cpu: 8}]
pipelines: [{name: p, allocator: sizer, rank: fair, route: even, arrivals: {rate: "5"}}, {name: q, arrivals: {rate: "5"}}]
stages:
- {name: s, pipelines: p, service: {mean: 10ms}, variants: [{name: v, service: {mean: 10ms}}]}
- {name: t, pipelines: q, service: {mean: 10ms}}
`)
	w, err := m.newWorld(0, 1)
	if err != nil {
		t.Fatal(err)
	}
	w.tick(true)
	p, _, held, err := w.set.Decide(w.control.snap, nil)
	want := plan.Chosen{Allocator: "sizer", Rank: "fair", Route: "even"}
	if err != nil || held != nil || len(p.Ruled) != 1 || p.Ruled[0].Chosen != want {
		t.Errorf("%v, held %v: %+v, want %+v for the first pipeline's domain", err, held, p.Ruled, want)
	}
	if ranks := [2]string{w.lines[0].owner.rank, w.lines[1].owner.rank}; ranks != [2]string{"fair", ""} {
		t.Errorf("ranks %q, want fair for s alone", ranks)
	}
}
