package dispatch

import (
	"math"
	"time"
)

// A count of bursty arrivals is worth less than one of those that come by chance: in a time t it is λt, with a variance of Ca²·λt (renewal
// theory: Cox, Renewal Theory, 1962, §4.2). To know a rate as well as the base window does, a window has to be Ca² times as long. So
// there are sums that fade more slowly than the base, each half as fast as the one before, and a rate is of the shortest that is long enough. What
// was so long ago may not hold any more: where a shorter window says what chance does not explain, that one counts (Lepski,
// On a Problem of Adaptive Estimation, 1990: the widest that no narrower one contradicts).
const (
	slower     = 4 // of them: the slowest fades in 16 times the base's time
	slowestFor = 1 << slower
)

// rates are sums of arrivals, each of which fades half as fast as the one before; the first in twice the base's time.
type rates struct {
	sums [slower]float64
	at   time.Duration // as of then
}

// faded returns r as of later.
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

// longGaps is how many times Ca²/λ a gap may be before it says that the load has gone: gaps that are gamma distributed, which the
// burstier are like batches, are longer with a probability of less than exp(−5).
const longGaps = 5

// rate is what is known of the rate when the base window says base, arrivals have this squared coefficient of variation, the first was
// age ago, and none has come for so long.
func (r rates) rate(base, ca2 float64, age, silence time.Duration) float64 {
	known := make([]float64, 1, 1+slower) // by window: the k-th fades in 2ᵏ times the base's time
	known[0] = base
	for k, sum := range r.sums {
		narrower := fade.Seconds() * float64(int(1)<<k)
		if narrower >= ca2*fade.Seconds() {
			break // long enough
		}
		slow := sum / (2 * narrower * -math.Expm1(-age.Seconds()/(2*narrower)))
		if silence.Seconds()*slow > longGaps*ca2 {
			break
		}
		for j, rate := range known {
			// Of a sum that fades in t the variance is that of a count in 2t.
			if within := 2 * fade.Seconds() * float64(int(1)<<j); math.Abs(rate-slow) > surprise*math.Sqrt(ca2*slow/within) {
				return known[k]
			}
		}
		known = append(known, slow)
	}
	return known[len(known)-1]
}
