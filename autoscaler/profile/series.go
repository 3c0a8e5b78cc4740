package profile

import (
	"math"
	"time"
)

// Rule says when a cell is measured well enough.
type Rule struct {
	Relative float64       // half width of the mean's 95 % confidence interval, of the mean
	For      time.Duration // at least: several periods of the scheduler, in which a quota is given (100 ms each)
	Most     int           // batches, then it is left as it is
}

// Least is how many batches a mean needs to be known at all.
const Least = 10

// groups is how many batch means an interval is made of, at most.
const groups = 20

// Series is the service times of one cell, in the order of their measurement. The zero value is empty.
type Series struct {
	seconds []float64
	due     int // how many there have to be to look again
}

// Add takes the service time of one batch.
func (s *Series) Add(service time.Duration) { s.seconds = append(s.seconds, service.Seconds()) }

// Len is how many there are.
func (s *Series) Len() int { return len(s.seconds) }

// Enough tells whether r is met after so much time. It looks each time when there is a quarter more than at the last: who looks
// after every batch stops at a lucky moment more often than the interval promises.
func (s *Series) Enough(r Rule, elapsed time.Duration) bool {
	if elapsed < r.For || len(s.seconds) < max(s.due, Least) {
		return false
	}
	s.due = len(s.seconds) + len(s.seconds)/4 + 1
	e := s.Estimate()
	return e.Err <= r.Relative*e.Mean
}

// Estimate returns mean, half width of its 95 % confidence interval, CV and number; the rest of the [Point] is the caller's.
//
// The interval is made of the means of up to 20 groups of neighbours by Student's t (batch means: Law, Simulation Modeling and
// Analysis, 5th ed., 9.5.3). Groups that still correlate make it wider, by (1+r)/(1-r) with their first autocorrelation r, as a
// process whose correlation falls geometrically has it. With one time, nothing is known of its error: the half width is infinite.
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
		from := n - (k-i)*size // the first of all, which start something, are left out when it does not come out even
		means[i], _ = moments(s.seconds[from : from+size])
	}
	of, spread := moments(means)
	r := 0.0
	if spread > 0 {
		for i := 1; i < k; i++ {
			r += (means[i] - of) * (means[i-1] - of)
		}
		r = min(max(r/(spread*spread*float64(k-1))+1/float64(k), 0), 0.9) // an estimate from so few is that much too low
	}
	p.Err = student(k-1) * spread / math.Sqrt(float64(k)) * math.Sqrt((1+r)/(1-r))
	return p
}

// moments returns mean and standard deviation.
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

// student is the 97.5 % quantile of Student's t distribution with so many degrees of freedom, 1 to 19.
func student(df int) float64 {
	return [...]float64{
		12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093,
	}[df-1]
}
