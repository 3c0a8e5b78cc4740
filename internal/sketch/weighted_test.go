package sketch

import (
	"bytes"
	"cmp"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// weighed is a value with its weight.
type weighed struct {
	v int64
	w float64
}

// exactWeighted is the quantile of weighed values.
func exactWeighted(all []weighed, q float64) int64 {
	all = slices.Clone(all)
	slices.SortFunc(all, func(a, b weighed) int { return cmp.Compare(a.v, b.v) })
	var total, sum float64
	for _, a := range all {
		total += a.w
	}
	for _, a := range all {
		if sum += a.w; sum >= q*total*(1-1e-6) {
			return a.v
		}
	}
	return 0
}

// quantile is the quantile of a sketch.
func (s *Weighted) quantile(q float64) (v int64) {
	total, sum := s.Total(), 0.0
	for value, w := range s.All() {
		v = value
		if sum += w; sum >= q*total*(1-1e-6) {
			return v
		}
	}
	return v
}

func TestWeightedQuantilesHaveABoundedError(t *testing.T) {
	var rnd *rand.Rand // of the case, so that a case does not depend on the order of the map
	for name, draw := range map[string]func() int64{
		"exponential":   func() int64 { return int64(rnd.ExpFloat64() * 1e8) },
		"narrow":        func() int64 { return int64(1e9 + rnd.NormFloat64()*1e7) },
		"wide":          func() int64 { return int64(math.Exp(rnd.Float64() * 43)) },
		"two modes":     func() int64 { return []int64{1e6, 6e10}[rnd.IntN(2)] + rnd.Int64N(1e5) },
		"small lengths": func() int64 { return rnd.Int64N(100) },
		"largest":       func() int64 { return math.MaxInt64 - rnd.Int64N(3) },
		"nothing":       func() int64 { return -rnd.Int64N(2) },
	} {
		t.Run(name, func(t *testing.T) {
			rnd = rand.New(rand.NewPCG(1, 2))
			var whole, left, right Weighted
			var all []weighed
			for i := range 5000 {
				a := weighed{draw(), 0.1 + rnd.Float64()*4}
				all = append(all, a)
				whole.Add(a.v, a.w)
				if i%3 == 0 {
					left.Add(a.v, a.w)
				} else {
					right.Add(a.v, a.w)
				}
			}
			left.Merge(&right)
			if whole.Bytes() > MaxBins*binSize || left.Bytes() > MaxBins*binSize {
				t.Errorf("%d and %d bytes, want at most %d", whole.Bytes(), left.Bytes(), MaxBins*binSize)
			}
			limit := Error
			if len(whole.bins) == MaxBins { // more bins would hold values, so no error is promised
				limit = 16 * Error
			}
			for _, q := range []float64{0.001, 0.1, 0.5, 0.9, 0.99, 0.999, 1} {
				want := exactWeighted(all, q)
				for _, s := range []*Weighted{&whole, &left} {
					got := s.quantile(q)
					if math.Abs(float64(got)-float64(max(want, 0))) > limit*float64(want)+1 {
						t.Errorf("quantile %v: got %d, want %d ± %v", q, got, want, limit)
					}
				}
			}
			if limit == Error && !slices.Equal(left.bins, whole.bins) {
				t.Errorf("merged: bins %v, want those of the union, %v", left.bins, whole.bins)
			}
		})
	}
}

// TestOutliersLeaveOthersAsTheyAre: values far from most others take few bins, even if there are
// many of them, and what has faded takes none.
func TestOutliersLeaveOthersAsTheyAre(t *testing.T) {
	var s Weighted
	for i := range 2000 {
		s.Add(int64(1)<<(i%60)+int64(i), 1)
	}
	for i := range 1_000_000 {
		s.Add(1e6+int64(i), 1)
	}
	if got := s.quantile(0.5); math.Abs(float64(got)-1.5e6) > 2*Error*1.5e6 {
		t.Errorf("median %d, want about 1.5e6", got)
	}
	for range 3 {
		s.Scale(0.5)
	}
	if n := len(s.bins); n > MaxBins || math.Abs(s.Total()-1_002_000.0/8) > 20 {
		t.Errorf("%d bins of weight %v, want 1/8 of 1,002,000", n, s.Total())
	}
	for range 60 {
		s.Scale(0.5)
		s.Add(1e6, 1)
	}
	if n := len(s.bins); n != 1 {
		t.Errorf("%d bins hold values, want one", n)
	}
}

func FuzzReadWeighted(f *testing.F) {
	var s Weighted
	f.Add(s.Append(nil))
	for _, v := range []int64{0, 1, 5, 1e6, 1e7, math.MaxInt64} {
		s.Add(v, 1.5)
		f.Add(s.Append(nil))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		s, rest, err := ReadWeighted(b)
		if err != nil {
			return
		}
		if s.Bytes() > MaxBins*binSize || !slices.IsSorted(s.bins) {
			t.Fatalf("%d bytes, bins %v, want at most %d, sorted", s.Bytes(), s.bins, MaxBins*binSize)
		}
		again, none, err := ReadWeighted(s.Append(nil))
		if err != nil || len(none) > 0 || !slices.Equal(again.bins, s.bins) || !slices.Equal(again.counts, s.counts) {
			t.Fatalf("%+v became %+v, %v", s, again, err)
		}
		if len(rest) > len(b) || !bytes.HasSuffix(b, rest) {
			t.Fatalf("the rest %q is not the end of %q", rest, b)
		}
		s.Add(1, 1)
		s.Add(math.MaxInt64, 1)
		s.Scale(0.5)
		s.quantile(0.5)
	})
}
