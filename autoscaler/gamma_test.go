package autoscaler

import (
	"math"
	"testing"
)

// TestGammaWaitOfPoissonArrivalsIsErlangs checks the sum and the root against M/M/c.
func TestGammaWaitOfPoissonArrivalsIsErlangs(t *testing.T) {
	for _, c := range []int{1, 2, 5, 32, mostTerms} {
		for _, rho := range []float64{0.01, 0.3, 0.5, 0.9, saturated} {
			a := rho * float64(c)
			got, busy := gammaWait(a, 1, c, 1), erlangC(c, a)
			if math.Abs(got.Busy-busy) > 1e-9 || math.Abs(got.Rate-float64(c)*(1-rho)) > 1e-9*float64(c) {
				t.Errorf("%d servers at %g: %+v, want %g busy", c, rho, got, busy)
			}
		}
	}
}

// TestBurstsWaitMonotonously checks the three waits that decisions use: what bursts add, the total
// of exponential services, and that of fixed services. Each falls in c and rises in λ.
func TestBurstsWaitMonotonously(t *testing.T) {
	waits := func(a float64, c int, ca2 float64) [3]float64 {
		return [3]float64{burstExtra(a, 1, c, ca2), meanWait(a, 1, c, ca2, 1), meanWait(a, 1, c, ca2, 0)}
	}
	for _, ca2 := range []float64{1.05, 2, 4, 16, 64, mostCV2, 1e4} {
		for _, a := range []float64{0.01, 0.3, 0.9, 2, 5, 20, 60, 200, 505} {
			last := [3]float64{math.Inf(1), math.Inf(1), math.Inf(1)}
			for c := int(a/saturated) + 1; c < int(a)+40; c++ {
				now := waits(a, c, ca2)
				for i, v := range now {
					if !(v >= 0) || v > last[i]*(1+1e-9)+1e-12 {
						t.Fatalf("Ca² %g, %g Erlang: wait %d is %g with %d servers, %g with one less", ca2, a, i, v, c, last[i])
					}
				}
				last = now
			}
		}
		for _, c := range []int{1, 2, 5, 16, 100, mostTerms, mostTerms + 1, 5000} {
			last := [3]float64{}
			for rho := 0.005; rho < saturated; rho += 0.005 {
				now := waits(rho*float64(c), c, ca2)
				for i, v := range now {
					if v < last[i]*(1-1e-9)-1e-12 {
						t.Fatalf("Ca² %g, %d servers: wait %d is %g at %g, %g below", ca2, c, i, v, rho, last[i])
					}
				}
				last = now
			}
		}
	}
}

// FuzzGammaWait checks that the law is one, for any arguments of a stable queue.
func FuzzGammaWait(f *testing.F) {
	f.Add(38.2, 5.0, 8, 64.0, 0.2)
	f.Add(1e-300, 1.0, 600, 1e6, math.NaN())
	f.Add(0.97, 1.0, 1, 0.1, -1.0)
	f.Fuzz(func(t *testing.T, lambda, mu float64, c int, ca2, cs2 float64) {
		c = min(max(c, 1), 2000)
		if !(mu > 1e-9 && mu < 1e9) || !(lambda > 0) || lambda > saturated*float64(c)*mu {
			return
		}
		w := Waits(lambda, mu, c, ca2, cs2)
		if !(w.Busy >= 0 && w.Busy <= 1) || !(w.Rate > 0) || !(w.Mean() >= 0) || math.IsInf(w.Mean(), 0) {
			t.Fatalf("Waits(%g,%g,%d,%g,%g) = %+v", lambda, mu, c, ca2, cs2, w)
		}
		a, s := factors(ca2, cs2)
		if got := meanWait(lambda, mu, c, a, s); w.Busy > 0 && got > 1e-300 && math.Abs(w.Mean()-got) > 1e-9*got {
			t.Errorf("Waits(%g,%g,%d,%g,%g) has mean %g, want %g", lambda, mu, c, ca2, cs2, w.Mean(), got)
		}
	})
}
