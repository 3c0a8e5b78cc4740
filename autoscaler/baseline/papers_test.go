package baseline

import (
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan/plantest"
	"github.com/stagecoach-serving/stagecoach/internal/golden"
)

// anyPlan returns a plan for some of the functions of plantest's worlds.
func anyPlan() InferLinePlan {
	p := InferLinePlan{Stages: map[string]InferLineProvision{}, Service: 500 * time.Millisecond, Rate: 10}
	for i := range 8 {
		p.Stages[fmt.Sprintf("f%02d.ns", i)] = InferLineProvision{Count: 1 + i, Batch: 1 + i%3, Throughput: float64(2 + i), Ratio: 0.1 * float64(1+i)}
	}
	for i := range (plan.Envelope{}) {
		p.Envelope = append(p.Envelope, 30-float64(i))
	}
	return p
}

func TestINFlessIsAnAllocator(t *testing.T) {
	t.Parallel()
	plantest.Run(t, NewINFless(INFlessConfig{}))
}

func TestInferLineIsAnAllocator(t *testing.T) {
	t.Parallel()
	plantest.Run(t, NewInferLine(InferLineConfig{Plan: anyPlan()}))
}

// TestCocktailIsAnAllocator uses a period that is short enough for forecasts in the suite's
// histories.
func TestCocktailIsAnAllocator(t *testing.T) {
	t.Parallel()
	plantest.Run(t, NewCocktail(CocktailConfig{Period: 2 * time.Second, Keep: 2}))
}

// fluidRow is a row of stages whose tasks are a fluid. Arrivals that ready replicas cannot serve
// wait, and reach the next stage later.
type fluidRow[M any] struct {
	policy plan.Allocator[M]
	slo    time.Duration
	times  []time.Duration
	batch  []time.Duration // times of the first stage's batches; nil: each stage has one
	zero   bool
	start  time.Duration
	load   func(second int) float64
	length int // seconds
}

var began = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// run returns each line whose count or batch changed, and what the replicas cost.
func (x fluidRow[M]) run(t *testing.T, about string) string {
	t.Helper()
	s := plan.Snapshot{Nodes: []plan.Node{{Name: "node"}}, Pipelines: []plan.Pipeline{{Name: "p", SLO: x.slo}}}
	for i, d := range x.times {
		name := string(rune('a' + i))
		f := plan.Function{Name: name, Revision: 1, Min: 1, Max: 40, Batch: 1, Slots: 1, Zero: x.zero, Service: plan.Service{Known: true, Mean: d}}
		f.Replicas = []plan.Replica{{Name: "0", Revision: 1, Node: "node", State: plan.Ready, Since: began}}
		for k, b := range x.batch {
			f.Batch = k + 1
			f.Profile = append(f.Profile, plan.Point{CPUMilli: 1000, Batch: k + 1, Mean: b, N: 10})
		}
		s.Functions, s.Pipelines[0].Stages = append(s.Functions, f), append(s.Pipelines[0].Stages, name)
	}
	var out strings.Builder
	fmt.Fprintf(&out, "# %s\n", about)
	var m M
	var used, waited float64
	last := map[string]plan.Line{}
	lines, named := make([]float64, len(x.times)), 0
	rates := make([][]float64, len(x.times)) // of the last minute
	for second := range x.length {
		s.At, s.Rev = began.Add(time.Duration(second)*time.Second), s.Rev+1
		in := x.load(second)
		for i := range s.Functions {
			f := &s.Functions[i]
			for r := range f.Replicas {
				if s.At.Sub(f.Replicas[r].Since) >= x.start {
					f.Replicas[r].State = plan.Ready
				}
			}
			ready, starting := f.Current()
			used += float64(ready + starting)
			serves := float64(ready*f.Batch) / batchTime(f, f.Batch)
			flow := min(in+lines[i], serves)
			lines[i] += in - flow
			rates[i] = append(rates[i], in)
			x.signals(f, rates[i], lines[i], serves, s.At)
			f.Busy = plan.Busy{Known: true, Share: min(flow/max(serves, 1e-9), 1)}
			f.Running = int(math.Round(f.Busy.Share * float64(ready*f.Batch)))
			waited += lines[i]
			in = flow
		}
		a, next, err := x.policy.Allocate(s, plan.Domains(s)[0], m)
		if err != nil {
			t.Fatal(err)
		}
		m = next
		for i, l := range a {
			f := &s.Functions[i]
			f.Replicas = f.Replicas[:min(len(f.Replicas), l.Count)]
			for len(f.Replicas) < l.Count {
				named++
				f.Replicas = append(f.Replicas, plan.Replica{Name: fmt.Sprint(named), Revision: 1, Node: "node", State: plan.Starting, Since: s.At})
			}
			if was := last[l.Function]; was.Count != l.Count || was.Batch != l.Batch {
				fmt.Fprintf(&out, "t=%ds %s %d -> %d of %d (%s)\n", second, l.Function, was.Count, l.Count, l.Batch, l.Why)
				last[l.Function] = l
			}
		}
	}
	fmt.Fprintf(&out, "%.0f replica-seconds, %.0f task-seconds of waiting\n", used, waited)
	return out.String()
}

