package rate

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench/load/arrivals"
)

// stream adds arrivals to an estimator. Gaps are gamma with a CV, or Poisson if it is 0.
type stream struct {
	Estimator
	rnd *rand.Rand
	cv  float64
	at  float64 // seconds
}

func newStream(seed uint64, cv float64) *stream {
	return &stream{rnd: rand.New(rand.NewPCG(seed, 2)), cv: cv}
}

// run adds arrivals of a rate until a time, and calls look once per second.
func (s *stream) run(rate, until float64, look func(Estimate)) {
	shape := 1 / (s.cv * s.cv)
	second := math.Floor(s.at) + 1
	for {
		next := s.at + arrivals.Gamma(s.rnd, shape)/shape/rate
		for ; second <= min(next, until); second++ {
			if look != nil {
				look(s.Read(seconds(second)))
			}
		}
		if next >= until {
			s.at = until
			return
		}
		s.at = next
		s.Add(seconds(next))
	}
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

func TestRateIsKnownFromTheFirstArrivals(t *testing.T) {
	var e Estimator
	if got := e.Read(time.Hour); got != (Estimate{}) {
		t.Errorf("%+v before the first arrival, want nothing", got)
	}
	for i := range 11 {
		e.Add(time.Hour + time.Duration(i)*100*time.Millisecond)
	}
	if got := e.Read(time.Hour + time.Second); got.Rate != 11 || got.Since != time.Hour || got.CV2 > 1e-9 {
		t.Errorf("%+v of 11 arrivals in a second, want 11/s since the hour and no CV", got)
	}
}

// TestStepIsFollowed checks that the rate follows a step up and down, and says since when.
func TestStepIsFollowed(t *testing.T) {
	for _, factor := range []float64{0.25, 4} {
		for seed := range uint64(20) {
			s := newStream(seed, 1)
			s.run(50, 60, nil)
			s.run(50*factor, 65, nil)
			got := s.Read(seconds(65))
			if math.Abs(got.Rate/(50*factor)-1) > 0.45 {
				t.Errorf("seed %d, times %g: %.0f/s after 5 s, want about %.0f", seed, factor, got.Rate, 50*factor)
			}
			if off := got.Since.Seconds() - 60; math.Abs(off) > 1.5 {
				t.Errorf("seed %d, times %g: the change is %.1f s off", seed, factor, off)
			}
			if cv := math.Sqrt(got.CV2); cv > 1.4 {
				t.Errorf("seed %d, times %g: CV %.2f, want about 1: a step is not a burst", seed, factor, cv)
			}
		}
	}
}

// TestSteadyArrivalsHaveNoChange plays an hour per CV. The CV must be right, too.
func TestSteadyArrivalsHaveNoChange(t *testing.T) {
	for _, cv := range []float64{1, 2, 4} {
		s := newStream(9, cv)
		changes, looks, sum := 0, 0.0, 0.0
		since := time.Duration(0)
		s.run(20, 3600, func(e Estimate) {
			if looks++; looks > 60 && e.Since != since {
				changes++
			}
			since, sum = e.Since, sum+e.CV2
		})
		if changes > 1 {
			t.Errorf("CV %g: %d changes in an hour, want at most one", cv, changes)
		}
		if got := math.Sqrt(sum / looks); math.Abs(got/cv-1) > 0.15 {
			t.Errorf("CV %g: %.2f measured", cv, got)
		}
	}
}

// TestSilenceEndsALoad checks the rate after the last arrival, and after a minute of silence.
func TestSilenceEndsALoad(t *testing.T) {
	s := newStream(4, 2)
	s.run(40, 100, nil)
	last := s.last
	if got := s.Read(last + 20*time.Second); got.Rate > 2 {
		t.Errorf("%+v after 20 s of silence, want about none", got)
	}
	if got := s.Read(last + 61*time.Second); got.Rate != 0 || got.CV2 != 0 || got.Since != last {
		t.Errorf("%+v after a minute of silence, want nothing since the last arrival", got)
	}
	s.Add(last + 2*time.Hour)
	if got := s.Read(last + 2*time.Hour + time.Second); got.Rate != 1 || got.Since != last+2*time.Hour {
		t.Errorf("%+v after the first arrival of the next load, want 1/s since then", got)
	}
}

// TestAheadIsNearTheMeanOfALoadThatChangesOften alternates 100/s and 1/s every five seconds. In
// each silence the next burst must be expected. A rate that changed once must be expected to stay.
func TestAheadIsNearTheMeanOfALoadThatChangesOften(t *testing.T) {
	read := func(Estimate) {}
	s := newStream(5, 1)
	for at := 5.0; at <= 120; at += 10 {
		s.run(100, at, read)
		s.run(1, at+5, read)
	}
	if got := s.Read(seconds(s.at)); got.Rate > 5 || got.Ahead < 20 || got.Ahead > 60 {
		t.Errorf("%+v in a silence of a load of 50/s, want a rate of about 1 and 20 to 60 ahead", got)
	}
	s = newStream(6, 1)
	s.run(100, 120, read)
	s.run(50, 240, read)
	if got := s.Read(seconds(s.at)); math.Abs(got.Ahead/got.Rate-1) > 0.1 {
		t.Errorf("%+v two minutes after a step, want about the same ahead", got)
	}
}

// FuzzEstimator checks that no sequence of times gives a rate that is negative or not a number, and
// that time never makes an estimate panic.
func FuzzEstimator(f *testing.F) {
	f.Add([]byte{1, 2, 3, 200, 255, 0, 0, 0}, int64(1e6))
	f.Add([]byte{255, 255, 255, 255}, int64(3600e9))
	f.Fuzz(func(t *testing.T, steps []byte, unit int64) {
		var e Estimator
		at := time.Duration(0)
		for i, b := range steps {
			at += time.Duration(b) * time.Duration(min(max(unit, 0), int64(time.Hour)))
			if i%3 > 0 {
				e.Add(at)
			}
			got := e.Read(at - time.Duration(b)*time.Millisecond)
			for _, v := range []float64{got.Rate, got.Ahead, got.CV2} {
				if !(v >= 0) || math.IsInf(v, 0) {
					t.Fatalf("%+v after %v", got, steps[:i+1])
				}
			}
			if got.Since < 0 || got.Since > max(at, time.Duration(e.at)*slot) {
				t.Fatalf("since %v at %v", got.Since, at)
			}
		}
	})
}

func BenchmarkAdd(b *testing.B) {
	var e Estimator
	for i := range b.N {
		e.Add(time.Duration(i) * 3 * time.Millisecond)
	}
}

func BenchmarkRead(b *testing.B) {
	s := newStream(1, 2)
	s.run(100, 600, nil)
	b.ResetTimer()
	for i := range b.N {
		s.Read(seconds(600) + time.Duration(i))
	}
}
