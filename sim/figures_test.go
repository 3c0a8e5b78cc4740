package sim

import (
	"math"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
)

// near checks that a figure is close to the wanted value. They may differ by at most the given part
// of the wanted value.
func near(t *testing.T, what string, got, want, part float64) {
	t.Helper()
	if !(math.Abs(got-want) <= part*math.Abs(want)) {
		t.Errorf("%s: %g, want %g", what, got, want)
	}
}

// boosting is an allocator of one replica per stage. It gives each half a core more from 40 s on.
type boosting struct{ autoscaler.Fixed }

func (a boosting) Allocate(s plan.Snapshot, d plan.Domain, m struct{}) (plan.Alloc, struct{}, error) {
	out, m, err := a.Fixed.Allocate(s, d, m)
	for i := range out {
		if !s.At.Before(epoch.Add(40 * time.Second)) {
			out[i].CPUMilli = 1500
		}
	}
	return out, m, err
}

// TestResourcesAreCountedAfterTheWarmup checks that replicas' resources are counted after the
// warm-up only, with the CPU that plans gave them.
func TestResourcesAreCountedAfterTheWarmup(t *testing.T) {
	f := runs(t, Scenario{
		Duration: time.Minute, Warmup: 10 * time.Second, Seeds: 1,
		Policies: []Policy{{Make: func(Run) (policy.Set, error) {
			set, err := policy.Names{Corrector: "none"}.Choose()
			return policy.WithAllocator(set, "boosting", boosting{}), err
		}}},
		Nodes:     []Node{{Memory: 64 << 30, CPU: 16000, GPUs: 4, GPUMemory: 40 << 30}},
		Pipelines: []Pipeline{{Name: "p", Arrivals: Arrivals{Rate: "10"}}},
		Stages: []Stage{
			{Variant: Variant{Name: "a", GPU: 2, CPULimit: 1000, Service: Service{Dist: Deterministic, Mean: 50 * time.Millisecond}}, Next: []string{"b"}},
			{Variant: Variant{Name: "b", CPULimit: 1000, Service: Service{Dist: Deterministic, Mean: 20 * time.Millisecond}}},
		},
	})[0][0]
	near(t, "seconds", f.Seconds, 50, 0)
	near(t, "replica-seconds", f.ReplicaSeconds, 100, 1e-9)
	near(t, "GPU-seconds", f.DeviceSeconds, 100, 1e-9)
	near(t, "core-seconds", f.CoreSeconds, 2*(30*1+20*1.5), 0.01) // a decision is up to a second late
	near(t, "GPU-seconds of b", f.Stages[1].DeviceSeconds, 0, 0)
	near(t, "utilisation of a", f.Stages[0].Utilisation, 0.5, 0.1)
	// By Pollaczek and Khinchine, λ·E[W] = ρ²/2/(1 − ρ) calls wait on average in a's line, which is at
	// half of its capacity. By Little's law, that is also the mean wait times λ.
	near(t, "queue of a", f.Stages[0].Queue, 0.25, 0.4)
	near(t, "queue of a by Little", f.Stages[0].Queue, f.Stages[0].Rate*f.Stages[0].Wait, 0.02)
}

// TestQuantilesAscendAndAttainmentCountsFailures checks that quantiles ascend. Attainment must
// count all requests, also those that failed.
func TestQuantilesAscendAndAttainmentCountsFailures(t *testing.T) {
	s := coded()
	s.Stages[1].Max, s.Pipelines[0].Timeout, s.Pipelines[0].Arrivals.Rate = 1, 600*time.Millisecond, "30"
	s.Pipelines[0].SLO = 200 * time.Millisecond
	for _, f := range runs(t, s)[0] {
		p := &f.Pipelines[0]
		if p.Failed == 0 || p.Offered != p.Answered+p.Failed || !(0 < p.P50 && p.P50 < p.P75 && p.P75 < p.P95 && p.P95 < p.P99 && p.P99 <= 0.6) {
			t.Errorf("%+v", p)
		}
		failed := 0
		for _, n := range p.Failures {
			failed += n
		}
		near(t, "failures", float64(failed), p.Failed, 0)
		near(t, "attainment at the objective", p.Attained(200*time.Millisecond), p.Attainment, 0.02)
		near(t, "attainment at last", p.Attained(time.Second), p.Answered/p.Offered, 0)
		near(t, "attainment at nothing", p.Attained(time.Microsecond), 0, 0)
		for q, at := range map[float64]float64{0.5: p.P50, 0.75: p.P75, 0.95: p.P95, 0.99: p.P99} {
			near(t, "attainment at a quantile", p.Attained(time.Duration(at*1e9)), q*p.Answered/p.Offered, 0.01)
		}
		near(t, "goodput", p.Goodput, p.Attainment*p.Offered/60, 1e-9)
	}
}