// signals sets what is measured of a stage: its rate faded over five seconds, its envelope of whole
// seconds, and its line.
func (x fluidRow[M]) signals(f *plan.Function, rates []float64, line, serves float64, now time.Time) {
	d := &f.Demand
	d.Known, d.Rate = true, d.Rate+(rates[len(rates)-1]-d.Rate)*(1-math.Exp(-0.2))
	if d.Rate < 0.01 {
		d.Rate = 0
	}
	if rates[len(rates)-1] > 0 {
		d.Last = now
	}
	rates = rates[max(len(rates)-60, 0):]
	for i := range d.Envelope {
		width := max(int(d.Envelope.Stretch(i)/time.Second), 1)
		var most float64
		for k := range rates {
			var sum float64
			for _, r := range rates[max(k-width+1, 0) : k+1] {
				sum += r
			}
			most = max(most, sum)
		}
		d.Envelope[i] = int(math.Round(most * min(d.Envelope.Stretch(i).Seconds(), 1)))
		if width > 1 {
			d.Envelope[i] = int(math.Round(most))
		}
	}
	wait := time.Duration(line / max(serves, 1) * 1e9)
	f.Waiting, f.Wait = int(line), plan.Wait{Known: true, Mean: wait, P99: wait}
	if f.Waiting > 0 {
		f.Wait.Oldest = wait
	}
}

func between(from, to int, low, high float64) func(int) float64 {
	return func(second int) float64 {
		if from <= second && second < to {
			return high
		}
		return low
	}
}

// TestPapersMatchGoldenSeries compares the decisions of the papers' policies, second by second,
// with golden files.
func TestPapersMatchGoldenSeries(t *testing.T) {
	row := []time.Duration{100 * time.Millisecond, 200 * time.Millisecond, 100 * time.Millisecond}
	for name, x := range map[string]struct {
		about string
		load  func(int) float64
	}{
		"step":  {"6, then 24 for two minutes, then 6 requests a second; a replica is ready after 4 s.", between(20, 140, 6, 24)},
		"burst": {"4 requests a second, 40 for three seconds; a replica is ready after 4 s.", between(20, 23, 4, 40)},
	} {
		t.Run(name, func(t *testing.T) {
			sample := make([]time.Duration, 0, 360)
			for i := range 360 { // 6 per second; the two groups of three are half a second apart
				sample = append(sample, time.Duration(i/3)*500*time.Millisecond+time.Duration(i%3)*20*time.Millisecond)
			}
			var stages []InferLineStage
			for i, d := range row {
				stages = append(stages, InferLineStage{Function: string(rune('a' + i)), Batches: []time.Duration{d}, Max: 40})
			}
			planned, err := PlanInferLine(stages, sample, 800*time.Millisecond, 0.99, 0)
			if err != nil {
				t.Fatal(err)
			}
			const slo, start, length = 800 * time.Millisecond, 4 * time.Second, 300
			whole := []time.Duration{400 * time.Millisecond}
			for policy, got := range map[string]string{
				"infless":   fluidRow[INFlessMemory]{NewINFless(INFlessConfig{}), slo, whole, nil, false, start, x.load, length}.run(t, x.about),
				"inferline": fluidRow[InferLineMemory]{NewInferLine(InferLineConfig{Plan: planned}), slo, row, nil, false, start, x.load, length}.run(t, x.about),
				"cocktail":  fluidRow[CocktailMemory]{NewCocktail(CocktailConfig{}), slo, row, nil, false, start, x.load, length}.run(t, x.about),
			} {
				golden.Compare(t, policy+"-"+name+".txt", got)
			}
		})
	}
}

