package dispatch

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// TestRateOfBursts sends three batches of 16 arrivals per second, which is 48 arrivals/s with a Ca²
// of 31. The estimate must be off by at most 22 %, as a root mean square. It must show a fourfold
// rate within 15 s, and the end of the load within 16 s.
func TestRateOfBursts(t *testing.T) {
	var a arrivals
	rnd := rand.New(rand.NewPCG(5, 5))
	now := time.Duration(0)
	batches := func(perSecond float64, until time.Duration, seen func(rate float64)) {
		for {
			next := now + time.Duration(rnd.ExpFloat64()/perSecond*float64(time.Second))
			if next >= until {
				now = until
				return
			}
			now = next
			for range 16 {
				a.add(at(now))
			}
			seen(a.read(at(now)).Rate)
		}
	}
	batches(3, 2*time.Minute, func(float64) {})
	n, squares := 0.0, 0.0
	batches(3, 10*time.Minute, func(rate float64) { n, squares = n+1, squares+(rate/48-1)*(rate/48-1) })
	if off := math.Sqrt(squares / n); off > 0.22 {
		t.Errorf("off by %.0f %%, want less than a fifth or so", 100*off)
	}
	batches(12, now+15*time.Second, func(float64) {})
	if rate := a.read(at(now)).Rate; rate < 100 {
		t.Errorf("%.0f/s 15 s after a step to 192/s, want it seen", rate)
	}
	if rate := a.read(at(now + 16*time.Second)).Rate; rate > 10 {
		t.Errorf("%.0f/s 16 s after the last, want at most 10/s", rate)
	}
}
