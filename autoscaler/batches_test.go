package autoscaler

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

const ms = time.Millisecond

// batched returns a function whose tasks take 10 ms each in batches of 8, which take 80 ms.
func batched(name string) plan.Function {
	f := timed(name, 10*ms)
	f.Batch, f.Demand.Rate = 8, 80
	f.Service.Batches = []plan.Batched{{Size: 8, Mean: 80 * ms, N: 20}}
	return f
}

func TestBatchTimeIsThatOfAWholeBatch(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*plan.Function)
		want   float64 // ms
	}{
		"no batches":                      {func(f *plan.Function) { f.Service.Batches = nil }, 10},
		"batches of one":                  {func(f *plan.Function) { f.Service.Batches = []plan.Batched{{Size: 1, Mean: 11 * ms, N: 9}} }, 10},
		"one size":                        {func(*plan.Function) {}, 80},
		"two sizes, as large as large":    {func(f *plan.Function) { f.Service.Batches = sizes(20, 80) }, 80},
		"two sizes, as small as small":    {func(f *plan.Function) { f.Service.Batches, f.Service.Mean = sizes(20, 80), 20*ms }, 20},
		"two sizes, half of tasks each":   {func(f *plan.Function) { f.Service.Batches, f.Service.Mean = sizes(20, 80), 15*ms }, 50},
		"sizes that cannot be told apart": {func(f *plan.Function) { f.Service.Batches = sizes(10, 80) }, (1*10 + 8*80) / 9.0},
		"a larger batch takes less":       {func(f *plan.Function) { f.Service.Batches = sizes(60, 40) }, 60 - 20*50/55.0},
		"never less than the share":       {func(f *plan.Function) { f.Service.Mean = 300 * ms }, 300},
		"never more than all shares":      {func(f *plan.Function) { f.Service.Mean = ms }, 8},
		"smaller batches than measured": {func(f *plan.Function) {
			f.Service.Batches, f.Service.Mean = []plan.Batched{{Size: 4, Mean: 40 * ms, N: 9}, {Size: 8, Mean: 64 * ms, N: 9}}, 12*ms
		}, 40},
		"impossible sizes do not count": {func(f *plan.Function) {
			f.Service.Batches = []plan.Batched{{Size: -3, Mean: 80 * ms, N: 1}, {Size: 4, Mean: -80 * ms, N: 1}, {Size: 9, Mean: ms}}
		}, 10},
		"as profiled": {func(f *plan.Function) {
			f.Service.Batches = nil
			f.Profile = []plan.Point{{CPUMilli: 1000, Batch: 1, Mean: 20 * ms, N: 5}, {CPUMilli: 1000, Batch: 8, Mean: 80 * ms, N: 5}, {CPUMilli: 1000, Batch: 64, Mean: 90 * ms, N: 5}}
		}, 80},
		"a profile whose times fall": {func(f *plan.Function) {
			f.Service.Batches = nil
			f.Profile = []plan.Point{{CPUMilli: 1000, Batch: 1, Mean: 60 * ms, N: 5}, {CPUMilli: 1000, Batch: 8, Mean: 30 * ms, N: 5}}
		}, 60},
	} {
		t.Run(name, func(t *testing.T) {
			f := batched("f")
			tc.change(&f)
			if got := 1e3 * batchTime(&f); math.Abs(got-tc.want) > 1e-6 {
				t.Errorf("%g ms, want %g", got, tc.want)
			}
		})
	}
}

// sizes returns twenty batches each of one task and of eight.
func sizes(one, eight time.Duration) []plan.Batched {
	return []plan.Batched{{Size: 1, Mean: one * ms, N: 20}, {Size: 8, Mean: eight * ms, N: 20}}
}

// TestLatencyHasWholeBatchesAndCapacityHasShares checks that a stage with batches of 8 in 80 ms
// counts as 80 ms on its pipeline, and that its replicas still serve 100 tasks per second each.
func TestLatencyHasWholeBatchesAndCapacityHasShares(t *testing.T) {
	f := batched("f")
	s := plan.Snapshot{Functions: []plan.Function{f}, Pipelines: []plan.Pipeline{{Name: "p", Stages: []string{"f"}, SLO: 180 * ms}}}
	m := modelOf(t, s, plan.Domain{Pipelines: []string{"p"}, Functions: []string{"f"}})
	g, p := &m.stages[0], &m.pipes[0]
	if math.Abs(p.service-0.08) > 1e-9 || math.Abs(p.budget-0.05) > 1e-9 {
		t.Errorf("serves for %g s, waits for %g, want 80 ms and half of what 180 leave", p.service, p.budget)
	}
	if got := g.stable(); got != 1 { // 80 of 100 tasks per second
		t.Errorf("%d replicas are stable, want 1", got)
	}
	alone := batched("f")
	alone.Service.Batches = nil
	h := newStage(&alone)
	// A task that waits has to wait for a whole batch to end, not for a share.
	want := h.wait(1) + 0.8*7*0.01
	if got := g.wait(1); math.Abs(got-want) > 1e-9 {
		t.Errorf("waits %g s, want %g", got, want)
	}
	if got, want := g.sojourn(1).Seconds(), want+0.08; math.Abs(got-want) > 1e-8 {
		t.Errorf("stays %g s, want %g", got, want)
	}
	if got := g.least(120*ms, 9); got != 2 || g.sojourn(2) > 120*ms || g.sojourn(1) <= 120*ms {
		t.Errorf("%d replicas for 120 ms, with %v; one has %v", got, g.sojourn(2), g.sojourn(1))
	}
}

