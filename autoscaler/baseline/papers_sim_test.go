package baseline_test

import (
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/baseline"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/bench/load/arrivals"
	"github.com/stagecoach-serving/stagecoach/sim"
)

// stepped is a pipeline at 3 requests per second, then 12 for two minutes, then 3 again.
const stepped = `
duration: 6m
nodes: [{count: 4, memory: 64Gi, cpu: 32}]
pipelines: [{name: p, slo: 1200ms, arrivals: {rate: "3:1m,12:2m,3:3m"}}]
stages:
- {name: a, next: [b], max: 20, start: {cold: 3s}, service: {dist: gamma, cv: 0.2, mean: 200ms}}
- {name: b, next: [c], max: 20, start: {cold: 3s}, service: {dist: gamma, cv: 0.2, mean: 300ms}}
- {name: c, max: 20, start: {cold: 3s}, service: {dist: gamma, cv: 0.2, mean: 100ms}}
`

// seen is an allocator that records the counts of its decisions and the time of the first.
type seen[M any] struct {
	plan.Allocator[M]
	see func(at time.Time, count int)
}

func (s *seen[M]) Allocate(snap plan.Snapshot, d plan.Domain, m M) (plan.Alloc, M, error) {
	a, next, err := s.Allocator.Allocate(snap, d, m)
	count := 0
	for _, l := range a {
		count += l.Count
	}
	s.see(snap.At, count)
	return a, next, err
}

// TestPapersScaleUpAndDown runs each policy in the simulator under a step.
func TestPapersScaleUpAndDown(t *testing.T) {
	planned := func(t *testing.T) baseline.InferLinePlan {
		profile, err := arrivals.ParseProfile("3")
		if err != nil {
			t.Fatal(err)
		}
		source, err := arrivals.Renewal(profile, 1, 7)
		if err != nil {
			t.Fatal(err)
		}
		var sample []time.Duration
		for source := arrivals.Until(source, 2*time.Minute); ; {
			at, ok := source.Next()
			if !ok {
				break
			}
			sample = append(sample, at)
		}
		p, err := baseline.PlanInferLine([]baseline.InferLineStage{
			{Function: "a.sim", Batches: []time.Duration{200 * time.Millisecond}, Max: 20},
			{Function: "b.sim", Batches: []time.Duration{300 * time.Millisecond}, Max: 20},
			{Function: "c.sim", Batches: []time.Duration{100 * time.Millisecond}, Max: 20},
		}, sample, 1200*time.Millisecond, 0.99, 0)
		if err != nil || !p.Feasible {
			t.Fatalf("%+v, %v, want a plan", p, err)
		}
		return p
	}
	for name, tc := range map[string]struct {
		with func(set policy.Set, see func(time.Time, int)) policy.Set
	}{
		"infless": {func(s policy.Set, see func(time.Time, int)) policy.Set {
			return policy.WithAllocator(s, "it", &seen[baseline.INFlessMemory]{baseline.NewINFless(baseline.INFlessConfig{}), see})
		}},
		"inferline": {func(s policy.Set, see func(time.Time, int)) policy.Set {
			return policy.WithAllocator(s, "it", &seen[baseline.InferLineMemory]{baseline.NewInferLine(baseline.InferLineConfig{Plan: planned(t)}), see})
		}},
		"cocktail": {func(s policy.Set, see func(time.Time, int)) policy.Set {
			return policy.WithAllocator(s, "it", &seen[baseline.CocktailMemory]{baseline.NewCocktail(baseline.CocktailConfig{Keep: 1}), see})
		}},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := sim.Parse(strings.NewReader(stepped))
			if err != nil {
				t.Fatal(err)
			}
			var before, during, after int // at 1 min, the most until 3 min, at 6 min
			begin := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
			see := func(at time.Time, count int) {
				switch at := at.Sub(begin); {
				case at < time.Minute:
					before = count
				case at < 3*time.Minute:
					during = max(during, count)
				default:
					after = count
				}
			}
			s.Seeds = 1
			s.Policies = []sim.Policy{{Name: name, Make: func(sim.Run) (policy.Set, error) {
				set, err := policy.Names{Corrector: "none", Sharer: "none"}.Choose()
				return tc.with(set, see), err
			}}}
			m, err := s.Model(func(name string) (io.ReadCloser, error) { return nil, errors.New("no file " + name) })
			if err != nil {
				t.Fatal(err)
			}
			r, err := m.Run(t.Context(), nil)
			if err != nil {
				t.Fatal(err)
			}
			p := r.Policies[0]
			if p.Held.Mean > 0 || p.Refused.Mean > 0 {
				t.Errorf("%g held, %g refused: %s", p.Held.Mean, p.Refused.Mean, p.Complaint)
			}
			t.Logf("%d, %d, %d replicas", before, during, after)
			// 12/s keep 8 replicas busy, and 3/s keep 2 busy.
			if during < 8 || during <= before || after >= during {
				t.Errorf("%d replicas before the step, %d during it, %d after, want more than before, 8 at least, and fewer after", before, during, after)
			}
		})
	}
}
