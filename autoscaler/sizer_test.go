package autoscaler

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan/plantest"
)

func TestSizerIsAnAllocator(t *testing.T) {
	t.Parallel()
	plantest.Run(t, NewSizer(Config{}))
}

var t0 = time.Date(2025, 6, 1, 12, 0, 0, 0, time.UTC)

// loaded returns a function with 38.2 requests/s of 200 ms.
func loaded() plan.Function {
	return plan.Function{
		Name: "f.ns", Revision: 1, Min: 1, Max: 20, Batch: 1, Slots: 1, Running: 4,
		Demand:  plan.Demand{Known: true, Rate: 38.2, Last: t0},
		Service: plan.Service{Known: true, Mean: 200 * time.Millisecond},
	}
}

func replicas(n int, state plan.State) (out []plan.Replica) {
	for i := range n {
		out = append(out, plan.Replica{Name: fmt.Sprintf("%v-%d", state, i), Revision: 1, State: state})
	}
	return out
}

// sizeOne runs the Sizer on a single function.
func sizeOne(t *testing.T, f plan.Function, at time.Duration, m Memory) (plan.Line, Memory) {
	t.Helper()
	s := plan.Snapshot{At: t0.Add(at), Functions: []plan.Function{f}}
	a, m, err := NewSizer(Config{}).Allocate(s, plan.Domain{Functions: []string{f.Name}}, m)
	if err != nil {
		t.Fatal(err)
	}
	return a[0], m
}

func TestSizerGivesCountsWithReasons(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*plan.Function)
		want   int
		why    string
	}{
		"by Erlang C":          {func(*plan.Function) {}, 9, "λ=38.2/s μ=5.0/s: 8 for stability, 9 for a wait of 200ms; was 0; max 20"},
		"drains the line":      {func(f *plan.Function) { f.Waiting = 40; f.Replicas = replicas(4, plan.Ready) }, 12, "8 for stability, 12 to drain 40 waiting in 2s; was 4; max 20"},
		"a short line is fine": {func(f *plan.Function) { f.Waiting = 10 }, 9, "8 for stability, 9 to drain 10 waiting in 2s; was"},
		"no more than tasks": {func(f *plan.Function) {
			f.Demand.Rate, f.Service.Mean, f.Waiting, f.Running = 0, time.Minute, 3, 1
		}, 4, "4 to drain 3"},
		"max":           {func(f *plan.Function) { f.Waiting = 1000; f.Max = 10 }, 10, "max 10"},
		"min":           {func(f *plan.Function) { f.Min = 15 }, 15, "8 for stability; at least 15; was"},
		"several slots": {func(f *plan.Function) { f.Slots = 4 }, 3, "2 for stability, 3 for a wait of 200ms"},
		"no load":       {func(f *plan.Function) { f.Demand.Rate = 0 }, 1, "at least 1"},
		"bursts":        {func(f *plan.Function) { f.Demand.CV = 4 }, 13, "μ=5.0/s Ca²=16.0: 8 for stability, 13 for a wait of 200ms"},
		"an absurd CV":  {func(f *plan.Function) { f.Demand.CV = math.Inf(1) }, 20, "Ca²=100.0"},
		"grows while a replica starts": {func(f *plan.Function) { // (38.2 + (40 + 18.2·4)/4)/s
			f.Waiting, f.Replicas, f.Starts = 40, replicas(4, plan.Ready), []plan.Start{{Path: "cold", Mean: 5 * time.Second, N: 3}, {Path: "fork", Mean: time.Second, N: 1}, {Path: "odd", Mean: -1, N: 1}}
		}, 14, "14 to drain 40 waiting in 4s"},
		"OpenFaaS's target":            {func(f *plan.Function) { f.Target = plan.Target{Type: "rps", Value: 3, Load: 38.2, Known: true} }, 13, "8 for stability, 13 for 38.2 rps at 3 a replica; was"},
		"a target that asks for less":  {func(f *plan.Function) { f.Target = plan.Target{Type: "cpu", Value: 1000, Load: 2500, Known: true} }, 9, "3 for 2500 cpu at 1000 a replica, 9 for a wait of 200ms"},
		"a target without measurement": {func(f *plan.Function) { f.Target = plan.Target{Type: "rps", Value: 3, Load: 38.2} }, 9, "8 for stability, 9 for"},
		"an absurd target":             {func(f *plan.Function) { f.Target = plan.Target{Type: "rps", Value: 1e-300, Load: 1e300, Known: true} }, 20, "max 20"},
		"a target, service unknown": {func(f *plan.Function) {
			f.Service, f.Target = plan.Service{}, plan.Target{Type: "capacity", Value: 2, Load: 9, Known: true}
		}, 5, "5 for 9 capacity at 2 a replica"},
		"unknown, idle":    {func(f *plan.Function) { f.Service, f.Running = plan.Service{}, 0 }, 1, "service time unknown, nothing waits; at least 1"},
		"unknown, waiting": {func(f *plan.Function) { f.Service, f.Waiting = plan.Service{}, 50 }, 1, "service time unknown, 50 waiting: 1"},
		"unknown, starting": {func(f *plan.Function) {
			f.Service, f.Waiting, f.Replicas = plan.Service{}, 50, replicas(2, plan.Starting)
		}, 2, "50 waiting: 2"},
		"unknown, grows": {func(f *plan.Function) { f.Service, f.Waiting, f.Replicas = plan.Service{}, 50, replicas(3, plan.Ready) }, 6, "doubled to 6 as the line has grown from 0"},
	} {
		t.Run(name, func(t *testing.T) {
			f := loaded()
			tc.change(&f)
			got, _ := sizeOne(t, f, 0, nil)
			if got.Count != tc.want || !strings.Contains(got.Why, tc.why) {
				t.Errorf("%d (%s), want %d (%s)", got.Count, got.Why, tc.want, tc.why)
			}
		})
	}
}

