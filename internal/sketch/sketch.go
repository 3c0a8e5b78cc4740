// Package sketch estimates quantiles in bounded memory.
//
// A [Sketch] is a DDSketch (Masson, Rim and Lee, VLDB 2019). It counts values in bins whose width
// grows with the value, so the relative error of a quantile is at most [Error]. Bins are linear
// between powers of two, as in the authors' mapping without logarithms. Merging two sketches adds
// no error.
package sketch

import (
	"math"
	"math/bits"
	"slices"
	"time"
)

// Error is the largest relative error of a quantile.
const Error = 1.0 / (2 * perOctave)

const (
	perOctave = 32 // bins between two powers of two
	shiftBits = 5  // log2 of perOctave
	// least is the smallest duration that is not counted as zero.
	least = time.Microsecond
)

// Sketch is a multiset of durations. The zero value is empty. It is not safe for concurrent use. It
// has bins of 8 bytes from the smallest to the largest value, 32 per factor of two: 7 KB from a
// microsecond to a hundred seconds.
type Sketch struct {
	n, zeros uint64
	low      int // bin number of counts[0]
	counts   []uint64
}

// bin returns the number of the bin for d. It grows with d.
func bin(d time.Duration) int {
	v := uint64(d)
	shift := max(bits.Len64(v)-shiftBits-1, 0)
	return shift<<shiftBits + int(v>>shift)
}

// middle returns the value that represents a bin.
func middle(bin int) time.Duration {
	shift := max(bin>>shiftBits-1, 0)
	low := uint64(bin-shift<<shiftBits) << shift
	return time.Duration(low + 1<<shift/2)
}

// Add counts d. Durations below a microsecond count as zero.
func (s *Sketch) Add(d time.Duration) { s.AddN(d, 1) }

// AddN counts d n times.
func (s *Sketch) AddN(d time.Duration, n uint64) {
	s.n += n
	if d < least {
		s.zeros += n
		return
	}
	i := bin(d)
	s.hold(i, i)
	s.counts[i-s.low] += n
}

// hold extends counts to the bins from first to last.
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

// Count returns the number of durations.
func (s *Sketch) Count() uint64 { return s.n }

// Each calls f with each bin that is not empty, in ascending order. d represents the n durations of
// the bin: [Sketch.AddN] of them to another sketch adds no error.
func (s *Sketch) Each(f func(d time.Duration, n uint64)) {
	if s.zeros > 0 {
		f(0, s.zeros)
	}
	for i, n := range s.counts {
		if n > 0 {
			f(middle(s.low+i), n)
		}
	}
}

// Quantile returns the smallest duration that at least a share q (0 to 1) of all durations do not
// exceed. It returns 0 for an empty sketch.
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
