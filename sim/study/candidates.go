package study

import (
	"fmt"
	"math"
	"slices"

	"github.com/stagecoach-serving/stagecoach/sim"
)

// primes are the bases of the dimensions, which is as many knobs as a contender may have.
var primes = [...]int{2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37}

// perTry bounds how many points are drawn for each candidate: in small spaces most have been tried before.
const perTry = 64

// Candidates are up to n configurations of a contender, none twice: its defaults, then points spread evenly over its space. They depend on
// the space alone. There are fewer than n where the space has no more.
//
// The points are Halton's, with digits reversed: in few points of many dimensions the plain sequence runs along lines (Vandewoestyne and
// Cools, Good permutations for deterministic scrambled Halton sequences in terms of L2-discrepancy, 2006).
func (c Contender) Candidates(n int) [][]float64 {
	out := [][]float64{slices.Clone(c.Defaults)}
	for i := 1; len(out) < n && i <= perTry*n; i++ {
		point := make([]float64, len(c.Space))
		for d, k := range c.Space {
			point[d] = k.at(halton(i, primes[d]))
		}
		if !slices.ContainsFunc(out, func(p []float64) bool { return slices.Equal(p, point) }) {
			out = append(out, point)
		}
	}
	return out
}

// halton is the i-th number of a base in [0, 1), each of its digits d turned into (base − d) mod base.
func halton(i, base int) float64 {
	v, part := 0.0, 1.0
	for ; i > 0; i /= base {
		part /= float64(base)
		v += part * float64((base-i%base)%base)
	}
	return v
}

// at is the knob's value where u of its range, in [0, 1), lies below. Six digits are kept, so that what is stored is what was tried.
func (k Knob) at(u float64) float64 {
	if len(k.Values) > 0 {
		return k.Values[int(u*float64(len(k.Values)))]
	}
	low, high := k.Low, k.High
	if k.Whole {
		high++ // each whole number has as much of the range as the next
	}
	v := low + u*(high-low)
	if k.Log {
		v = low * math.Pow(high/low, u)
	}
	if k.Whole {
		return min(math.Floor(v+1e-9), k.High) // a power may be just below
	}
	return sim.Round(v)
}

// check says what is wrong with a knob.
func (k Knob) check() error {
	switch {
	case k.Name == "":
		return fmt.Errorf("knob without a name")
	case len(k.Values) > 0:
		return nil
	case !(k.Low < k.High), math.IsInf(k.High-k.Low, 0):
		return fmt.Errorf("knob %s: from %g to %g, want a range, or values", k.Name, k.Low, k.High)
	case k.Log && k.Low <= 0:
		return fmt.Errorf("knob %s: from %g, want more than 0 for a logarithm", k.Name, k.Low)
	case k.Whole && (k.Low != math.Floor(k.Low) || k.High != math.Floor(k.High)):
		return fmt.Errorf("knob %s: from %g to %g, want whole numbers", k.Name, k.Low, k.High)
	}
	return nil
}
