package sim

import (
	"math"
	"strconv"
)

// Estimate is a mean over seeds. CI is half the width of its 95 % confidence interval (Student's
// t); with one seed it is 0.
type Estimate struct {
	Mean float64 `json:"mean"`
	CI   float64 `json:"ci95"`
}

// NewEstimate returns the Estimate of values, one per seed, to six digits: see [Round].
func NewEstimate(values []float64) Estimate {
	n := float64(len(values))
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	mean := sum / n
	if n < 2 {
		return Estimate{Mean: Round(mean)}
	}
	squares := 0.0
	for _, v := range values {
		squares += (v - mean) * (v - mean)
	}
	return Estimate{Round(mean), Round(student(len(values)-1) * math.Sqrt(squares/(n-1)/n))}
}

// student returns the 97.5 % quantile of Student's t with df degrees of freedom.
func student(df int) float64 {
	table := []float64{
		12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
		2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
	}
	if df <= len(table) {
		return table[df-1]
	}
	return 1.95996 + 2.3722/float64(df) // Cornish and Fisher 1938: z + (z³+z)/4ν
}

// Round rounds v to six digits, because the last digits of sums differ between kinds of processors.
// It returns 0 if v is not finite.
func Round(v float64) float64 {
	if v == 0 || math.IsNaN(v) || math.IsInf(v, 0) {
		return 0
	}
	// cannot fail: the text was just written
	out, _ := strconv.ParseFloat(strconv.FormatFloat(v, 'g', 6, 64), 64)
	return out
}
