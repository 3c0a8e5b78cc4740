package autoscaler

import (
	"math"
	"time"
)

// ErlangB returns the probability that a call finds all c servers busy and is lost, for an offered load of a = λ/μ Erlang.
// It is computed by the recursion B(k) = a·B(k−1) / (k + a·B(k−1)), which neither overflows nor cancels (Harchol-Balter
// 2013, §14.4). Without servers it is 1, without load 0.
func ErlangB(c int, a float64) float64 {
	b := 1.0
	for k := 1; k <= c; k++ {
		b = nextB(b, k, a)
	}
	return b
}

func nextB(b float64, k int, a float64) float64 { return a * b / (float64(k) + a*b) }

// ErlangC returns the probability that a call finds all c servers busy and waits, for an offered load of a = λ/μ Erlang
// (Kleinrock 1975, §3.5). It is 1 when the queue is not stable, a ≥ c.
func ErlangC(c int, a float64) float64 {
	if !(a < float64(c)) {
		return 1
	}
	return cFromB(ErlangB(c, a), c, a)
}

func cFromB(b float64, c int, a float64) float64 {
	return float64(c) * b / (float64(c) - a*(1-b))
}

// Wait returns the mean time in seconds that a call waits for one of c servers in an M/M/c queue, with lambda arrivals a
// second and mu calls a second by each server: C(c, λ/μ) / (cμ − λ). ok is false when the queue is not stable.
func Wait(lambda, mu float64, c int) (seconds float64, ok bool) {
	if !(mu > 0) || !(lambda >= 0) || !(lambda < float64(c)*mu) {
		return math.Inf(1), false
	}
	return ErlangC(c, lambda/mu) / (float64(c)*mu - lambda), true
}

// Sojourn returns the mean time in seconds that a call spends in an M/M/c queue, waiting and being served: Wait + 1/μ. ok
// is false when the queue is not stable.
//
// QUART's Eq. 1 wants to be this; package doc says where it differs.
func Sojourn(lambda, mu float64, c int) (seconds float64, ok bool) {
	w, ok := Wait(lambda, mu, c)
	return w + 1/mu, ok
}

// Servers returns the least c for which an M/M/c queue with arrival rate lambda and service rate mu, both per second,
// keeps its mean wait at or below wait. It returns limit if no c up to limit does, and 0 when nothing arrives.
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
