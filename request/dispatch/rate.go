package dispatch

import (
	"math"
	"time"
)

// Bursty arrivals need longer windows than Poisson arrivals, because a count of bursty arrivals is
// less certain. Let λ be the rate, and Ca the CV of the gaps between arrivals. In a time t, the
// count has mean λt and variance Ca²·λt (Cox, Renewal Theory, 1962, §4.2). The base window (see
// signals.go) is long enough for Poisson arrivals. For the same certainty, bursty arrivals need a
// window of Ca² times that length. So there are sums of arrivals that fade more slowly than those
// of the base window, each half as fast as the previous one. The rate comes from the shortest sum
// that is long enough.
//
// But a long window may hold arrivals that no longer describe the present load. If the rate of a
// shorter window differs from the long window's rate by more than chance explains, the shorter
// window counts. This is Lepski's rule (On a Problem of Adaptive Estimation, 1990): take the widest
// window that no narrower window contradicts.
const (
	slower     = 4 // number of slower sums; the slowest fades in 16 times the base's time
	slowestFor = 1 << slower
)

// rates holds sums of arrivals that fade. The first sum fades half as fast as the base, and each
// further sum half as fast as the one before.
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

// longGaps is the gap after which the load counts as ended, in units of Ca²/λ. It is used only for
// bursty arrivals (Ca² > 1). If their gaps are gamma distributed, a longer gap has a probability
// below exp(−5).
const longGaps = 5

// rate returns the best estimate of the rate, in arrivals per second. base is the rate of the base
// window, and ca2 the squared CV of the gaps. age is the time since the first arrival, and silence
// the time since the latest.
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
