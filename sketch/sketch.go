// Package sketch keeps quantiles of durations in bounded memory.
//
// A [Sketch] is DDSketch (Masson, Rim and Lee, VLDB 2019): it counts values in bins whose width grows with the value, so that a
// quantile is off by at most [Error] of itself, wherever it lies. Bins are linear between powers of two, as in the mapping that its
// authors use where adding must cost no logarithm. Two sketches merge without any further error.
package sketch

import (
	"math"
	"math/bits"
	"slices"
	"time"
)

// Error is the most by which a quantile is off, as a part of it.
const Error = 1.0 / (2 * perOctave)

const (
	perOctave = 32 // bins between two powers of two
	shiftBits = 5  // its logarithm
	// least is what is told apart from nothing.
	least = time.Microsecond
)

// Sketch is a set of durations. Its zero value is empty. It is not safe for concurrent use. Bins are there from the least to the
// largest value, 8 bytes each and 32 for a factor of two: 7 KB from a microsecond to a hundred seconds.
type Sketch struct {
	n, zeros uint64
	low      int // the bin of counts[0]
	counts   []uint64
}

// bin returns the number of the bin of d, which grows with d.
func bin(d time.Duration) int {
	v := uint64(d)
	shift := max(bits.Len64(v)-shiftBits-1, 0)
	return shift<<shiftBits + int(v>>shift)
}

// middle is the value that stands for all of a bin.
func middle(bin int) time.Duration {
	shift := max(bin>>shiftBits-1, 0)
	low := uint64(bin-shift<<shiftBits) << shift
	return time.Duration(low + 1<<shift/2)
}

// Add counts d. Less than a microsecond is nothing.
func (s *Sketch) Add(d time.Duration) {
	s.n++
	if d < least {
		s.zeros++
		return
	}
	i := bin(d)
	s.hold(i, i)
	s.counts[i-s.low]++
}

// hold makes room for the bins from first to last.
func (s *Sketch) hold(first, last int) {
	if len(s.counts) == 0 {
		s.low = first
	}
	if first < s.low {
		s.counts = slices.Insert(s.counts, 0, make([]uint64, s.low-first)...)
		s.low = first
	}
	if more := last - s.low - len(s.counts) + 1; more > 0 {
		s.counts = append(s.counts, make([]uint64, more)...)
	}
}

// Merge adds all of o.
func (s *Sketch) Merge(o *Sketch) {
	s.n += o.n
	s.zeros += o.zeros
	if len(o.counts) == 0 {
		return
	}
	s.hold(o.low, o.low+len(o.counts)-1)
	for i, n := range o.counts {
		s.counts[o.low-s.low+i] += n
	}
}

// Reset empties s and keeps its memory.
func (s *Sketch) Reset() {
	s.n, s.zeros, s.counts = 0, 0, s.counts[:0]
}

// Count returns how many durations there are.
func (s *Sketch) Count() uint64 { return s.n }

// Quantile returns the least duration that at least a part q of all do not exceed, q from 0 to 1; 0 when there are none.
func (s *Sketch) Quantile(q float64) time.Duration {
	if !(q > 0) {
		q = 0
	}
	rank, seen := max(uint64(math.Ceil(min(q, 1)*float64(s.n))), 1), s.zeros
	if rank <= seen {
		return 0
	}
	for i, n := range s.counts {
		if seen += n; seen >= rank {
			return middle(s.low + i)
		}
	}
	return 0
}
