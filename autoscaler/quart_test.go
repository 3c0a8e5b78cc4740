package autoscaler

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan/plantest"
)

func TestQuartIsACorrector(t *testing.T) {
	for name, cfg := range map[string]QuartConfig{
		"whole": {}, "no pid": {NoPID: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			plantest.RunCorrector(t, NewQuart(cfg))
		})
	}
}

// calm returns a function that needs 2 replicas for 10 requests/s. A task takes 100 ms, and may
// stay for 200 ms with its wait.
func calm() plan.Function {
	return plan.Function{
		Name: "f.ns", Revision: 1, Min: 1, Max: 20, Batch: 1, Slots: 1, CPULimit: 500, Replicas: replicas(6, plan.Ready),
		Demand:  plan.Demand{Known: true, Rate: 10, Last: t0},
		Service: plan.Service{Known: true, Mean: 100 * time.Millisecond},
		Wait:    plan.Wait{Known: true, Mean: 10 * time.Millisecond},
	}
}

// correct runs a Quart on a single function, for which the allocator asks for the given count of
// replicas. Nodes have 4 cores.
func correct(t *testing.T, cfg QuartConfig, f plan.Function, count int, past Course) (plan.Line, Course) {
	t.Helper()
	for i := range f.Replicas {
		f.Replicas[i].Node = "n"
	}
	s := plan.Snapshot{At: t0, Functions: []plan.Function{f}, Nodes: []plan.Node{{Name: "n", CPUMilli: 4000}}}
	a, m, err := NewQuart(cfg).Correct(s, plan.Domain{Functions: []string{f.Name}}, plan.Alloc{{Function: f.Name, Count: count, Batch: 1, Why: "so it is"}}, QuartMemory{f.Name: &past})
	if err != nil {
		t.Fatal(err)
	}
	return a[0], *m[f.Name]
}

func TestSmootherTakesSurplusReplicasAfterTheHold(t *testing.T) {
	ago := func(d time.Duration) time.Time { return t0.Add(-d) }
	second := ago(time.Second)
	for name, tc := range map[string]struct {
		change func(*plan.Function)
		past   Course
		want   int
		taken  int
		hold   time.Duration
	}{
		"surplus just seen":        {func(*plan.Function) {}, Course{At: second, Asked: 6}, 6, 0, 0},
		"surplus for a while":      {func(*plan.Function) {}, Course{At: second, Asked: 6, Surplus: ago(smoothHold)}, 5, 1, 0},
		"surplus, but not as long": {func(*plan.Function) {}, Course{At: second, Asked: 6, Surplus: ago(smoothHold - 1)}, 6, 0, 0},
		"one at a time":            {func(*plan.Function) {}, Course{At: second, Asked: 5, Taken: 1, Surplus: second}, 5, 1, 0},
		"the next one":             {func(*plan.Function) {}, Course{At: second, Asked: 5, Taken: 1, Surplus: ago(smoothHold)}, 4, 2, 0},
		"bursty: keeps its own":    {func(*plan.Function) {}, Course{At: second, Asked: 6, CA2: 36, Surplus: ago(time.Minute)}, 6, 0, 0},
		"not below what is needed": {func(f *plan.Function) { f.Demand.Rate = 45 }, Course{At: second, Asked: 4, Taken: 2, Surplus: ago(time.Minute)}, 6, 0, 0},
		"a line comes":             {func(f *plan.Function) { f.Waiting = 20 }, Course{At: second, Asked: 3, Taken: 3, Surplus: ago(time.Minute)}, 6, 0, 0},
		"takes too long": {
			func(f *plan.Function) { f.Wait.Mean = 150 * time.Millisecond },
			Course{At: second, Asked: 4, Taken: 2, Surplus: ago(time.Minute)},
			6, 0, 2 * smoothHold,
		},
		"takes too long again": {
			func(f *plan.Function) { f.Wait.Mean = 150 * time.Millisecond },
			Course{At: second, Asked: 4, Taken: 2, Hold: smoothPatience},
			6, 0, smoothPatience,
		},
		"patience":              {func(*plan.Function) {}, Course{At: second, Asked: 6, Surplus: ago(19 * time.Second), Hold: 20 * time.Second}, 6, 0, 20 * time.Second},
		"key stage in a burst":  {func(*plan.Function) {}, Course{At: second, Asked: 5, Taken: 1, Surplus: ago(time.Minute), Key: Key{1, second, second}}, 6, 0, 0},
		"key stage, long after": {func(*plan.Function) {}, Course{At: second, Asked: 6, Surplus: ago(time.Minute), Key: Key{1, second, ago(time.Minute)}}, 5, 1, 0},
		"rises right now":       {func(*plan.Function) {}, Course{At: second, Asked: 3, Taken: 1, Surplus: ago(time.Minute)}, 6, 0, 0},
		"clock set back":        {func(*plan.Function) {}, Course{At: ago(-time.Hour), Asked: 6, Surplus: ago(-time.Hour)}, 6, 0, 0},
		"unknown service":       {func(f *plan.Function) { f.Service = plan.Service{} }, Course{At: second, Asked: 4, Taken: 2, Surplus: ago(time.Minute)}, 6, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			f := calm()
			tc.change(&f)
			tc.past.PID.At = tc.past.At
			l, next := correct(t, QuartConfig{NoCPU: true}, f, 6, tc.past)
			if l.Count != tc.want || next.Taken != tc.taken || next.Hold != tc.hold {
				t.Errorf("%d (%s), %d taken, next after %v; want %d, %d and %v", l.Count, l.Why, next.Taken, next.Hold, tc.want, tc.taken, tc.hold)
			}
		})
	}
}

