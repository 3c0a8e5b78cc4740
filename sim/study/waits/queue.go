package main

import (
	"math"
	"math/rand/v2"
	"slices"
)

// bins per e-fold of time; a bin is one percent wide. The shortest time is e^(−lowest/bins).
const (
	bins   = 100
	lowest = 1400
	most   = 3200
)

// batches is the number of parts of a run, for batch means (Law and Kelton, Simulation Modeling and
// Analysis, 2000, §9.5).
const batches = 20

// queue simulates GI/G/c in order of arrival. Services take 1 on average. It keeps the time at
// which each server is free, which is the recursion of Kiefer and Wolfowitz (1955) with clock
// times.
type queue struct {
	free  []float64 // a heap: the first server is free first
	fixed bool      // services take exactly 1; else they are exponential
	count [batches][most]uint32
}

// arrive serves a task that arrives at a time, and counts its sojourn in a batch; -1: not counted.
func (q *queue) arrive(at float64, rng *rand.Rand, batch int) {
	service := 1.0
	if !q.fixed {
		service = rng.ExpFloat64()
	}
	end := max(at, q.free[0]) + service
	i := 0
	for { // sift the new time down
		k := 2*i + 1
		if k >= len(q.free) {
			break
		}
		if k+1 < len(q.free) && q.free[k+1] < q.free[k] {
			k++
		}
		if q.free[k] >= end {
			break
		}
		q.free[i] = q.free[k]
		i = k
	}
	q.free[i] = end
	if batch >= 0 {
		q.count[batch][min(max(int(bins*math.Log(end-at))+lowest, 0), most-1)]++
	}
}

// quantile returns the sojourn that this part of tasks does not exceed. half is half of the 95 %
// interval by batch means.
func (q *queue) quantile(part float64) (value, half float64) {
	var all [most]uint64
	means := make([]float64, 0, batches)
	for b := range q.count {
		one := make([]uint64, most)
		for i, n := range q.count[b] {
			one[i] = uint64(n)
			all[i] += uint64(n)
		}
		means = append(means, below(one, part))
	}
	mean, squares := 0.0, 0.0
	for _, v := range means {
		mean += v / batches
	}
	for _, v := range means {
		squares += (v - mean) * (v - mean)
	}
	const student = 2.093 // 97.5 % with 19 degrees of freedom
	return below(all[:], part), student * math.Sqrt(squares/(batches-1)/batches)
}

// below returns the middle of the bin that holds a quantile.
func below(count []uint64, part float64) float64 {
	total := uint64(0)
	for _, n := range count {
		total += n
	}
	seen := uint64(0)
	at := slices.IndexFunc(count, func(n uint64) bool {
		seen += n
		return float64(seen) >= part*float64(total)
	})
	return math.Exp((float64(at-lowest) + 0.5) / bins)
}

// gaps makes the times between arrivals, with mean 1.
type gaps func(*rand.Rand) float64

// gammaGaps returns independent gamma gaps with the squared coefficient of variation ca2.
func gammaGaps(ca2 float64) gaps {
	if ca2 == 1 {
		return func(rng *rand.Rand) float64 { return rng.ExpFloat64() }
	}
	shape := 1 / ca2 // below 1: Marsaglia and Tsang (2000) for shape+1, times a power of a uniform
	d := shape + 1 - 1.0/3
	c := 1 / math.Sqrt(9*d)
	return func(rng *rand.Rand) float64 {
		for {
			x := rng.NormFloat64()
			v := 1 + c*x
			if v <= 0 {
				continue
			}
			v = v * v * v
			if u := 1 - rng.Float64(); math.Log(u) < x*x/2+d-d*v+d*math.Log(v) {
				return d * v * math.Exp(-rng.ExpFloat64()/shape) / shape
			}
		}
	}
}

// twoPhases returns the means of the two exponential distributions of a hyperexponential gap with
// balanced means, and the probability of the first.
func twoPhases(ca2 float64) (first, second, part float64) {
	part = (1 + math.Sqrt((ca2-1)/(ca2+1))) / 2
	return 1 / (2 * part), 1 / (2 * (1 - part)), part
}

// hyperGaps returns independent hyperexponential gaps with balanced means.
func hyperGaps(ca2 float64) gaps {
	first, second, part := twoPhases(ca2)
	return func(rng *rand.Rand) float64 {
		if rng.Float64() < part {
			return first * rng.ExpFloat64()
		}
		return second * rng.ExpFloat64()
	}
}

// stayed is how many arrivals the slow state of modulated gaps has on average. With that many, the
// gaps' coefficient of variation is within a tenth of that of a mixture.
const stayed = 10

// modulatedGaps returns the gaps of a Poisson process whose rate changes between those of
// hyperGaps. Each state lasts equally long on average, so that gaps have the same distribution as
// those of hyperGaps if states last long. But fast gaps follow fast gaps.
func modulatedGaps(ca2 float64) gaps {
	first, second, _ := twoPhases(ca2)
	mean, other, left := first, second, 0.0
	return func(rng *rand.Rand) float64 {
		gap := 0.0
		for {
			if left <= 0 {
				mean, other = other, mean
				left = stayed * second * rng.ExpFloat64()
			}
			next := mean * rng.ExpFloat64()
			if next <= left {
				left -= next
				return gap + next
			}
			gap, left = gap+left, 0 // the next state's gap begins from 0: it is memoryless
		}
	}
}
