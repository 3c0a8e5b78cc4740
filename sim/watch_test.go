package sim

import (
	"math"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
)

// watching is an allocator of fixed counts that compares predictions with measurements.
type watching struct {
	autoscaler.Fixed
	*judged
}

// judged sums up what a Watch says about one function.
type judged struct {
	watch               autoscaler.Watch
	ticks, known, off   int // ticks; those that can be judged; those with a prediction that is far off
	episodes            int
	predicted, measured float64 // seconds, added up over judged ticks
	latency             float64 // seconds, mean of all requests
}

func (a watching) Allocate(s plan.Snapshot, d plan.Domain, m struct{}) (plan.Alloc, struct{}, error) {
	a.ticks++
	all, changed := a.watch.Observe(&s)
	for _, e := range all {
		a.known++
		a.predicted, a.measured = a.predicted+e.Predicted.Seconds(), a.measured+e.Stayed.Seconds()
		if e.Off {
			a.off++
		}
	}
	for _, e := range changed {
		if e.Off {
			a.episodes++
		}
	}
	return a.Fixed.Allocate(s, d, m)
}

// watch runs a stage with a fixed number of replicas under constant load.
func watch(t *testing.T, duration time.Duration, replicas int, rate string, cv float64, v Variant) judged {
	t.Helper()
	var out judged
	v.Name, v.Min, v.Max = "s", replicas, replicas
	s := Scenario{
		Duration: duration, Seeds: 1, Nodes: []Node{{Memory: 64 << 30, CPU: 64000}},
		Pipelines: []Pipeline{{Name: "p", Arrivals: Arrivals{Rate: rate, CV: &cv}}}, Stages: []Stage{{Variant: v}},
		Policies: []Policy{{Name: "watch", Make: func(Run) (policy.Set, error) {
			set, err := policy.Names{Corrector: "none", Warmer: "none"}.Choose()
			return policy.WithAllocator(set, "watching", watching{judged: &out}), err
		}}},
	}
	m, err := s.Model(nil)
	if err != nil {
		t.Fatal(err)
	}
	r, err := m.Run(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	out.latency = r.Policies[0].Pipelines[0].Mean.Mean
	return out
}

// TestWatchJudgesByTheSameTasks checks that a Watch compares like with like. Predictions hold under
// the load that the model is made for, also if calls wait for their batch to fill. The model does
// not know that batches grow with the load.
func TestWatchJudgesByTheSameTasks(t *testing.T) {
	for name, tc := range map[string]struct {
		rate      string
		cv        float64
		v         Variant
		low, high float64 // of measured over predicted times
	}{
		"chance":    {"28", 1, Variant{Service: Service{Mean: 100 * time.Millisecond}}, 0.9, 1.1},
		"bursts":    {"200", 4, Variant{Service: Service{Mean: 10 * time.Millisecond}}, 0.9, 1.1},
		"batches":   {"100", 1, Variant{Service: Service{Mean: 50 * time.Millisecond, BatchCost: pointer(0.2)}, Batching: Batching{Batch: 4}}, 0.5, 1.1},
		"a delay":   {"20", 1, Variant{Service: Service{Mean: 10 * time.Millisecond}, Batching: Batching{Batch: 64, BatchWait: 100 * time.Millisecond}}, 0.9, 1.1},
		"a fill":    {"100", 1, Variant{Service: Service{Mean: 10 * time.Millisecond, BatchCost: pointer(0.2)}, Batching: Batching{Batch: 4, BatchWait: 100 * time.Millisecond}}, 0.8, 1.2},
		"few tasks": {"0.1", 1, Variant{Service: Service{Mean: 10 * time.Millisecond}}, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			j := watch(t, 3*time.Minute, 4, tc.rate, tc.cv, tc.v)
			ratio := 0.0
			if j.known > 0 {
				ratio = j.measured / j.predicted
				if mean := j.measured / float64(j.known); math.Abs(mean/j.latency-1) > 0.05 {
					t.Errorf("%.2f ms measured by the watch, and %.2f by requests", 1e3*mean, 1e3*j.latency)
				}
			}
			t.Logf("%d of %d ticks judged, ratio %.2f, off in %d, %d episodes", j.known, j.ticks, ratio, j.off, j.episodes)
			if !(tc.low <= ratio && ratio <= tc.high) || (j.known == 0) != (tc.high == 0) {
				t.Errorf("measured over predicted is %.2f in %d ticks, want %g to %g", ratio, j.known, tc.low, tc.high)
			}
			if j.episodes > 0 {
				t.Errorf("%d episodes, want none", j.episodes)
			}
		})
	}
}
