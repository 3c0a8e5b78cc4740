package quart

import (
	"math/rand/v2"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench/load/arrivals"
)

// arrive returns a run's arrivals: exactly n in the counted time, and those of the warm-up before
// it. With few bursts, a random number of requests would differ much between runs. So arrive draws
// n gaps, and scales them to fill the counted time.
//
// It then treats the counted time as a circle. A run begins at a random point of the circle. The
// warm-up has the arrivals of the part of the circle just before that point.
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

// gaps returns n instants in [0, 1) with gamma gaps of a CV.
func gaps(n int, cv float64, r *rand.Rand) []float64 {
	return ends(draws(n, func() float64 { return arrivals.Gamma(r, 1/(cv*cv)) }))
}

// bursts returns n instants in [0, 1), in as many bursts as count says. Within the bursts, the
// instants are a Poisson process; between bursts there are none. That is a Markov-modulated Poisson
// process of two states, except that each state takes exactly its mean share of the time.
func bursts(n, count int, r *rand.Rand) []float64 {
	on := ends(draws(count, r.ExpFloat64))  // the share of arrivals up to the end of each burst
	off := ends(draws(count, r.ExpFloat64)) // of the time between bursts
	out := draws(n, r.Float64)
	for i, v := range out {
		k, _ := slices.BinarySearch(on, v)
		if k > 0 && k <= count { // add the time between bursts before it
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

// ends returns the cumulative sums of lengths, as parts of the total.
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

// instants holds when requests arrive.
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