// TestSmootherLooksAtNeighbours compares stages with equal work. A stage that needs more replicas
// than its neighbours keeps more, as in Eq. 7.
func TestSmootherLooksAtNeighbours(t *testing.T) {
	left := func(beside float64) int {
		s := plan.Snapshot{At: t0, Pipelines: []plan.Pipeline{{Name: "p", SLO: 10 * time.Second, Stages: []string{"a", "b"}, Edges: []plan.Edge{{From: 0, To: 1}}}}}
		for _, name := range []string{"a", "b"} {
			f := calm()
			f.Name, f.Demand.Rate = name, 60
			s.Functions = append(s.Functions, f)
		}
		s.Functions[0].Waiting = int(beside)
		m := QuartMemory{}
		var a plan.Alloc
		for range 200 {
			s.At = s.At.Add(time.Second)
			var err error
			if a, m, err = NewQuart(QuartConfig{}).Correct(s, plan.Domain{Pipelines: []string{"p"}, Functions: []string{"a", "b"}}, plan.Alloc{{Function: "a", Count: 18}, {Function: "b", Count: 18}}, m); err != nil {
				t.Fatal(err)
			}
		}
		return a[1].Count
	}
	if quiet, busy := left(0), left(1000); quiet >= busy || quiet < 7 {
		t.Errorf("%d replicas left beside a quiet stage, %d beside a busy one, want fewer beside the quiet one, and 7 or more", quiet, busy)
	}
}

