package baseline

import (
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// TestInferLineScalesUpAgain checks a load that falls and then rises again within the sample's
// envelope. The stage must rise up to its planned replicas, and no further. The plan is for 4
// requests per second, with four replicas that serve 5 per second each and ρ = 0.2.
func TestInferLineScalesUpAgain(t *testing.T) {
	p := InferLinePlan{Stages: map[string]InferLineProvision{"a": {Count: 4, Batch: 1, Throughput: 5, Ratio: 0.2}}, Service: time.Second, Rate: 4}
	for range len(plan.Envelope{}) {
		p.Envelope = append(p.Envelope, 1000)
	}
	at, m := began, InferLineMemory{}
	for i, tc := range []struct {
		after time.Duration
		rate  float64
		want  int
	}{
		{0, 4, 4},
		{30 * time.Second, 1, 1}, // 4/s is 30 s ago
		{time.Second, 2, 2},      // at once
		{time.Second, 1, 2},      // 2/s was a second ago
		{time.Second, 100, 4},    // 100 by the rule, but the load is within the sample's
		{30 * time.Second, 0, 1},
	} {
		at = at.Add(tc.after)
		f := plan.Function{Name: "a", Max: 400, Batch: 1, Slots: 1, Demand: plan.Demand{Known: true, Rate: tc.rate}}
		s := plan.Snapshot{At: at, Functions: []plan.Function{f}}
		out, next, err := NewInferLine(InferLineConfig{Plan: p}).Allocate(s, plan.Domains(s)[0], m)
		if err != nil {
			t.Fatal(err)
		}
		if m = next; out[0].Count != tc.want {
			t.Errorf("step %d, %g/s: %d, want %d (%s)", i, tc.rate, out[0].Count, tc.want, out[0].Why)
		}
	}
}

// TestInferLineIgnoresShorterWindows checks that windows of fewer service times than Shortest do
// not count.
func TestInferLineIgnoresShorterWindows(t *testing.T) {
	p := InferLinePlan{Stages: map[string]InferLineProvision{"a": {Count: 2, Batch: 1, Throughput: 5, Ratio: 0.4}}, Service: time.Second, Rate: 4}
	for range len(plan.Envelope{}) {
		p.Envelope = append(p.Envelope, 8)
	}
	f := plan.Function{Name: "a", Max: 400, Batch: 1, Slots: 1, Demand: plan.Demand{Known: true, Rate: 4, Envelope: plan.Envelope{0, 0, 0, 20, 20, 36, 36, 36, 36, 36}}}
	s := plan.Snapshot{At: began, Functions: []plan.Function{f}}
	for _, tc := range []struct {
		shortest float64
		want     int
	}{{0, 10}, {1, 10}, {2, 5}, {4, 5}, {5, 2}, {1e9, 2}} {
		// 20/s within 1 s, 10/s within 2 s, 9/s within 4 s; then at most 8/s
		out, _, err := NewInferLine(InferLineConfig{Plan: p, Shortest: tc.shortest}).Allocate(s, plan.Domains(s)[0], nil)
		if err != nil {
			t.Fatal(err)
		}
		if out[0].Count != tc.want {
			t.Errorf("from %g service times: %d, want %d (%s)", tc.shortest, out[0].Count, tc.want, out[0].Why)
		}
	}
}