// TestUnknownServiceDoublesOncePerSecond checks ticks that come every 20 ms. A slow first answer
// must not raise the count to the maximum.
func TestUnknownServiceDoublesOncePerSecond(t *testing.T) {
	f := loaded()
	f.Service, f.Waiting = plan.Service{}, 10
	var m Memory
	counts := map[int]time.Duration{}
	for at := time.Duration(0); at < 3*time.Second; at += 20 * time.Millisecond {
		f.Waiting++
		var l plan.Line
		l, m = sizeOne(t, f, at, m)
		f.Replicas = replicas(l.Count, plan.Ready)
		if _, ok := counts[l.Count]; !ok {
			counts[l.Count] = at
		}
	}
	for count, at := range map[int]time.Duration{1: 0, 2: time.Second, 4: 2 * time.Second} {
		if got, ok := counts[count]; !ok || got != at {
			t.Errorf("%d replicas first after %v, %v, want %v", count, got, ok, at)
		}
	}
	// While replicas start, the line is no reason for more.
	busy := f
	busy.Waiting, busy.Replicas = 1000, append(replicas(4, plan.Ready), replicas(1, plan.Starting)...)
	if l, _ := sizeOne(t, busy, 5*time.Second, Memory{"f.ns": {}}); l.Count != 5 {
		t.Errorf("%d (%s), want 5", l.Count, l.Why)
	}
	// A line that does not grow needs no more.
	f.Replicas = replicas(4, plan.Ready)
	if l, _ := sizeOne(t, f, 5*time.Second, Memory{"f.ns": {Line: f.Waiting}}); l.Count != 4 {
		t.Errorf("%d (%s), want 4", l.Count, l.Why)
	}
}

func TestIdleFunctionsSleepAfterZeroAge(t *testing.T) {
	sleepy := func() plan.Function {
		f := loaded()
		f.Zero, f.Min, f.ZeroAge, f.Running = true, 0, 30*time.Second, 0
		f.Demand.Rate = 0
		return f
	}
	for name, tc := range map[string]struct {
		change func(*plan.Function)
		at     time.Duration
		want   int
	}{
		"asked lately":                  {func(*plan.Function) {}, 29 * time.Second, 1},
		"idle":                          {func(*plan.Function) {}, 30 * time.Second, 0},
		"idle with a minimum":           {func(f *plan.Function) { f.Min = 2 }, 30 * time.Second, 0},
		"idle with a fading rate":       {func(f *plan.Function) { f.Demand.Rate = 3 }, 30 * time.Second, 0},
		"a task waits":                  {func(f *plan.Function) { f.Waiting = 1 }, time.Hour, 1},
		"a task runs":                   {func(f *plan.Function) { f.Running = 1 }, time.Hour, 1},
		"never asked, no minimum":       {func(f *plan.Function) { f.Demand = plan.Demand{} }, 29 * time.Second, 0},
		"never asked, minimum":          {func(f *plan.Function) { f.Demand, f.Min = plan.Demand{}, 2 }, 29 * time.Second, 2},
		"never asked for long, minimum": {func(f *plan.Function) { f.Demand, f.Min = plan.Demand{}, 2 }, 30 * time.Second, 0},
		"expected":                      {func(f *plan.Function) { f.Expected = 3 }, time.Hour, 1},
		"expected, never asked":         {func(f *plan.Function) { f.Demand, f.Expected = plan.Demand{}, 1 }, time.Hour, 1},
		"expected, minimum":             {func(f *plan.Function) { f.Min, f.Expected = 2, 1 }, time.Hour, 2},
		"expected, put to sleep":        {func(f *plan.Function) { f.ZeroAge, f.Expected = 0, 1 }, 0, 1},
		"may not sleep":                 {func(f *plan.Function) { f.Zero, f.Min = false, 0 }, time.Hour, 1},
		"wakes for a burst":             {func(f *plan.Function) { f.Waiting = 100 }, time.Hour, 10},
	} {
		t.Run(name, func(t *testing.T) {
			f := sleepy()
			tc.change(&f)
			got, m := sizeOne(t, f, tc.at, Memory{f.Name: {Seen: t0}})
			if got.Count != tc.want {
				t.Errorf("%d (%s), want %d", got.Count, got.Why, tc.want)
			}
			if tc.want == 0 && len(m[f.Name].Peaks) > 1 {
				t.Errorf("asleep with peaks %v", m[f.Name].Peaks)
			}
		})
	}
}

