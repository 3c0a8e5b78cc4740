package score

import "math"

// Estimate is the mean of scores with its 95 % confidence interval. All are 0 to 1.
type Estimate struct {
	N    int     `json:"n"`
	Mean float64 `json:"mean"`
	Low  float64 `json:"low"`
	High float64 `json:"high"`
}

// Of estimates the mean of independent scores. If they are hits, the interval is Wilson's. Else it
// is that of Student's t, cut at 0 and 1. Where all scores are equal, t knows no error, and
// Wilson's interval stands in: no scores between 0 and 1 vary more than hits of the same mean.
func Of(scores []float64, hits bool) Estimate {
	n := len(scores)
	e := Estimate{N: n, High: 1}
	if n == 0 {
		return e
	}
	for _, s := range scores {
		e.Mean += s
	}
	e.Mean = min(max(e.Mean/float64(n), 0), 1)
	squares := 0.0
	for _, s := range scores {
		squares += (s - e.Mean) * (s - e.Mean)
	}
	if hits || n < 2 || squares/float64(n) < 1e-18 {
		e.Low, e.High = wilson(e.Mean, n)
		return e
	}
	half := student(n-1) * math.Sqrt(squares/float64(n-1)/float64(n))
	e.Low, e.High = max(e.Mean-half, 0), min(e.Mean+half, 1)
	return e
}

// z is the 97.5 % quantile of the normal distribution.
const z = 1.959963984540054

// wilson returns Wilson's score interval of a share of n (JASA 1927).
func wilson(share float64, n int) (low, high float64) {
	part := z * z / float64(n)
	middle := (share + part/2) / (1 + part)
	half := z / (1 + part) * math.Sqrt(share*(1-share)/float64(n)+part/float64(4*n))
	// Rounding must not move an end beyond the share itself.
	return min(max(middle-half, 0), share), max(min(middle+half, 1), share)
}

// student returns the 97.5 % quantile of Student's t distribution with df degrees of freedom. From
// 20 on, it is the expansion of Abramowitz and Stegun, 26.7.5, whose error is below 0.0001.
func student(df int) float64 {
	table := [...]float64{
		12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093,
	}
	if df <= len(table) {
		return table[max(df, 1)-1]
	}
	v, z3 := float64(df), z*z*z
	z5, z7 := z3*z*z, z3*z3*z
	return z + (z3+z)/(4*v) + (5*z5+16*z3+3*z)/(96*v*v) + (3*z7+19*z5+17*z3-15*z)/(384*v*v*v)
}
