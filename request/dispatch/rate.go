package dispatch

import (
	"math"
	"time"
)

// A count of bursty arrivals is less certain than one of Poisson arrivals. In a time t the count
// has mean λt and variance Ca²·λt (Cox, Renewal Theory, 1962, §4.2). To know a rate as well as the
// base window does, a window must be Ca² times as long. So there are sums that fade more slowly
// than the base, each half as fast as the previous one. The rate comes from the shortest sum that
// is long enough.
//
// Old arrivals may not describe the present load. If a shorter window differs by more than chance
// explains, the shorter one counts (Lepski, On a Problem of Adaptive Estimation, 1990: take the
// widest window that no narrower one contradicts).
const (
	slower     = 4 // number of slower sums; the slowest fades in 16 times the base's time
	slowestFor = 1 << slower
)

// rates are sums of arrivals. The first fades half as fast as the base, and each other one half as
// fast as the one before.
type rates struct {
	sums [slower]float64
	at   time.Duration // time of the sums
}

// faded returns r as of a later time.
func (r rates) faded(at time.Duration) rates {
	if at > r.at {
		f := math.Exp(-(at - r.at).Seconds() / (slowestFor * fade).Seconds())
		for k := slower - 1; k >= 0; k-- {
			r.sums[k] *= f
			f *= f
		}
		r.at = at
	}
	return r
}

func (r *rates) add(at time.Duration) {
	*r = r.faded(at)
	for k := range r.sums {
		r.sums[k]++
	}
}

// longGaps says when a gap means that the load has ended: when the gap is longer than longGaps
// times Ca²/λ. For gamma distributed gaps, the probability of a longer gap is below exp(−5). Bursty
// gamma gaps resemble batches.
const longGaps = 5

// rate returns the best estimate of the rate. base is the rate of the base window, ca2 is the
// squared coefficient of variation of the gaps, age is the time since the first arrival, and
// silence the time since the last.
func (r rates) rate(base, ca2 float64, age, silence time.Duration) float64 {
	known := make([]float64, 1, 1+slower) // by window: the k-th fades in 2ᵏ times the base's time
	known[0] = base
	for k, sum := range r.sums {
		narrower := fade.Seconds() * float64(int(1)<<k)
		if narrower >= ca2*fade.Seconds() {
			break // this window is long enough
		}
		slow := sum / (2 * narrower * -math.Expm1(-age.Seconds()/(2*narrower)))
		if silence.Seconds()*slow > longGaps*ca2 {
			break
		}
		for j, rate := range known {
			// A sum that fades in t has the variance of a count in 2t.
			if within := 2 * fade.Seconds() * float64(int(1)<<j); math.Abs(rate-slow) > surprise*math.Sqrt(ca2*slow/within) {
				return known[k]
			}
		}
		known = append(known, slow)
	}
	return known[len(known)-1]
}