// TestBatchTimeInterpolatesBetweenSizes checks times from profiles and from measurements. Beyond
// the measured sizes, the time per call stays the same.
func TestBatchTimeInterpolatesBetweenSizes(t *testing.T) {
	at := func(cpu, batch, ms int) plan.Point {
		return plan.Point{CPUMilli: cpu, Batch: batch, Mean: time.Duration(ms) * time.Millisecond}
	}
	profile := []plan.Point{at(1000, 2, 80), at(1000, 4, 120), at(2000, 2, 40)}
	mean := plan.Service{Known: true, Mean: 30 * time.Millisecond}
	lately := plan.Service{Known: true, Mean: 30 * time.Millisecond, Batches: []plan.Batched{{Size: 2, Mean: 50 * time.Millisecond, N: 9}}}
	for _, tc := range []struct {
		about string
		f     plan.Function
		size  int
		want  float64
	}{
		{"nothing is known", plan.Function{}, 3, 0},
		{"a call's share", plan.Function{Service: mean}, 3, 0.09},
		{"half of two", plan.Function{Service: lately}, 1, 0.025},
		{"twice two", plan.Function{Service: lately}, 4, 0.1},
		{"as profiled, not as measured", plan.Function{Service: lately, Profile: profile, CPULimit: 1000}, 2, 0.08},
		{"between", plan.Function{Profile: profile, CPULimit: 1000}, 3, 0.1},
		{"twice four", plan.Function{Profile: profile, CPULimit: 1100}, 8, 0.24},
		{"all the CPU there is", plan.Function{Profile: profile}, 2, 0.04},
	} {
		if got := batchTime(&tc.f, tc.size); math.Abs(got-tc.want) > 1e-9 {
			t.Errorf("%s: %g s, want %g s", tc.about, got, tc.want)
		}
	}
}

// TestINFlessChoosesTheBatchWithTheMostThroughput checks results that were computed by hand.
// Batches take 100, 120, 150 and 190 ms, in two slots.
func TestINFlessChoosesTheBatchWithTheMostThroughput(t *testing.T) {
	f := plan.Function{Name: "f", Batch: 4, Slots: 2}
	for i, ms := range []int{100, 120, 150, 190} {
		f.Profile = append(f.Profile, plan.Point{CPUMilli: 1000, Batch: i + 1, Mean: time.Duration(ms) * time.Millisecond})
	}
	p := NewINFless(INFlessConfig{})
	for _, tc := range []struct {
		about        string
		slo          float64
		batch        int
		most, fewest float64
	}{
		{"three in 150 ms, 20/s a slot, and 3 in 220 ms at least: four take more than half", 0.37, 3, 40, 6 / 0.22},
		{"four, as 190 ms are half of it", 0.38, 4, 8 / 0.19, 8 / 0.19},
		{"one alone, as two take more than half", 0.2, 1, 20, 0},
		{"one, though it is late whatever is done", 0.05, 1, 20, 0},
	} {
		batch, up, low := p.instance(&f, tc.slo)
		if batch != tc.batch || math.Abs(up-tc.most) > 1e-9 || math.Abs(low-tc.fewest) > 1e-9 {
			t.Errorf("%s: batches of %d, %.4g to %.4g/s, want %d, %.4g to %.4g/s", tc.about, batch, low, up, tc.batch, tc.fewest, tc.most)
		}
	}
}

