package sketch

import (
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"
)

// exact is the quantile of sorted values.
func exact(sorted []time.Duration, q float64) time.Duration {
	return sorted[max(int(math.Ceil(q*float64(len(sorted))))-1, 0)]
}

func within(got, want time.Duration) bool {
	return want < least && got == 0 || math.Abs(float64(got-want)) <= Error*float64(want)+1
}

func TestQuantilesHaveABoundedError(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for name, draw := range map[string]func() time.Duration{
		"exponential":    func() time.Duration { return time.Duration(rnd.ExpFloat64() * 1e8) },
		"uniform":        func() time.Duration { return time.Duration(rnd.Int64N(1e9)) },
		"wide":           func() time.Duration { return time.Duration(math.Exp(rnd.Float64() * 43)) },
		"one value":      func() time.Duration { return 123456789 },
		"mostly nothing": func() time.Duration { return max(time.Duration(rnd.NormFloat64()*1e6), 0) },
	} {
		t.Run(name, func(t *testing.T) {
			var whole, left, right Sketch
			var all []time.Duration
			for i := range 10_000 {
				d := draw()
				all = append(all, d)
				whole.Add(d)
				if i%3 == 0 {
					left.Add(d)
				} else {
					right.Add(d)
				}
			}
			slices.Sort(all)
			left.Merge(&right)
			for _, q := range []float64{0, 0.01, 0.5, 0.9, 0.95, 0.99, 0.999, 1} {
				want := exact(all, q)
				if got := whole.Quantile(q); !within(got, want) {
					t.Errorf("quantile %v is %v, want %v", q, got, want)
				}
				if got, want := left.Quantile(q), whole.Quantile(q); got != want {
					t.Errorf("quantile %v of two that were merged is %v, want %v", q, got, want)
				}
			}
			if whole.Count() != 10_000 || left.Count() != 10_000 {
				t.Errorf("%d and %d values, want 10000", whole.Count(), left.Count())
			}
		})
	}
}

func TestExtremeDurationsDoNoHarm(t *testing.T) {
	var s, none Sketch
	if s.Quantile(0.5) != 0 || s.Count() != 0 {
		t.Error("an empty sketch has values")
	}
	s.Merge(&none)
	for _, d := range []time.Duration{math.MinInt64, -1, 0, math.MaxInt64} {
		s.Add(d)
	}
	for _, q := range []float64{math.NaN(), math.Inf(-1), -1, 0.75} {
		if got := s.Quantile(q); got < 0 {
			t.Errorf("quantile %v is %v, want no less than nothing", q, got)
		}
	}
	if got := s.Quantile(math.Inf(1)); !within(got, math.MaxInt64) {
		t.Errorf("the largest is %v, want %v", got, time.Duration(math.MaxInt64))
	}
	s.Reset()
	if s.Count() != 0 || s.Quantile(1) != 0 {
		t.Error("a sketch that was reset has values")
	}
	s.Add(time.Second)
	if got := s.Quantile(1); !within(got, time.Second) {
		t.Errorf("after a reset %v, want 1s", got)
	}
	if n := testing.AllocsPerRun(100, func() { s.Reset(); s.Add(time.Second) }); n != 0 {
		t.Errorf("%v allocations, want none where there is memory", n)
	}
}

// TestBinsMakeTheSameSketch copies a sketch bin by bin.
func TestBinsMakeTheSameSketch(t *testing.T) {
	var s, again Sketch
	rnd := rand.New(rand.NewPCG(3, 4))
	for range 1000 {
		s.Add(time.Duration(rnd.ExpFloat64() * 1e4))
	}
	last := time.Duration(-1)
	s.Each(func(d time.Duration, n uint64) {
		if d <= last || n == 0 {
			t.Errorf("%d times %v after %v, want bins in order", n, d, last)
		}
		last = d
		again.AddN(d, n)
	})
	if again.Count() != 1000 || s.zeros == 0 {
		t.Errorf("%d of 1000 values, %d of them zeros", again.Count(), s.zeros)
	}
	for q := 0.0; q <= 1; q += 0.01 {
		if again.Quantile(q) != s.Quantile(q) {
			t.Errorf("quantile %v is %v, want %v", q, again.Quantile(q), s.Quantile(q))
		}
	}
}

func TestBinsAreInOrder(t *testing.T) {
	for d := least; d < 1<<61; d += d/100 + 1 {
		if i, j := bin(d), bin(d+1); i > j || j > i+1 {
			t.Fatalf("%d ns is in bin %d, the next in %d", d, i, j)
		}
		if m := middle(bin(d)); !within(m, d) {
			t.Fatalf("%d ns is in a bin around %d", d, m)
		}
	}
}

// FuzzMerge checks that the merge of two sketches has all values, however they were split.
func FuzzMerge(f *testing.F) {
	f.Add([]byte{1, 2, 3, 200}, uint8(2))
	f.Add([]byte{}, uint8(0))
	f.Fuzz(func(t *testing.T, shifts []byte, split uint8) {
		var parts [2]Sketch
		var all []time.Duration
		for i, b := range shifts {
			d := time.Duration(uint64(b)<<(b%56)) + time.Duration(i)
			all = append(all, d)
			parts[min(i/(int(split)+1), 1)].Add(d)
		}
		other := parts
		other[1].counts, other[0].counts = slices.Clone(parts[1].counts), slices.Clone(parts[0].counts)
		parts[0].Merge(&parts[1])
		other[1].Merge(&other[0])
		if parts[0].n != uint64(len(all)) || parts[0].zeros != other[1].zeros || !reflect.DeepEqual(parts[0].counts, other[1].counts) {
			t.Fatalf("%+v in one order, %+v in the other", parts[0], other[1])
		}
		if len(all) == 0 {
			return
		}
		slices.Sort(all)
		for _, q := range []float64{0.1, 0.5, 0.99} {
			if got, want := parts[0].Quantile(q), exact(all, q); !within(got, want) {
				t.Errorf("quantile %v of %v is %v, want %v", q, all, got, want)
			}
		}
	})
}

func BenchmarkAdd(b *testing.B) {
	var s Sketch
	d := time.Microsecond
	for b.Loop() {
		s.Add(d)
		if d *= 3; d > time.Minute {
			d = time.Microsecond
		}
	}
}