// TestExpectedFunctionsCountAsUsed checks a function that was expected and never called. It sleeps
// ZeroAge after it was last expected.
func TestExpectedFunctionsCountAsUsed(t *testing.T) {
	f := loaded()
	f.Zero, f.Min, f.ZeroAge, f.Running, f.Demand, f.Service = true, 0, 30*time.Second, 0, plan.Demand{}, plan.Service{}
	m := Memory{f.Name: {Seen: t0}}
	for _, step := range []struct {
		at             time.Duration
		expected, want int
		why            string
	}{
		{time.Hour, 0, 0, "nothing asked for 30s: none"},
		{time.Hour + time.Second, 2, 1, "nothing waits; at least 1 for 2 requests on their way"},
		{time.Hour + 10*time.Second, 1, 1, "at least 1 for 1 requests on their way"},
		{time.Hour + 39*time.Second, 0, 1, "at least 1; was"},
		{time.Hour + 40*time.Second, 0, 0, "none"},
		{time.Hour + 41*time.Second, 0, 0, "none"},
	} {
		f.Expected = step.expected
		var l plan.Line
		l, m = sizeOne(t, f, step.at, m)
		if l.Count != step.want || !strings.Contains(l.Why, step.why) {
			t.Errorf("at %v: %d (%s), want %d (%s)", step.at, l.Count, l.Why, step.want, step.why)
		}
	}
}

// TestSleepingFunctionTakesNoReplicasFromOthers checks that a function that sleeps while its rate
// fades takes no replicas from others in its pipeline.
func TestSleepingFunctionTakesNoReplicasFromOthers(t *testing.T) {
	a, b := timed("a", 100*time.Millisecond), timed("b", 100*time.Millisecond)
	a.Zero, a.ZeroAge, a.Demand.Last = true, time.Second, t0.Add(-time.Second)
	s := plan.Snapshot{At: t0, Functions: []plan.Function{a, b}, Pipelines: []plan.Pipeline{{Name: "p", Stages: []string{"a", "b"}, SLO: time.Second}}}
	got, _, err := NewSizer(Config{}).Allocate(s, plan.Domains(s)[0], Memory{"a": {Seen: t0.Add(-time.Minute)}})
	if err != nil || got[0].Count != 0 || got[1].Count != 2 || strings.Contains(got[1].Why, "at risk") {
		t.Errorf("%+v, %v, want none, and two for b's own sake", got, err)
	}
}

// TestCountFallsAfterTheHold checks that a count rises at once, and falls only after the lower
// count was enough for ten seconds.
func TestCountFallsAfterTheHold(t *testing.T) {
	f := loaded()
	f.Replicas = replicas(5, plan.Ready) // no load here is a burst
	var m Memory
	var got []int
	for i, rate := range []float64{5, 38.2, 5, 5, 20, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5} {
		f.Demand.Rate = rate
		l, next := sizeOne(t, f, time.Duration(i)*time.Second, m)
		got, m = append(got, l.Count), next
		if i == 3 && !strings.Contains(l.Why, "held at 9, as asked for 2s ago") {
			t.Errorf("reason %q", l.Why)
		}
	}
	if want := "[2 9 9 9 9 9 9 9 9 9 9 5 5 5 2 2 2]"; fmt.Sprint(got) != want {
		t.Errorf("counts %v, want %s", got, want)
	}
	f.Max = 1
	if l, _ := sizeOne(t, f, 17*time.Second, Memory{"f.ns": {Peaks: []Peak{{t0.Add(16 * time.Second), 9}}}}); l.Count != 1 {
		t.Errorf("%d (%s), want the new maximum to count more than the past", l.Count, l.Why)
	}
}