func TestReasonsNameTheTimeOfABatch(t *testing.T) {
	got, _ := sizeOne(t, batched("f"), 0, nil)
	if want := "λ=80.0/s μ=100.0/s, a batch takes 80ms: 1 for stability"; !strings.HasPrefix(got.Why, want) {
		t.Errorf("%s, want %s", got.Why, want)
	}
}

// TestPIDCorrectsStagesWithBatches checks that the PID adds replicas if tasks of a stage with
// batches miss their objective. Their batches take 80 of the 100 ms that the objective allows, and
// they wait for 40 ms. With a share in place of a batch, they would count as 50 ms, well in time.
func TestPIDCorrectsStagesWithBatches(t *testing.T) {
	f := batched("f")
	f.Wait = plan.Wait{Known: true, Mean: 40 * ms}
	f.Replicas = replicas(2, plan.Ready)
	s := plan.Snapshot{Functions: []plan.Function{f}, Pipelines: []plan.Pipeline{{Name: "p", Stages: []string{"f"}, SLO: 100 * ms}}}
	d := plan.Domain{Pipelines: []string{"p"}, Functions: []string{"f"}}
	q, mem := NewQuart(QuartConfig{}), QuartMemory(nil)
	extra := 0
	for k := range 90 {
		s.At = t0.Add(time.Duration(k) * time.Second)
		a, next, err := q.Correct(s, d, plan.Alloc{{Function: "f", Count: 2}}, mem)
		if err != nil {
			t.Fatal(err)
		}
		mem, extra = next, a[0].Count-2
	}
	if extra <= 0 {
		t.Errorf("%d replicas more for tasks that take 120 of 100 ms", extra)
	}
}

// TestBatchesCountWithDeclaredCPU checks that measured batches are converted to the declared CPU,
// as service times are. Otherwise their time would look shorter after extra CPU was given.
func TestBatchesCountWithDeclaredCPU(t *testing.T) {
	f := batched("f")
	f.CPULimit, f.CPUNow = 1000, 2000
	for cpu, mean := range map[int]time.Duration{1000: 80, 2000: 50, 4000: 35} { // 20 ms + 60 ms/cores
		f.Profile = append(f.Profile, plan.Point{CPUMilli: cpu, Batch: 8, Mean: mean * ms, N: 9})
	}
	f.Service.Mean, f.Service.Batches = 50*ms/8, []plan.Batched{{Size: 8, Mean: 50 * ms, N: 20}}
	s := plan.Snapshot{Functions: []plan.Function{f}}
	asDeclared(&s, plan.Domain{Functions: []string{"f"}})
	if got := 1e3 * batchTime(&s.Functions[0]); math.Abs(got-80) > 1e-3 {
		t.Errorf("%g ms, want 80", got)
	}
	if f.Service.Batches[0].Mean != 50*ms {
		t.Error("the caller's snapshot has changed")
	}
}

// FuzzBatches checks that a stage with any measured batches has finite predictions, which rise with
// the rate and fall with the replicas.
func FuzzBatches(f *testing.F) {
	f.Add(80.0, 1.0, 0.0, int64(10), 8, int64(80), 1, int64(20), 2)
	f.Add(math.NaN(), -1.0, math.Inf(1), int64(-1), -8, int64(math.MaxInt64), 0, int64(0), -1)
	f.Add(500.0, 8.0, 0.3, int64(20), 64, int64(5), 2, int64(70), 9)
	f.Fuzz(func(t *testing.T, rate, cv, cs float64, mean int64, large int, took int64, small int, one int64, n int) {
		fn := timed("f", time.Duration(mean)*ms)
		fn.Demand.Rate, fn.Demand.CV, fn.Service.CV, fn.Batch = rate, cv, cs, large
		fn.Service.Batches = []plan.Batched{{Size: small, Mean: time.Duration(one) * ms, N: 3}, {Size: large, Mean: time.Duration(took) * ms, N: 3}}
		g := newStage(&fn)
		g.bursts = bursty(g.ca2)
		if g.known && (!(g.latency >= g.service) || math.IsInf(g.latency, 0)) {
			t.Fatalf("%g s per batch, %g per task", g.latency, g.service)
		}
		n = min(max(n, 1), 300)
		more := g
		more.lambda *= 1.01
		stay := func(g *stage, n int) [3]float64 { return [3]float64{g.wait(n), g.burstWait(n), g.sojourn(n).Seconds()} }
		now, rises, falls := stay(&g, n), stay(&more, n), stay(&g, n+1)
		for i, v := range now {
			eps := 1e-9*math.Abs(v) + 2e-9
			if !(v >= 0) || math.IsInf(v, 0) || rises[i] < v-eps || falls[i] > v+eps {
				t.Errorf("%d: %g s; %g at a higher rate, %g with a replica more", i, v, rises[i], falls[i])
			}
		}
	})
}