// TestINFlessScalesByRate checks counts that were computed by hand: r_up is 10/s and r_low is 0.
// With an α of 0.8, instances lose their load below 80 % of their capacity.
func TestINFlessScalesByRate(t *testing.T) {
	p := NewINFless(INFlessConfig{})
	m := INFlessMemory{}
	for i, tc := range []struct {
		after       time.Duration
		rate        float64
		need, count int
	}{
		{0, 9, 1, 1},
		{time.Second, 31, 4, 4},      // 21/s too many: three more
		{time.Second, 33, 4, 4},      // more than 0.8·40
		{time.Second, 31, 4, 4},      // less than that, but three are too few
		{time.Second, 20, 2, 4},      // two are enough; the others are idle for less than a minute
		{59 * time.Second, 29, 3, 4}, // one of the idle ones gets load again, after 59 s
		{time.Second, 29, 3, 3},      // the other was idle for a minute
		{INFlessKeepAlive, 10, 1, 3},
		{time.Minute, 0, 0, 1}, // kept for a minute, then for its own time
		{time.Minute, 0, 0, 1}, // it may not sleep
	} {
		f := plan.Function{Name: "f", Revision: 1, Max: 20, Batch: 1, Slots: 1, Service: plan.Service{Known: true, Mean: 100 * time.Millisecond}}
		f.Demand = plan.Demand{Known: true, Rate: tc.rate}
		s := plan.Snapshot{At: began, Functions: []plan.Function{f}}
		if i > 0 {
			s.At = m["f"].At.Add(tc.after)
		}
		a, next, err := p.Allocate(s, plan.Domains(s)[0], m)
		if err != nil {
			t.Fatal(err)
		}
		if a[0].Count != tc.count || next["f"].Count != tc.need {
			t.Errorf("step %d, %g/s: %d, %d of them loaded, want %d, %d (%s)", i, tc.rate, a[0].Count, next["f"].Count, tc.count, tc.need, a[0].Why)
		}
		m = next
	}
}

// TestINFlessKeepsWithinAlpha checks that ten instances of 10/s all keep their load down to 80 % of
// their capacity.
func TestINFlessKeepsWithinAlpha(t *testing.T) {
	f := plan.Function{Name: "f", Max: 20, Service: plan.Service{Known: true, Mean: 100 * time.Millisecond}}
	f.Demand.Known = true
	for _, tc := range []struct {
		alpha, rate float64
		need        int
	}{{0.8, 85, 10}, {0.8, 79, 8}, {1, 85, 9}, {0.5, 51, 10}, {0.5, 49, 5}} {
		f.Demand.Rate = tc.rate
		s := plan.Snapshot{At: began, Functions: []plan.Function{f}}
		line, next := NewINFless(INFlessConfig{Alpha: tc.alpha}).decide(&s, &f, 0.4, INFlessPast{At: began, Count: 10})
		if next.Count != tc.need || line.Count != 10 {
			t.Errorf("α=%g at %g/s: %d of %d, want %d of 10, the others idle (%s)", tc.alpha, tc.rate, next.Count, line.Count, tc.need, line.Why)
		}
	}
}

