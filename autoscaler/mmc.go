package autoscaler

import "time"

// nextB returns Erlang's B(k), the probability that a call finds all k servers busy and is lost, for an offered load of a = λ/μ
// Erlang, from b = B(k−1); B(0) is 1. The recursion neither overflows nor cancels (Harchol-Balter 2013, §14.4).
func nextB(b float64, k int, a float64) float64 { return a * b / (float64(k) + a*b) }

// cFromB returns Erlang's C(c), the probability that a call finds all c servers busy and waits (Kleinrock 1975, §3.5), from
// b = B(c). The queue must be stable, a < c.
func cFromB(b float64, c int, a float64) float64 {
	return float64(c) * b / (float64(c) - a*(1-b))
}

// Servers returns the least c for which an M/M/c queue with arrival rate lambda and service rate mu, both per second,
// keeps its mean wait, C(c) / (cμ − λ), at or below wait. It returns limit if no c up to limit does, and 0 when nothing arrives.
func Servers(lambda, mu float64, wait time.Duration, limit int) int {
	if lambda <= 0 {
		return 0
	}
	if !(mu > 0) {
		return limit
	}
	a, b := lambda/mu, 1.0
	for c := 1; c < limit; c++ {
		b = nextB(b, c, a)
		if a < float64(c) && cFromB(b, c, a) <= wait.Seconds()*(float64(c)*mu-lambda) {
			return c
		}
	}
	return limit
}
