package autoscaler

import "math"

// mostTerms bounds the work per prediction of bursty waits. For more servers, the probability of a
// wait is taken from mostTerms servers at the same utilisation. That is slightly larger.
const mostTerms = 512

// WaitLaw is the distribution of a wait: P(wait > t) = Busy·exp(−Rate·t), with t in seconds.
type WaitLaw struct {
	Busy float64 // the probability that a task waits at all
	Rate float64 // per second
}

// Mean returns the mean wait in seconds.
func (w WaitLaw) Mean() float64 {
	if !(w.Busy > 0) {
		return 0
	}
	return w.Busy / w.Rate
}

// Waits predicts the steady wait of tasks for one of c servers of rate mu each, while lambda tasks
// arrive per second. The gaps between arrivals are taken as gamma distributed. ca2 and cs2 are as
// for [Sojourn]. The queue must be stable: 0 < lambda < c·mu.
//
// The mean is that of M/G/c by Allen and Cunneen, (1+cs2)/2 times the wait of M/M/c, plus the wait
// that bursts add to M/M/c: see burstExtra. For exponential services it is exact from ca2 = 1 on.
func Waits(lambda, mu float64, c int, ca2, cs2 float64) WaitLaw {
	ca2, cs2 = factors(ca2, cs2)
	law := gammaWait(lambda, mu, c, max(ca2, 1))
	if mean := meanWait(lambda, mu, c, ca2, cs2); law.Busy > 0 && mean > 0 {
		law.Rate = law.Busy / mean
	}
	return law
}

// burstExtra returns by how many seconds bursts lengthen the mean wait of M/M/c: the wait of GI/M/c
// with gamma gaps, less that of M/M/c. It is 0 for ca2 up to 1. It rises in lambda and ca2, and
// falls in c and mu. The queue must be stable.
//
// Two moments do not fix a wait: gaps with the same two may wait longer or shorter. Gamma gaps are
// what the simulator makes. docs/model.md compares others.
func burstExtra(lambda, mu float64, c int, ca2 float64) float64 {
	if !(ca2 > 1) || !(lambda > 0) {
		return 0
	}
	n := min(c, mostTerms)
	chance := erlangC(n, lambda/mu*float64(n)/float64(c)) / (float64(c)*mu - lambda)
	return max(gammaWait(lambda, mu, c, ca2).Mean()-chance, 0)
}

// gammaWait returns the wait in GI/M/c, whose gaps between arrivals are independent and have a
// gamma distribution. The distribution has mean 1/lambda and the squared coefficient of variation
// ca2, which is at least leastCV2. mu is the rate of one server. The queue must be stable, with
// lambda < c·mu. The result is exact (Takács, Introduction to the Theory of Queues, 1962, §2.3;
// Kleinrock 1975, §6.2 to 6.4). For ca2 = 1 it is M/M/c.
//
// With φ(s) as the Laplace transform of a gap, σ is the root of σ = φ(cμ(1−σ)). Waits of tasks that
// wait are exponential with rate cμ(1−σ). All terms of the sum for the probability of a wait are
// positive, so no digits are lost.
func gammaWait(lambda, mu float64, c int, ca2 float64) WaitLaw {
	capacity := float64(c) * mu
	rho := lambda / capacity
	free := gammaFree(rho, ca2)
	n := min(c, mostTerms)
	servers := float64(n)
	load := rho * servers
	sum, product := 1/free, 1.0 // product is Takács's binomial coefficient over C_j
	for j := 1; j <= n; j++ {
		at := float64(j)
		grows := ca2 * at / load
		phi := math.Exp(-math.Log1p(grows) / ca2)
		product *= (servers - at + 1) / at * (1 - phi) / phi
		if !(product < math.MaxFloat64) {
			return WaitLaw{0, capacity * free} // a wait has hardly any probability
		}
		ratio := 1 - servers*phi/(load*(1+grows)) // the limit where both differences are 0
		if d := servers*free - at; math.Abs(d) > 1e-6*servers {
			ratio = (servers*(1-phi) - at) / d
		}
		sum += product / (1 - phi) * ratio
	}
	return WaitLaw{min(1/(sum*free), 1), capacity * free}
}

// gammaFree returns 1−σ for gamma gaps: the root of 1 − x − (1 + ca2·x/rho)^(−1/ca2) in (0, 1]. rho
// is the utilisation, in (0, 1). The function is concave in x, positive before the root, and
// negative behind it. So Newton's method comes down to the root from any point at which the
// function falls, once it is behind the root. The first point is the root in heavy traffic.
func gammaFree(rho, ca2 float64) float64 {
	x := min(2*(1-rho)/(1+ca2), 1)
	for k := range 60 {
		scale := 1 + ca2*x/rho
		phi := math.Exp(-math.Log1p(ca2*x/rho) / ca2)
		slope := phi/(rho*scale) - 1
		next := x - (1-x-phi)/slope
		switch {
		case k == 0 && (!(slope < 0) || !(next < 1)):
			x = 1
			continue
		case k > 0 && !(next < x), !(next > 0):
			return x
		case math.Abs(x-next) < 1e-9*x: // the next step would be smaller than a rounding error
			return next
		}
		x = next
	}
	return x
}