// TestBurstKeepsTheCountUp checks a load that needs twice the ready replicas. The count must stay
// up for a minute after the load last needed so many.
func TestBurstKeepsTheCountUp(t *testing.T) {
	f := loaded()
	f.Demand.Rate, f.Replicas = 5, replicas(2, plan.Ready)
	var m Memory
	count := func(at time.Duration) plan.Line {
		var l plan.Line
		l, m = sizeOne(t, f, at, m)
		return l
	}
	if l := count(0); l.Count != 2 {
		t.Fatalf("%d (%s), want 2", l.Count, l.Why)
	}
	f.Demand.Rate = 19 // needs four servers: a burst
	if l := count(time.Second); l.Count != 5 {
		t.Fatalf("%d (%s), want 5", l.Count, l.Why)
	}
	f.Replicas, f.Demand.Rate = replicas(5, plan.Ready), 5
	for at, want := range map[time.Duration]string{
		20 * time.Second: "not below 5 for a burst 19s ago", 60900 * time.Millisecond: "not below 5 for a burst 59.9s ago", 61 * time.Second: "",
	} {
		before := m
		if l := count(at); (l.Count == 5) != (want != "") || !strings.Contains(l.Why, want) {
			t.Errorf("after %v %d (%s), want %q", at, l.Count, l.Why, want)
		}
		m = before
	}
	f.Demand.Rate = 26 // more load, but no burst: 5 are ready
	if l := count(2 * time.Second); l.Count != 6 {
		t.Errorf("%d (%s), want 6", l.Count, l.Why)
	}
	if got := m[f.Name].Burst; got.Count != 5 || !got.At.Equal(t0.Add(time.Second)) {
		t.Errorf("remembers %+v, want the burst's own count and time", got)
	}
	f.Zero, f.Demand, f.Waiting, f.Running = true, plan.Demand{Last: t0}, 0, 0
	if l := count(30 * time.Second); l.Count != 0 {
		t.Errorf("%d (%s), want what sleeps not to be kept up", l.Count, l.Why)
	}
}

// TestClockJumpsDoNotFreezeCounts checks that a jump of an hour, forward or back, neither freezes a
// count nor loses what is needed.
func TestClockJumpsDoNotFreezeCounts(t *testing.T) {
	for _, jump := range []time.Duration{-time.Hour, time.Hour} {
		f := loaded()
		var m Memory
		_, m = sizeOne(t, f, 0, m)
		f.Demand.Rate, f.Demand.Last = 5, t0.Add(jump)
		if l, _ := sizeOne(t, f, jump, m); l.Count != 2 {
			t.Errorf("%v: %d (%s), want 2", jump, l.Count, l.Why)
		}
		f.Service, f.Waiting = plan.Service{}, 10
		_, m = sizeOne(t, f, 0, nil)
		f.Waiting, f.Replicas = 20, replicas(1, plan.Ready)
		if l, _ := sizeOne(t, f, jump, m); l.Count != 2 {
			t.Errorf("%v: %d (%s), want growth to go on", jump, l.Count, l.Why)
		}
		f = loaded()
		f.Zero, f.ZeroAge, f.Running, f.Demand = true, time.Minute, 0, plan.Demand{}
		_, m = sizeOne(t, f, 0, nil)
		_, m = sizeOne(t, f, jump, m)
		if l, _ := sizeOne(t, f, jump+time.Minute, m); l.Count != 0 {
			t.Errorf("%v: %d (%s), want it asleep", jump, l.Count, l.Why)
		}
	}
}

func TestMergeKeepsBothPasts(t *testing.T) {
	a, b := Memory{"a": {Line: 1}}, Memory{"b": {Line: 2}}
	m := Sizer{}.Merge(a, b)
	if len(m) != 2 || m["a"].Line != 1 || m["b"].Line != 2 || len(a) != 1 || len(b) != 1 {
		t.Errorf("merged %v, of %v and %v", m, a, b)
	}
}

func BenchmarkSizer(b *testing.B) {
	for _, n := range []int{10, 100, 1000} {
		b.Run(fmt.Sprintf("functions=%d", n), func(b *testing.B) {
			s := plan.Snapshot{At: t0}
			for i := range n {
				f := loaded()
				f.Name = fmt.Sprintf("f%04d", i)
				s.Functions = append(s.Functions, f)
			}
			for i := range n / 4 {
				p := plan.Pipeline{Name: fmt.Sprintf("p%04d", i), SLO: time.Second}
				for k := range 4 {
					p.Stages = append(p.Stages, s.Functions[4*i+k].Name)
				}
				s.Pipelines = append(s.Pipelines, p)
			}
			z, domains := NewSizer(Config{}), plan.Domains(s)
			memory := make([]Memory, len(domains))
			for b.Loop() {
				for i, d := range plan.Domains(s) {
					var err error
					if _, memory[i], err = z.Allocate(s, d, memory[i]); err != nil {
						b.Fatal(err)
					}
				}
			}
			b.ReportMetric(float64(n)*float64(b.N)/b.Elapsed().Seconds(), "functions/s")
		})
	}
}
