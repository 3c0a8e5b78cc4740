package study

import (
	"fmt"
	"math"
	"slices"

	"github.com/stagecoach-serving/stagecoach/sim"
)

// primes are the bases of the dimensions. A contender may have as many knobs as there are primes.
var primes = [...]int{2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37}

// perTry bounds the number of points that are drawn per candidate. In a small space, most points
// are already candidates.
const perTry = 64

// Candidates returns up to n different configurations of a contender. The first one is its
// defaults. The others are spread evenly over its space, and depend only on the space. If the space
// has fewer than n points, Candidates returns fewer.
//
// The points are a Halton sequence with reversed digits. The plain sequence would not do: with few
// points in many dimensions, they lie along lines (Vandewoestyne and Cools, Good permutations for
// deterministic scrambled Halton sequences in terms of L2-discrepancy, 2006).
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

// halton returns the i-th number in [0, 1) of the Halton sequence of a base. Each digit d is
// replaced by (base − d) mod base.
func halton(i, base int) float64 {
	v, part := 0.0, 1.0
	for ; i > 0; i /= base {
		part /= float64(base)
		v += part * float64((base-i%base)%base)
	}
	return v
}

// at returns the knob's value at a share u of its range, where u is in [0, 1). The value has six
// digits, so that the stored configuration is exactly the one that was tried.
func (k Knob) at(u float64) float64 {
	if len(k.Values) > 0 {
		return k.Values[int(u*float64(len(k.Values)))]
	}
	low, high := k.Low, k.High
	if k.Whole {
		high++ // each whole number has an equal part of the range
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

// check returns the faults of a knob.
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
