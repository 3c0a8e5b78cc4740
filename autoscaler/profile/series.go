package profile

import (
	"math"
	"time"
)

// Rule says when a cell is measured well enough.
type Rule struct {
	Relative float64 // half width of the mean's 95 % confidence interval, per mean
	// shortest time: several periods of 100 ms in which the scheduler gives a quota
	For  time.Duration
	Most int // largest number of batches; then the cell stays as it is
}

// Least is the smallest number of batches for which a mean counts as known.
const Least = 10

// groups is the largest number of batch means for an interval.
const groups = 20

// Series holds the service times of one cell, in the order of their measurement. The zero value is
// empty.
type Series struct {
	seconds []float64
	due     int // number of times at which to look again
}

// Add takes the service time of one batch.
func (s *Series) Add(service time.Duration) { s.seconds = append(s.seconds, service.Seconds()) }

// Len returns the number of service times.
func (s *Series) Len() int { return len(s.seconds) }

// Enough reports whether r is met after the elapsed time. It makes a new estimate of the error only
// after the number of service times has grown by a quarter, and returns false otherwise. With an
// estimate after every batch, a measurement would stop at a lucky moment more often than the
// interval promises.
func (s *Series) Enough(r Rule, elapsed time.Duration) bool {
	if elapsed < r.For || len(s.seconds) < max(s.due, Least) {
		return false
	}
	s.due = len(s.seconds) + len(s.seconds)/4 + 1
	e := s.Estimate()
	return e.Err <= r.Relative*e.Mean
}

// Estimate returns the mean, the half width of its 95 % confidence interval, the CV and the number
// of service times. The half width is infinite for fewer than two times. The caller fills in the
// rest of the [Point].
//
// The method is batch means (Law, Simulation Modeling and Analysis, 5th ed., 9.5.3). It takes the
// means of up to 20 groups of neighbouring times, and gets the interval from Student's t. If groups
// still correlate, the variance is multiplied by (1+r)/(1-r), where r is the groups' first
// autocorrelation. That is the factor of a process whose correlation falls geometrically.
func (s *Series) Estimate() Point {
	n := len(s.seconds)
	mean, sd := moments(s.seconds)
	p := Point{Mean: mean, Err: math.Inf(1), N: n}
	if n == 0 {
		return p
	}
	if mean > 0 {
		p.CV = sd / mean
	}
	k := min(n, groups)
	if k < 2 {
		return p
	}
	size := n / k
	means := make([]float64, k)
	for i := range means {
		// if the groups do not come out even, the first times are left out, because they include starts
		from := n - (k-i)*size
		means[i], _ = moments(s.seconds[from : from+size])
	}
	of, spread := moments(means)
	r := 0.0
	if spread > 0 {
		for i := 1; i < k; i++ {
			r += (means[i] - of) * (means[i-1] - of)
		}
		// an estimate from so few groups is too low by 1/k
		r = min(max(r/(spread*spread*float64(k-1))+1/float64(k), 0), 0.9)
	}
	p.Err = student(k-1) * spread / math.Sqrt(float64(k)) * math.Sqrt((1+r)/(1-r))
	return p
}

// moments returns the mean and the standard deviation.
func moments(v []float64) (mean, sd float64) {
	if len(v) == 0 {
		return 0, 0
	}
	for _, x := range v {
		mean += x
	}
	mean /= float64(len(v))
	if len(v) < 2 {
		return mean, 0
	}
	for _, x := range v {
		sd += (x - mean) * (x - mean) / float64(len(v)-1)
	}
	return mean, math.Sqrt(sd)
}

// student returns the 97.5 % quantile of Student's t distribution with df degrees of freedom, 1 to
// 19.
func student(df int) float64 {
	return [...]float64{
		12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093,
	}[df-1]
}
