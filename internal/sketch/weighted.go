package sketch

import (
	"encoding/binary"
	"errors"
	"iter"
	"math"
	"slices"
	"time"
)

// MaxBins bounds the bins of a [Weighted] that hold values.
const MaxBins = 6 * perOctave

const (
	binStep  = 16         // bins are allocated in steps of this number
	faintest = 1.0 / 1e6  // share of the whole weight below which a bin is forgotten by Scale
	binSize  = 6          // bytes per bin
	mostBin  = bins64 - 1 // number of the largest bin
	bins64   = (63-shiftBits)<<shiftBits + perOctave
)

// Weighted is a multiset of whole numbers with weights, in bounded memory: at most [MaxBins] bins
// of 6 bytes that hold values. It has the bins of [Sketch], so the relative error of a quantile is
// at most [Error] while no more bins hold values. This is always so if the values are within a
// factor of 64. If more bins would hold values, a light bin joins a neighbour, so that the least
// weight moves the shortest way. So an outlier takes one bin, and where most values are, the bins
// stay as they are.
//
// The zero value is empty. It is not safe for concurrent use.
type Weighted struct {
	zeros  float32  // weight of the values below 1
	bins   []uint16 // numbers of the bins that hold values, sorted
	counts []float32
}

// Add counts v with weight w, which is positive. Values below 1 count as 0.
func (s *Weighted) Add(v int64, w float64) {
	if v < 1 {
		s.zeros += float32(w)
		return
	}
	s.addBin(uint16(bin(time.Duration(v))), float32(w))
}

func (s *Weighted) addBin(b uint16, w float32) {
	i, found := slices.BinarySearch(s.bins, b)
	if found {
		s.counts[i] += w
		return
	}
	if len(s.bins) == MaxBins && s.join() < i {
		i--
	}
	if n := len(s.bins); n == cap(s.bins) {
		s.bins = append(make([]uint16, 0, n+binStep), s.bins...)
		s.counts = append(make([]float32, 0, n+binStep), s.counts...)
	}
	s.bins, s.counts = slices.Insert(s.bins, i, b), slices.Insert(s.counts, i, w)
}

// join moves the lighter of two neighbouring bins into the heavier one, and returns its former
// index. It chooses the bin whose weight times its way, in bins, is the least.
func (s *Weighted) join() int {
	from, to, least := 0, 0, float32(math.Inf(1))
	for i := 1; i < len(s.counts); i++ {
		light, heavy := i-1, i
		if s.counts[i] < s.counts[i-1] {
			light, heavy = i, i-1
		}
		if cost := s.counts[light] * float32(s.bins[i]-s.bins[i-1]); cost < least {
			from, to, least = light, heavy, cost
		}
	}
	s.counts[to] += s.counts[from]
	s.bins, s.counts = slices.Delete(s.bins, from, from+1), slices.Delete(s.counts, from, from+1)
	return from
}

// Scale multiplies all weights with f, which is above 0 and at most 1. Bins with less than a
// millionth of the whole weight are forgotten.
func (s *Weighted) Scale(f float64) {
	least := float32(s.Total() * f * faintest)
	s.zeros *= float32(f)
	n := 0
	for i, w := range s.counts {
		if w *= float32(f); w > 0 && w >= least {
			s.bins[n], s.counts[n] = s.bins[i], w
			n++
		}
	}
	s.bins, s.counts = s.bins[:n], s.counts[:n]
}

// Merge adds all of o.
func (s *Weighted) Merge(o *Weighted) { s.MergeScaled(o, 1) }

// MergeScaled adds all of o, with its weights multiplied by f, which is above 0.
func (s *Weighted) MergeScaled(o *Weighted, f float64) {
	s.zeros += o.zeros * float32(f)
	for i, w := range o.counts {
		if w *= float32(f); w > 0 {
			s.addBin(o.bins[i], w)
		}
	}
}

// Total returns the weight of all values.
func (s *Weighted) Total() float64 {
	sum := float64(s.zeros)
	for _, w := range s.counts {
		sum += float64(w)
	}
	return sum
}

// Bytes returns how much memory the bins take.
func (s *Weighted) Bytes() int { return cap(s.counts) * binSize }

// All returns the values that stand for the bins, with their weights, in rising order of values.
func (s *Weighted) All() iter.Seq2[int64, float64] {
	return func(yield func(int64, float64) bool) {
		if s.zeros > 0 && !yield(0, float64(s.zeros)) {
			return
		}
		for i, w := range s.counts {
			if !yield(int64(middle(int(s.bins[i]))), float64(w)) {
				return
			}
		}
	}
}

// errBins means that bytes are no bins.
var errBins = errors.New("a sketch's bins do not fit its form")

// Append appends the encoding of s to b. It takes 5 or 6 bytes per bin, and 6 more at most.
func (s *Weighted) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, math.Float32bits(s.zeros))
	b = binary.AppendUvarint(b, uint64(len(s.bins)))
	next := uint16(0)
	for i, n := range s.bins {
		b = binary.AppendUvarint(b, uint64(n-next))
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(s.counts[i]))
		next = n + 1
	}
	return b
}

// ReadWeighted decodes what [Weighted.Append] has appended, and returns the bytes after it. It
// takes no bytes that Append does not write: no negative or infinite weights, no bins without
// weight, and no other numbers of bins.
func ReadWeighted(b []byte) (s Weighted, rest []byte, err error) {
	if s.zeros, b, err = readWeight(b); err != nil {
		return Weighted{}, nil, err
	}
	n, b, err := readNumber(b, MaxBins)
	if err != nil {
		return Weighted{}, nil, err
	}
	room := (n + binStep - 1) / binStep * binStep
	s.bins, s.counts = make([]uint16, n, room), make([]float32, n, room)
	next := 0
	for i := range n {
		var skipped int
		if skipped, b, err = readNumber(b, mostBin-next); err != nil {
			return Weighted{}, nil, err
		}
		s.bins[i] = uint16(next + skipped)
		next += skipped + 1
		if s.counts[i], b, err = readWeight(b); err != nil || s.counts[i] == 0 {
			return Weighted{}, nil, errBins
		}
	}
	return s, b, nil
}

func readNumber(b []byte, most int) (n int, rest []byte, err error) {
	v, size := binary.Uvarint(b)
	if size <= 0 || most < 0 || v > uint64(most) {
		return 0, nil, errBins
	}
	return int(v), b[size:], nil
}

func readWeight(b []byte) (w float32, rest []byte, err error) {
	if len(b) < 4 {
		return 0, nil, errBins
	}
	w = math.Float32frombits(binary.LittleEndian.Uint32(b))
	if !(w >= 0) || math.IsInf(float64(w), 0) {
		return 0, nil, errBins
	}
	return w, b[4:], nil
}