// TestINFlessWindowsAreQuantilesOfIdleTimes has nine idle times of 3 s, in the bin from 2 to 4 s,
// and one of 100 s, in the bin up to 128 s. The head must be the start of the first bin, and the
// tail the end of the second.
func TestINFlessWindowsAreQuantilesOfIdleTimes(t *testing.T) {
	p := NewINFless(INFlessConfig{})
	var past INFlessPast
	for range 4 {
		past.Short.add(3 * time.Second)
	}
	if head, tail := p.windows(&past); head != 0 || tail != time.Minute {
		t.Errorf("%v to %v with four idle times, want 0s to 1m0s", head, tail)
	}
	for range 5 {
		past.Short.add(3 * time.Second)
	}
	past.Short.add(100 * time.Second)
	past.Long = past.Short
	if head, tail := p.windows(&past); head != 2*time.Second || tail != 128*time.Second {
		t.Errorf("%v to %v, want 2s to 2m8s", head, tail)
	}
	past.Long = IdleTimes{}
	for range 10 {
		past.Long.add(900 * time.Millisecond)
	}
	if head, tail := p.windows(&past); head != time.Second || tail != 64500*time.Millisecond {
		t.Errorf("%v to %v, want the mean of both histograms, 1s to 1m4.5s", head, tail)
	}
	if head, tail := NewINFless(INFlessConfig{Tail: 0.9}).windows(&past); head != time.Second || tail != 2500*time.Millisecond {
		t.Errorf("%v to %v for nine tenths, want 1s to 2.5s", head, tail)
	}
}

// TestInferLinePlans checks plans that were computed by hand. Three requests come at once, each
// second. Stage a takes 100 ms and stage b 200 ms, with one slot each. With one replica each, the
// third request ends after 700 ms. Stage b has less throughput, so it gets a second replica first.
// Then the third request ends after 500 ms. Next, stage a gets one, and so on.
func TestInferLinePlans(t *testing.T) {
	var arrivals []time.Duration
	for i := range 300 {
		arrivals = append(arrivals, time.Duration(i/3)*time.Second)
	}
	ms := time.Millisecond
	stages := []InferLineStage{{Function: "a", Batches: []time.Duration{100 * ms}, Max: 9}, {Function: "b", Batches: []time.Duration{200 * ms, 250 * ms, 300 * ms, 350 * ms}, Max: 9}}
	for _, tc := range []struct {
		about    string
		slo      time.Duration
		limit    int
		a, b     InferLineProvision
		took     time.Duration
		feasible bool
	}{
		// a ends at 100, 200, 300; b alone at 300, 500, 700.
		{"one each", 700 * ms, 0, InferLineProvision{1, 1, 10, 0}, InferLineProvision{1, 1, 5, 0}, 700 * ms, true},
		// Two of b end at 300, 400, 500. With batches of two, the first ends at 300 and the other two at
		// 550.
		{"two of b for 500 ms", 500 * ms, 0, InferLineProvision{1, 1, 10, 0}, InferLineProvision{2, 1, 5, 0}, 500 * ms, true},
		{"a batch instead of a replica for 550 ms", 550 * ms, 0, InferLineProvision{1, 1, 10, 0}, InferLineProvision{1, 2, 8, 0}, 550 * ms, true},
		// For 300 ms, a must run all three at once, so three of a, and three of b.
		{"three each for 300 ms", 300 * ms, 0, InferLineProvision{3, 1, 10, 0}, InferLineProvision{3, 1, 5, 0}, 300 * ms, true},
		{"all that there is", 300 * ms, 3, InferLineProvision{1, 1, 10, 0}, InferLineProvision{2, 1, 5, 0}, 500 * ms, false},
	} {
		got, err := PlanInferLine(stages, arrivals, tc.slo, 0.99, tc.limit)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range []*InferLineProvision{&tc.a, &tc.b} {
			p.Ratio = got.Rate / (float64(p.Count) * p.Throughput)
		}
		want := map[string]InferLineProvision{"a": tc.a, "b": tc.b}
		if !reflect.DeepEqual(got.Stages, want) || got.Quantile != tc.took || got.Feasible != tc.feasible {
			t.Errorf("%s: %+v, %v, %v, want %+v, %v, %v", tc.about, got.Stages, got.Quantile, got.Feasible, want, tc.took, tc.feasible)
		}
		if math.Abs(got.Rate-299.0/99) > 1e-9 || got.Service != 300*ms || got.Envelope[0] != 24 || got.Envelope[4] != 3 {
			t.Errorf("%.4g/s, %v, envelope %v, want 3.02/s, 300ms, 24/s within 125 ms and 3/s within 2 s", got.Rate, got.Service, got.Envelope)
		}
	}
	for about, stages := range map[string][]InferLineStage{
		"no stage": nil, "no times": {{Max: 1}}, "no time": {{Batches: []time.Duration{0}, Max: 1}}, "no replica": {{Batches: []time.Duration{1}}},
	} {
		if _, err := PlanInferLine(stages, arrivals, time.Second, 0.99, 0); err == nil {
			t.Errorf("%s: no error", about)
		}
	}
}

