package baseline

import (
	"math/rand/v2"
	"testing"
	"time"
)

// BenchmarkPlanInferLine plans a row of eight stages for four minutes of bursty arrivals.
func BenchmarkPlanInferLine(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 1))
	var at time.Duration
	var sample []time.Duration
	for len(sample) < 3000 {
		for range 1 + rng.IntN(20) {
			at += time.Duration(rng.ExpFloat64() * float64(8*time.Millisecond))
			sample = append(sample, at)
		}
		at += time.Duration(rng.ExpFloat64() * float64(800*time.Millisecond))
	}
	var stages []InferLineStage
	for i := range 8 {
		t := time.Duration(80+10*i) * time.Millisecond
		stages = append(stages, InferLineStage{Function: string(rune('a' + i)), Batches: []time.Duration{t, t * 14 / 10, t * 18 / 10, t * 22 / 10}, Max: 48})
	}
	for b.Loop() {
		p, err := PlanInferLine(stages, sample, 2*time.Second, 0.99, 0)
		if err != nil || !p.Feasible {
			b.Fatal(p, err)
		}
	}
}
