package autoscaler

// nextB returns Erlang's B(k) from b = B(k−1); B(0) is 1. B(k) is the probability that a call finds
// all k servers busy and is lost, for an offered load of a = λ/μ Erlang. The recursion neither
// overflows nor loses digits by cancellation (Harchol-Balter 2013, §14.4).
func nextB(b float64, k int, a float64) float64 { return a * b / (float64(k) + a*b) }

// cFromB returns Erlang's C(c), the probability that a call finds all c servers busy and waits
// (Kleinrock 1975, §3.5), from b = B(c). The queue must be stable, a < c.
func cFromB(b float64, c int, a float64) float64 {
	return float64(c) * b / (float64(c) - a*(1-b))
}

// erlangC returns C(c) for an offered load of a < c.
func erlangC(c int, a float64) float64 {
	b := 1.0
	for k := 1; k <= c; k++ {
		b = nextB(b, k, a)
	}
	return cFromB(b, c, a)
}