// TestInferLineTunes checks counts that were computed by hand. The plan is for 4/s, with two
// replicas of 5/s and ρ 0.4. The envelope allows 8/s within 1 s and 4/s within 64 s.
func TestInferLineTunes(t *testing.T) {
	p := InferLinePlan{Stages: map[string]InferLineProvision{
		"a": {Count: 2, Batch: 1, Throughput: 5, Ratio: 0.4}, "b": {Count: 4, Batch: 1, Throughput: 5, Ratio: 0.2},
	}, Service: time.Second, Rate: 4, Envelope: []float64{99, 99, 99, 8, 7, 6, 5, 4, 4, 4}}
	policy := NewInferLine(InferLineConfig{Plan: p})
	at, m := began, InferLineMemory{}
	for i, tc := range []struct {
		after    time.Duration
		rate     float64
		envelope plan.Envelope
		a, b     int
	}{
		// no rate exceeds the plan's: stretches below 1 s do not count
		{0, 4, plan.Envelope{50, 50, 50, 8, 14, 24, 40, 64, 128, 256}, 2, 4},
		// 10/s within 1 s: 10/(5·0.4), 10/(5·0.2)
		{time.Second, 4, plan.Envelope{0, 0, 0, 10, 14, 24, 40, 64, 128, 256}, 5, 10},
		// 5/s within 16 s need fewer
		{time.Second, 5, plan.Envelope{0, 0, 0, 8, 14, 24, 40, 80, 128, 256}, 5, 10},
		// 14 s after the change
		{13 * time.Second, 3, plan.Envelope{0, 0, 0, 8, 14, 24, 40, 64, 128, 256}, 5, 10},
		// 15 s: 5/s lately, by the smallest ρ
		{time.Second, 3, plan.Envelope{0, 0, 0, 8, 14, 24, 40, 64, 128, 256}, 5, 5},
		{29 * time.Second, 3, plan.Envelope{0, 0, 0, 8, 14, 24, 40, 64, 128, 256}, 3, 3}, // 3/s over 30 s
		// 5/s within 64 s
		{time.Second, 3, plan.Envelope{0, 0, 0, 8, 14, 24, 40, 64, 128, 320}, 3, 5},
	} {
		at = at.Add(tc.after)
		s := plan.Snapshot{At: at, Pipelines: []plan.Pipeline{{Name: "p", Stages: []string{"a", "b"}, SLO: time.Second}}}
		for _, name := range []string{"a", "b"} {
			s.Functions = append(s.Functions, plan.Function{Name: name, Max: 40, Batch: 1, Slots: 1, Demand: plan.Demand{Known: true, Rate: tc.rate, Envelope: tc.envelope}})
		}
		a, next, err := policy.Allocate(s, plan.Domains(s)[0], m)
		if err != nil {
			t.Fatal(err)
		}
		if a[0].Count != tc.a || a[1].Count != tc.b {
			t.Errorf("step %d: %d and %d, want %d and %d (%s; %s)", i, a[0].Count, a[1].Count, tc.a, tc.b, a[0].Why, a[1].Why)
		}
		m = next
	}
}

