package main

import (
	"math/rand/v2"
	"slices"

	"github.com/stagecoach-serving/stagecoach/bench/load/arrivals"
)

// play calls arrive with the times of arrivals, and look once per second, in the order of time.
// Gaps are gamma with the given CV, stretched by the rate at each time. spike more arrivals come at
// the time settle.
func play(seed uint64, cv float64, rate func(t float64) float64, end float64, look, arrive func(t float64), spike int) {
	rnd := rand.New(rand.NewPCG(seed, 1))
	shape := 1 / (cv * cv)
	next, t := arrivals.Gamma(rnd, shape)/shape, 0.0 // next is in mean gaps
	for second := 1.0; second <= end; second++ {
		if second == settle+1 {
			for range spike {
				arrive(settle)
			}
		}
		// Within a second, the rate is taken in parts of 50 ms.
		for part := 1; part <= 20; part++ {
			to := second - 1 + float64(part)/20
			r := rate((t + to) / 2)
			for next <= (to-t)*r {
				t += next / r
				arrive(t)
				next = arrivals.Gamma(rnd, shape) / shape
			}
			next -= (to - t) * r
			t = to
		}
		look(second)
	}
}

func median(v []float64) float64 {
	slices.Sort(v)
	return v[len(v)/2]
}
