package autoscaler

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/plan"
	"github.com/stagecoach-serving/stagecoach/plan/plantest"
)

func TestPolicy(t *testing.T) { plantest.Run(t, NewSizer(Config{})) }

var t0 = time.Date(2025, 6, 1, 12, 0, 0, 0, time.UTC)

// loaded is a function with 38.2 requests/s of 200 ms.
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

// sizeOne runs the sizer on one function alone.
func sizeOne(t *testing.T, f plan.Function, at time.Duration, m Memory) (plan.Line, Memory) {
	t.Helper()
	s := plan.Snapshot{At: t0.Add(at), Functions: []plan.Function{f}}
	a, m, err := NewSizer(Config{}).Allocate(s, plan.Domain{Functions: []string{f.Name}}, m)
	if err != nil {
		t.Fatal(err)
	}
	return a[0], m
}

func TestSizer(t *testing.T) {
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
		"max":              {func(f *plan.Function) { f.Waiting = 1000; f.Max = 10 }, 10, "max 10"},
		"min":              {func(f *plan.Function) { f.Min = 15 }, 15, "8 for stability; at least 15; was"},
		"several slots":    {func(f *plan.Function) { f.Slots = 4 }, 3, "2 for stability, 3 for a wait of 200ms"},
		"no load":          {func(f *plan.Function) { f.Demand.Rate = 0 }, 1, "at least 1"},
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

// TestUnknownServiceDoublesOncePerSecond: ticks come every 20 ms when poked; a slow first answer must not cost the maximum.
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
	// While some are starting, the line says nothing yet.
	busy := f
	busy.Waiting, busy.Replicas = 1000, append(replicas(4, plan.Ready), replicas(1, plan.Starting)...)
	if l, _ := sizeOne(t, busy, 5*time.Second, Memory{"f.ns": {}}); l.Count != 5 {
		t.Errorf("%d (%s), want 5", l.Count, l.Why)
	}
	// A line that does not grow wants no more.
	f.Replicas = replicas(4, plan.Ready)
	if l, _ := sizeOne(t, f, 5*time.Second, Memory{"f.ns": {Line: f.Waiting}}); l.Count != 4 {
		t.Errorf("%d (%s), want 4", l.Count, l.Why)
	}
}

func TestZero(t *testing.T) {
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

// TestHold: up at once, down only when the lower count was enough for ten seconds.
func TestHold(t *testing.T) {
	f := loaded()
	f.Replicas = replicas(5, plan.Ready) // nothing here is a burst
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