// TestCocktailForecasts checks forecasts that were computed by hand: samples of 10, 20 and 20/s,
// one per minute, with weights of 0.5 and 0.1.
func TestCocktailForecasts(t *testing.T) {
	c := NewCocktail(CocktailConfig{Keep: 1})
	m := CocktailMemory{}
	for i, tc := range []struct {
		rate float64 // in the minute before
		load float64 // forecast
	}{
		{0, 0},
		{10, 10},
		{20, 15 + 0.5},        // level (20+10)/2, trend 0.1·5
		{20, 17.75 + 0.725},   // level (20+15.5)/2, trend 0.1·2.75 + 0.9·0.5
		{0, 9.2375 - 0.19875}, // level (0+18.475)/2, trend 0.1·(9.2375−17.75) + 0.9·0.725
	} {
		for step := range 3 {
			s := plan.Snapshot{At: began.Add(time.Duration(i)*time.Minute - time.Duration(2-step)*10*time.Second)}
			f := plan.Function{Name: "f", Max: 100, Service: plan.Service{Known: true, Mean: 100 * time.Millisecond}}
			f.Demand = plan.Demand{Known: true, Rate: tc.rate / float64(3-step)} // the largest rate counts
			if step == 2 {
				f.Demand.Rate = 0 // in the next period
				if i == 0 {
					s.At = began
				}
			} else if i == 0 {
				continue
			} else if step == 1 {
				f.Demand.Rate = tc.rate
			}
			s.Functions = []plan.Function{f}
			a, next, err := c.Allocate(s, plan.Domains(s)[0], m)
			if err != nil {
				t.Fatal(err)
			}
			m = next
			want := max(ceil(tc.load*1.2/10), 1)
			past := m["f"]
			if got := c.forecast(&past) / 1.2; step == 2 && (math.Abs(got-tc.load) > 1e-9 || a[0].Count != want) {
				t.Errorf("period %d: %.6g/s, %d, want %.6g/s, %d (%s)", i, got, a[0].Count, tc.load, want, a[0].Why)
			}
		}
	}
}

// TestCocktailReacts checks waits that are longer than the objective allows. The count must rise to
// enough replicas for the arrivals and the line, and must not rise again in the next five seconds.
func TestCocktailReacts(t *testing.T) {
	c := NewCocktail(CocktailConfig{})
	m := CocktailMemory{}
	for i, tc := range []struct {
		wait    time.Duration
		waiting int
		count   int
	}{
		{50 * time.Millisecond, 10, 1},   // 100 ms are left
		{150 * time.Millisecond, 10, 2},  // 10/s, and 10 waiting within 5 s, at 10/s per replica
		{150 * time.Millisecond, 300, 2}, // a second later
		{150 * time.Millisecond, 300, 2},
		{150 * time.Millisecond, 300, 2},
		{150 * time.Millisecond, 300, 2},
		{150 * time.Millisecond, 300, 7},
		{50 * time.Millisecond, 0, 7}, // until the next forecast
	} {
		s := plan.Snapshot{At: began.Add(time.Duration(i) * time.Second)}
		f := plan.Function{Name: "f", Max: 100, Waiting: tc.waiting, Service: plan.Service{Known: true, Mean: 100 * time.Millisecond}}
		f.Demand = plan.Demand{Known: true, Rate: 10}
		f.Wait = plan.Wait{Known: true, P99: tc.wait}
		s.Functions = []plan.Function{f}
		a, next, err := c.Allocate(s, plan.Domains(s)[0], m)
		if err != nil {
			t.Fatal(err)
		}
		if m = next; a[0].Count != tc.count {
			t.Errorf("second %d: %d, want %d (%s)", i, a[0].Count, tc.count, a[0].Why)
		}
	}
}