func TestCompensatorGivesTheLeastCPUThatHelps(t *testing.T) {
	profile := func(quotas ...int) (points []plan.Point) {
		for _, q := range quotas {
			points = append(points, plan.Point{CPUMilli: q, Batch: 1, Mean: time.Duration(20+40000/q) * time.Millisecond, N: 50})
		}
		return points
	}
	past := Course{At: t0.Add(-time.Second), Asked: 2, Taken: 1}
	given := past
	given.CPU, given.CPUAt = 700, t0.Add(-30*time.Second)
	long := given
	long.CPUAt = t0.Add(-2 * cpuHold)
	// CPU that tasks needed at the last decision, too
	raised := func(ago time.Duration) Course {
		return Course{At: past.At, Asked: 3, CPU: 700, CPUAt: past.At, CPURaised: t0.Add(-ago)}
	}
	late := func(f *plan.Function) {
		f.CPUNow, f.Service.Mean, f.Wait.Mean = 700, 90*time.Millisecond, 150*time.Millisecond
	}
	alone := func(f *plan.Function) {
		f.CPUNow, f.Service.Mean, f.Demand.Rate, f.Replicas = 700, 77*time.Millisecond, 8, replicas(1, plan.Ready)
	}
	starved := long
	starved.Taken, starved.Asked = 0, 3
	for name, tc := range map[string]struct {
		change func(*plan.Function)
		past   Course
		count  int
		cpu    int
		why    string
	}{
		// At 13/s on two replicas of 100 ms, tasks take 173 ms, nearly the 200 ms that they may take.
		"the least that helps": {func(*plan.Function) {}, past, 2, 530, "cpu 500m to 530m, as tasks would take 173ms with 500m, target 200ms"},
		"not near":             {func(f *plan.Function) { f.Demand.Rate = 9 }, past, 2, 0, "smoother -1"},
		"as measured":          {func(f *plan.Function) { f.Demand.Rate, f.Wait.Mean = 9, 75*time.Millisecond }, past, 2, 560, "as tasks would take 175ms with"},
		"no profile":           {func(f *plan.Function) { f.Profile = nil }, past, 3, 0, "so it is"},
		"two quotas":           {func(f *plan.Function) { f.Profile = profile(500, 1000) }, past, 3, 0, "so it is"},
		"more CPU is of no use": {func(f *plan.Function) {
			f.Profile = profile(2000, 1000, 500)
			for i := range f.Profile {
				f.Profile[i].CPUMilli = 500 << i
			}
		}, past, 3, 0, "so it is"},
		"no limit": {func(f *plan.Function) { f.CPULimit = 0 }, past, 3, 0, "so it is"},
		"no cores": {func(f *plan.Function) { f.CPULimit = 2000; f.Profile = profile(1000, 2000, 4000) }, past, 3, 0, "so it is"},
		"half of what is free": {func(f *plan.Function) {
			f.CPULimit, f.Profile, f.Demand.Rate, f.Wait.Mean = 1500, profile(1000, 2000, 4000), 9, 95*time.Millisecond
		}, past, 3, 0, "so it is"},
		"no further than measured": {func(f *plan.Function) { f.Profile = profile(300, 400, 505) }, past, 3, 0, "so it is"},
		"nothing taken":            {func(*plan.Function) {}, Course{At: past.At, Asked: 3}, 3, 0, "so it is"},
		"bridges a start":          {func(f *plan.Function) { f.Wait.Mean = 150 * time.Millisecond }, Course{At: past.At, Asked: 3}, 3, 910, "cpu 500m to 910m"},
		"late with all of them":    {func(f *plan.Function) { f.Wait.Mean, f.Replicas = 150*time.Millisecond, replicas(3, plan.Ready) }, Course{At: past.At, Asked: 3}, 3, 0, "so it is"},
		"given, still needed":      {func(f *plan.Function) { f.CPUNow, f.Service.Mean = 700, 77*time.Millisecond }, given, 2, 700, "cpu 700m"},
		"given, not needed lately": {func(f *plan.Function) { f.CPUNow, f.Service.Mean, f.Demand.Rate = 700, 77*time.Millisecond, 2 }, given, 2, 700, "cpu 700m"},
		"given back":               {func(f *plan.Function) { f.CPUNow, f.Service.Mean, f.Demand.Rate = 700, 77*time.Millisecond, 2 }, long, 2, 0, "cpu back to 500m"},
		"raised again":             {late, raised(cpuEvery), 3, 1010, "cpu 700m to 1010m"},
		"raised just now":          {late, raised(cpuEvery - time.Second), 3, 700, "cpu 700m"},
		// One replica is ready and cannot serve 8/s without the CPU. Two others do not start.
		"kept by the ready ones": {alone, starved, 3, 700, "cpu 700m"},
		"taken back by others":   {func(f *plan.Function) { f.CPUNow, f.Service.Mean, f.CPULimit = 2500, 77*time.Millisecond, 2400 }, given, 2, 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			f := calm()
			f.Demand.Rate, f.Replicas, f.Profile = 13, replicas(2, plan.Ready), profile(250, 500, 1000, 2000)
			tc.change(&f)
			l, next := correct(t, QuartConfig{}, f, 3, tc.past)
			if l.Count != tc.count || l.CPUMilli != tc.cpu || next.CPU != tc.cpu || !strings.Contains(l.Why, tc.why) {
				t.Errorf("%d replicas of %dm (%s), want %d of %dm (%s)", l.Count, l.CPUMilli, l.Why, tc.count, tc.cpu, tc.why)
			}
		})
	}
}

