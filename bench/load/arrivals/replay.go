package arrivals

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// Trace is a recorded load, as instants or as counts per bucket.
type Trace struct {
	Times  []time.Duration // ascending; nil for counts
	Counts []float64       // arrivals per bucket
	Bucket time.Duration   // length of a bucket
	// Length is the length of the whole trace. The trace ends one mean gap after the last instant,
	// so that it can be repeated.
	Length time.Duration
}

// Arrivals returns the number of arrivals.
func (t Trace) Arrivals() float64 {
	if t.Counts == nil {
		return float64(len(t.Times))
	}
	sum := 0.0
	for _, n := range t.Counts {
		sum += n
	}
	return sum
}

// Cut returns the part in [from, to), shifted to begin at 0. If to is 0, the part ends with the
// trace. Counts are cut at the ends of buckets.
func (t Trace) Cut(from, to time.Duration) (Trace, error) {
	if to == 0 {
		to = t.Length
	}
	if from < 0 || from >= to || from >= t.Length {
		return Trace{}, fmt.Errorf("trace: cut [%v, %v), want a part of [0, %v)", from, to, t.Length)
	}
	to = min(to, t.Length)
	out := Trace{Bucket: t.Bucket, Length: to - from}
	if t.Counts != nil {
		first, last := int(from/t.Bucket), int((to+t.Bucket-1)/t.Bucket)
		out.Counts = t.Counts[first:min(last, len(t.Counts))]
		out.Length = time.Duration(len(out.Counts)) * t.Bucket
	} else {
		lo, _ := slices.BinarySearch(t.Times, from)
		hi, _ := slices.BinarySearch(t.Times, to)
		for _, at := range t.Times[lo:hi] {
			out.Times = append(out.Times, at-from)
		}
	}
	if out.Arrivals() == 0 {
		return Trace{}, fmt.Errorf("trace: nothing arrives in [%v, %v)", from, to)
	}
	return out, nil
}

// Spread says how the arrivals of a bucket are spread over it.
type Spread string

// The spreads.
const (
	// The exact count, each at a random place, like a Poisson process that had this count.
	Uniform Spread = "uniform"
	Even    Spread = "even"    // the exact count, at equal distances
	Poisson Spread = "poisson" // a Poisson process with the count as its mean
)

// Replay says how a trace is played.
type Replay struct {
	Speed float64 // 10 means ten times as fast, at ten times the rate; 0 means 1
	// Scale is a factor for the number of arrivals; 0 means 1. With 0.1, a random tenth of the
	// arrivals is kept. With 2, each arrival gets a copy at a random time before the next one.
	Scale  float64
	Spread Spread // for counts; empty means Uniform
	Loop   bool   // start again at the end
}

// Replay returns a source that plays the trace. With Loop it never ends.
func (t Trace) Replay(o Replay, seed uint64) (Source, error) {
	if o.Speed == 0 {
		o.Speed = 1
	}
	if o.Scale == 0 {
		o.Scale = 1
	}
	if o.Spread == "" {
		o.Spread = Uniform
	}
	switch {
	case !(o.Speed >= 1e-3 && o.Speed <= 1e6):
		return nil, fmt.Errorf("trace: speed %g, want 0.001 to 1e6", o.Speed)
	case !(o.Scale >= 1e-6 && o.Scale <= 1e6):
		return nil, fmt.Errorf("trace: scale %g, want 1e-6 to 1e6", o.Scale)
	case o.Spread != Uniform && o.Spread != Even && o.Spread != Poisson:
		return nil, fmt.Errorf("trace: spread %q, want %s, %s or %s", o.Spread, Uniform, Even, Poisson)
	case t.Arrivals() == 0 || t.Length <= 0:
		return nil, fmt.Errorf("trace: %g arrivals in %v, want some", t.Arrivals(), t.Length)
	case t.Counts != nil && t.Bucket <= 0:
		return nil, fmt.Errorf("trace: counts of %v each, want more than 0", t.Bucket)
	}
	return &replay{t: t, o: o, rand: rand.New(rand.NewPCG(seed, 0))}, nil
}

type replay struct {
	t     Trace
	o     Replay
	rand  *rand.Rand
	i     int             // index of the next count or instant
	begin time.Duration   // start of this repetition, in the trace's time
	ready []time.Duration // sorted instants
	next  int             // index in ready
}

func (r *replay) Next() (time.Duration, bool) {
	for r.next == len(r.ready) {
		if r.i == max(len(r.t.Counts), len(r.t.Times)) {
			if !r.o.Loop {
				return 0, false
			}
			r.i, r.begin = 0, r.begin+r.t.Length
		}
		r.ready, r.next = r.ready[:0], 0
		if r.t.Counts != nil {
			r.bucket()
		} else {
			r.instant()
		}
		r.i++
	}
	at := r.ready[r.next]
	r.next++
	return time.Duration(float64(at) / r.o.Speed), true
}

func (r *replay) bucket() {
	from, n := r.begin+time.Duration(r.i)*r.t.Bucket, r.t.Counts[r.i]*r.o.Scale
	length := float64(r.t.Bucket)
	if r.o.Spread == Poisson {
		for at := r.rand.ExpFloat64() * length / n; at < length; at += r.rand.ExpFloat64() * length / n {
			r.ready = append(r.ready, from+time.Duration(at))
		}
		return
	}
	whole := int(n + r.rand.Float64()) // rounded randomly, so that the mean is kept
	for k := range whole {
		at := (float64(k) + 0.5) / float64(whole)
		if r.o.Spread == Uniform {
			at = r.rand.Float64()
		}
		r.ready = append(r.ready, from+time.Duration(at*length))
	}
	slices.Sort(r.ready)
}

func (r *replay) instant() {
	at, end := r.t.Times[r.i], r.t.Length
	if r.i+1 < len(r.t.Times) {
		end = r.t.Times[r.i+1]
	}
	for k := range int(r.o.Scale + r.rand.Float64()) {
		shift := time.Duration(0)
		if k > 0 {
			shift = time.Duration(r.rand.Float64() * float64(end-at))
		}
		r.ready = append(r.ready, r.begin+at+shift)
	}
	slices.Sort(r.ready)
}
