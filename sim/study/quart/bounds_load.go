package quart

import (
	"math/rand/v2"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench/load/arrivals"
)

// arrive is when n requests come in the time that counts, and those of the warm-up before it. So that runs of few bursts differ by how
// these fall and not by how much comes, there are n in each: gaps are drawn, then stretched together to fill the time, on a circle that
// the run begins somewhere on; the warm-up is what is before the beginning on the circle.
func (c condition) arrive(n int, seed uint64) arrivals.Source {
	r := rand.New(rand.NewPCG(seed, 0))
	at := gaps(n, c.cv, r)
	if c.burst > 0 {
		at = bursts(n, int(c.length()/(burstRate*c.burst)), r)
	}
	shift := r.Float64()
	for i := range at {
		if at[i] += shift; at[i] >= 1 {
			at[i]--
		}
	}
	slices.Sort(at)
	var out instants
	lap, from := c.length(), -c.warmup
	for begin := -lap * ((c.warmup + lap - 1) / lap); begin <= 0; begin += lap {
		for _, v := range at {
			if t := begin + time.Duration(v*float64(lap)); t >= from {
				out = append(out, t-from)
			}
		}
	}
	return &out
}

// gaps are n instants in [0, 1) with gamma gaps of some CV.
func gaps(n int, cv float64, r *rand.Rand) []float64 {
	return ends(draws(n, func() float64 { return arrivals.Gamma(r, 1/(cv*cv)) }))
}

// bursts are n instants in [0, 1) that are Poisson's in so many bursts and nothing between: a Markov-modulated Poisson process of two
// states whose time in each is what it is on average.
func bursts(n, count int, r *rand.Rand) []float64 {
	on := ends(draws(count, r.ExpFloat64))  // how much of what comes has come at the end of each
	off := ends(draws(count, r.ExpFloat64)) // of the time without
	out := draws(n, r.Float64)
	for i, v := range out {
		k, _ := slices.BinarySearch(on, v)
		if k > 0 && k <= count { // so many times without before it
			v += (burstRate - 1) * off[k-1]
		}
		out[i] = v / burstRate
	}
	return out
}

func draws(n int, draw func() float64) []float64 {
	out := make([]float64, n)
	for i := range out {
		out[i] = draw()
	}
	return out
}

// ends are the sums of lengths up to each, in parts of all of them.
func ends(lengths []float64) []float64 {
	sum := 0.0
	for i, v := range lengths {
		sum += v
		lengths[i] = sum
	}
	for i := range lengths {
		lengths[i] /= sum
	}
	return lengths
}

// instants are when requests come.
type instants []time.Duration

// Next implements arrivals.Source.
func (s *instants) Next() (time.Duration, bool) {
	if len(*s) == 0 {
		return 0, false
	}
	at := (*s)[0]
	*s = (*s)[1:]
	return at, true
}
