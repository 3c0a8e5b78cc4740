package dispatch

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

func TestEnvelopeHasLargestCountPerLength(t *testing.T) {
	// Three tasks arrive at 0 s, one at 0.2 s, and one per second from 10 s to 30 s. The largest
	// counts at 30 s are:
	//
	//   - in 125 ms: three
	//   - in 250 ms to 4 s: four, those at the beginning
	//   - in 8 s: eight, one per second
	//   - in 16 s: sixteen
	//   - in 32 s and 64 s: all 25
	var a arrivals
	for range 3 {
		a.add(epoch)
	}
	a.add(at(200 * ms))
	for i := 10; i <= 30; i++ {
		a.add(at(time.Duration(i) * time.Second))
	}
	want := plan.Envelope{3, 4, 4, 4, 4, 4, 8, 16, 25, 25}
	if got := a.read(at(30 * time.Second)).Envelope; got != want {
		t.Errorf("envelope %v, want %v", got, want)
	}
	// An hour later, nothing of the last minute is left.
	if got := a.read(at(time.Hour)).Envelope; got != (plan.Envelope{}) {
		t.Errorf("envelope %v after an hour, want none", got)
	}
	// At 61 s the beginning is forgotten. The remaining arrivals came once per second.
	want = plan.Envelope{1, 1, 1, 1, 2, 4, 8, 16, 25, 25}
	if got := a.read(at(61 * time.Second)).Envelope; got != want {
		t.Errorf("envelope %v, want %v", got, want)
	}
}

// TestEnvelopeMatchesDirectCount compares the measurement with a direct count. A measured stretch
// may be up to an eighth shorter than its length, which gives the lower bound.
func TestEnvelopeMatchesDirectCount(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 5))
	for range 20 {
		var b bursts
		var all []time.Duration
		var now time.Duration
		scale := float64(time.Millisecond) * (1 + 200*rng.Float64())
		for range 400 {
			gap := rng.ExpFloat64() * scale
			switch rng.IntN(20) {
			case 0:
				gap *= 30
			case 1, 2, 3:
				gap = 0
			}
			now += time.Duration(gap)
			b.add(now)
			all = append(all, now)
		}
		got := b.read(now)
		for i := range got {
			length := got.Stretch(i)
			low := most(all, length-length/cells, now-(eras-1)*eraLong)
			high := most(all, length, now-eras*eraLong)
			if got[i] < low || got[i] > high {
				t.Errorf("%v: %d, want %d to %d", length, got[i], low, high)
			}
		}
	}
}

// most returns the largest number of arrivals in any stretch of the given length that ends with an
// arrival later than since. An arrival at the very beginning of a stretch does not count.
func most(all []time.Duration, length, since time.Duration) (out int) {
	first := 0
	for i, end := range all {
		for all[first] <= end-length {
			first++
		}
		if end > since {
			out = max(out, i-first+1)
		}
	}
	return out
}

func BenchmarkEnvelope(b *testing.B) {
	var m bursts
	var now time.Duration
	for b.Loop() {
		now += 3 * ms
		m.add(now)
	}
	if m.read(now) == (plan.Envelope{}) {
		b.Error("no envelope")
	}
}