// TestAttainedIncludesTheTimeItself checks that a request that took exactly the time asked for is
// in time.
func TestAttainedIncludesTheTimeItself(t *testing.T) {
	p := PipelineFigures{Offered: 10, latency: []bucket{{time.Millisecond, 4}, {2 * time.Millisecond, 8}}}
	for d, want := range map[time.Duration]float64{0: 0, 999 * time.Microsecond: 0, time.Millisecond: 0.4, 1999 * time.Microsecond: 0.4, 2 * time.Millisecond: 0.8, time.Hour: 0.8} {
		near(t, d.String(), p.Attained(d), want, 0)
	}
	near(t, "nothing", (&PipelineFigures{}).Attained(time.Second), 0, 0)
	for q, want := range map[float64]time.Duration{0.4: time.Millisecond, 0.5: 2 * time.Millisecond, 0.8: 2 * time.Millisecond, 0.81: 0} {
		if got, ok := p.Quantile(q); got != want || ok != (want > 0) {
			t.Errorf("%g of the requests within %v, %v; want %v: a fifth was not answered", q, got, ok, want)
		}
	}
}

// TestStartsByKey checks that starts are counted by path, and by whether the stage was a key stage
// when they were ordered.
func TestStartsByKey(t *testing.T) {
	m := model(t, burst)
	all, err := m.Runs(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	r := m.Result(all)
	n := map[bool]int{}
	for p := range all {
		for i := range r.Stages {
			counted := 0
			for _, f := range all[p] {
				for k, x := range f.Stages[i].Starts {
					counted += x.N
					n[x.Key] += x.N
					is := m.stages[i].spec.Start
					if want := map[string]time.Duration{"parked": is.Parked, "fork": is.Fork, "cold": is.Cold}[x.Path].Seconds(); x.Path != "cold" && math.Abs(x.Mean-want) > 1e-6 || x.Mean > want+1e-6 {
						t.Errorf("%s: starts by %s took %g s, want %g", r.Stages[i], x.Path, x.Mean, want)
					}
					if k > 0 && f.Stages[i].Starts[k-1].Path > x.Path {
						t.Errorf("%s: %+v, want them sorted", r.Stages[i], f.Stages[i].Starts)
					}
				}
			}
			for _, of := range r.Policies[p].Stages[i].Starts {
				counted -= of
			}
			if counted != 0 {
				t.Errorf("%s: %d starts more in the figures than in the result", r.Stages[i], counted)
			}
		}
	}
	if n[true] == 0 || n[false] == 0 {
		t.Errorf("%d starts of key stages, %d of others, want both", n[true], n[false])
	}
	one, err := m.One(t.Context(), 1, m.scenario.Seed+1)
	if err != nil || toJSON(t, one) != toJSON(t, all[1][1]) {
		t.Errorf("a run by itself: %v, %+v, want %+v", err, one, all[1][1])
	}
}

func runs(t *testing.T, s Scenario) [][]Figures {
	t.Helper()
	m, err := s.Model(nil)
	if err != nil {
		t.Fatal(err)
	}
	out, err := m.Runs(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, of := range out {
		if of[0].Complaint != "" {
			t.Error(of[0].Complaint)
		}
	}
	return out
}
