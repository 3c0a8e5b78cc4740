package accuracy

import (
	"errors"
	"testing"
)

// TestLeavesOfDifferentDepths plans for a tree with a leaf right behind its root, beside a way of
// two stages to two more leaves.
func TestLeavesOfDifferentDepths(t *testing.T) {
	p := &Problem{Replicas: 20, Pipelines: []Pipeline{{
		Name: "p", Objective: 1, Queueing: HalfForQueueing, Demand: 30,
		Steps: []Step{{From: 0, To: 1}, {From: 0, To: 2}, {From: 2, To: 3}, {From: 3, To: 4}, {From: 3, To: 5}},
	}}}
	for _, name := range []string{"r", "a", "b", "c", "d", "e"} {
		p.Stages = append(p.Stages, Stage{Name: name, Variants: []Variant{falling("fast", 0.8, 0.01), falling("good", 0.9, 0.05)}})
	}
	if s, err := p.Solve(); err != nil || !s.Proved() || s.Served < 1-1e-6 || s.Price != 12 || differ([]float64{s.Accuracy}, []float64{(0.81 + 2*0.6561) / 3}) >= 0 {
		t.Errorf("%+v, %v, want all requests served by two good replicas per stage", s, err)
	}
}

// TestPlansOfTallTrees plans for random trees of more stages than brute force can try. The plans
// are checked exactly.
func TestPlansOfTallTrees(t *testing.T) {
	served, dropped := 0, 0
	for seed := range uint64(60) {
		p := tall(seed)
		s, err := p.Solve()
		if fault := (*FaultError)(nil); errors.As(err, &fault) {
			continue
		}
		if err != nil || !s.Proved() {
			t.Fatalf("problem %d: %v, want a plan that is proved to be the best", seed, err)
		}
		if s.Served < 1-1e-6 {
			dropped++
		} else {
			served++
		}
	}
	if served < 10 || dropped < 10 {
		t.Errorf("%d problems were served, and %d not, want at least 10 of each", served, dropped)
	}
}