// TestCPUIsTakenBackAfterTheClockIsSetBack checks that CPU that was last needed at a future time is
// taken back after the usual hold.
func TestCPUIsTakenBackAfterTheClockIsSetBack(t *testing.T) {
	f := calm()
	f.CPUNow, f.Demand.Rate, f.Replicas = 700, 2, replicas(2, plan.Ready)
	for _, quota := range []int{250, 500, 1000} {
		f.Profile = append(f.Profile, plan.Point{CPUMilli: quota, Batch: 1, Mean: time.Duration(20+40000/quota) * time.Millisecond, N: 50})
	}
	l, next := correct(t, QuartConfig{}, f, 3, Course{At: t0, Asked: 2, Taken: 1, CPU: 700, CPUAt: t0.Add(24 * time.Hour)})
	if l.CPUMilli != 700 || next.CPUAt.After(t0) {
		t.Errorf("%dm (%s), held from %v, want 700m from %v on at the latest", l.CPUMilli, l.Why, next.CPUAt, t0)
	}
}

func TestFitCPUTakesTheBatchWithTheMostQuotas(t *testing.T) {
	point := func(cpu, batch, length int, ms float64) plan.Point {
		return plan.Point{CPUMilli: cpu, Batch: batch, Length: length, Mean: time.Duration(ms * 1e6), N: 10}
	}
	f := plan.Function{Batch: 2, Profile: []plan.Point{
		point(500, 1, 0, 120), point(1000, 1, 0, 70), point(2000, 1, 0, 45), // 20 + 50000/q
		point(500, 4, 0, 400), point(1000, 4, 0, 400), // two quotas are too few
		point(-1, 1, 0, 1), point(4000, 1, 0, -1), // invalid points
	}}
	fit, ok := fitCPU(&f)
	if !ok || math.Abs(fit.A-0.02) > 1e-9 || math.Abs(fit.B-0.050) > 1e-9 || fit.most != 2000 {
		t.Errorf("%+v, %v, want 20 ms and 50 ms of a core, measured up to 2000m", fit, ok)
	}
	if got := fit.scaled(0.140, 500, 1000); math.Abs(got-0.140*70/120) > 1e-9 {
		t.Errorf("140 ms on 500m are %v s on 1000m, want 82 ms", got)
	}
}

// TestQuartRefusesLinesOfOtherFunctions checks that arguments that do not belong together are an
// error, not an index out of range.
func TestQuartRefusesLinesOfOtherFunctions(t *testing.T) {
	s := plan.Snapshot{At: t0, Functions: []plan.Function{calm()}}
	for name, tc := range map[string]struct {
		d plan.Domain
		a plan.Alloc
	}{
		"no line":          {plan.Domain{Functions: []string{"f.ns"}}, nil},
		"another's line":   {plan.Domain{Functions: []string{"f.ns"}}, plan.Alloc{{Function: "g.ns"}}},
		"unknown function": {plan.Domain{Functions: []string{"g.ns"}}, plan.Alloc{{Function: "g.ns"}}},
	} {
		if _, _, err := NewQuart(QuartConfig{}).Correct(s, tc.d, tc.a, nil); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if m := (Quart{}).Merge(QuartMemory{"a": {Asked: 1}}, QuartMemory{"b": {Asked: 2}}); len(m) != 2 || m["a"].Asked != 1 || m["b"].Asked != 2 {
		t.Errorf("merged %v, want both", m)
	}
}
