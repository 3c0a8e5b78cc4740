package plantest

import (
	"math"
	"math/rand/v2"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// absurd gives some functions impossible signals, as from a clock that jumped, a division by zero
// or an overflow.
func absurd(s *plan.Snapshot, rng *rand.Rand) {
	floats := []float64{math.NaN(), math.Inf(1), math.Inf(-1), -1, 0, math.MaxFloat64, math.SmallestNonzeroFloat64}
	float := func(v *float64) {
		if rng.IntN(6) == 0 {
			*v = floats[rng.IntN(len(floats))]
		}
	}
	durations := []time.Duration{-1, 0, 1, math.MaxInt64, math.MinInt64, -time.Hour}
	duration := func(v *time.Duration) {
		if rng.IntN(6) == 0 {
			*v = durations[rng.IntN(len(durations))]
		}
	}
	counts := []int{-1, 0, math.MaxInt32, math.MinInt32}
	count := func(v *int) {
		if rng.IntN(12) == 0 {
			*v = counts[rng.IntN(len(counts))]
		}
	}
	for i := range s.Functions {
		f := &s.Functions[i]
		float(&f.Demand.Rate)
		float(&f.Demand.CV)
		float(&f.Service.CV)
		float(&f.Busy.Share)
		float(&f.Target.Value)
		float(&f.Target.Load)
		for _, d := range []*time.Duration{&f.Service.Mean, &f.Wait.Mean, &f.Wait.P99, &f.Wait.Oldest, &f.ZeroAge} {
			duration(d)
		}
		for _, n := range []*int{&f.Waiting, &f.Running, &f.Slots, &f.CPUMilli, &f.CPUNow} {
			count(n)
		}
		for k := range f.Profile {
			duration(&f.Profile[k].Mean)
			count(&f.Profile[k].CPUMilli)
			count(&f.Profile[k].N)
		}
		if rng.IntN(20) == 0 {
			f.Demand.Last = time.Time{}
		}
	}
	for i := range s.Pipelines {
		duration(&s.Pipelines[i].SLO)
	}
	count(&s.Budget)
}
