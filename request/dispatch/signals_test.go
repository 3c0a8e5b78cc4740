package dispatch

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// arrivals is signals without slots and waits.
type arrivals struct{ signals }

func (a *arrivals) add(now time.Time) {
	a.tick(now, 0, 0)
	a.arrive()
}

func (a *arrivals) read(now time.Time) plan.Demand {
	d, _, _ := a.signals.read(now, 0, 0)
	return d
}

func near(got, want, tolerance float64) bool { return math.Abs(got-want) <= tolerance }

func TestRateOfFewArrivals(t *testing.T) {
	var a arrivals
	if d := a.read(epoch); d.Known {
		t.Errorf("%+v before the first arrival, want unknown", d)
	}
	for i := range 3 {
		a.add(at(time.Duration(i) * 100 * ms))
	}
	if d := a.read(at(300 * ms)); d.Known {
		t.Errorf("%+v after 3 arrivals in 300 ms, want unknown", d)
	}
	// 3 arrivals in 2 s are 1.5/s. The silence since makes a lower rate a little more likely.
	d := a.read(at(2 * time.Second))
	if !d.Known || d.Rate < 1.2 || d.Rate > 1.5 || d.CV != 0 || d.Last != at(200*ms) {
		t.Errorf("%+v at 2 s, want a rate of 1.2 to 1.5/s, no CV and the last arrival at 0.2 s", d)
	}
	if d := a.read(at(time.Hour)); !d.Known || d.Rate != 0 {
		t.Errorf("%+v an hour later, want a known rate of 0", d)
	}
}

func TestCVOfAlternatingGaps(t *testing.T) {
	// Alternating gaps of 10 and 30 ms: mean 20 ms, standard deviation 10 ms.
	var a arrivals
	now := epoch
	for i := range 81 {
		if cv := a.read(now).CV; i < 50 && cv != 0 {
			t.Fatalf("CV %v after %d arrivals in %v, want none yet", cv, i, now.Sub(epoch))
		}
		a.add(now)
		now = now.Add([]time.Duration{10 * ms, 30 * ms}[i%2])
	}
	if d := a.read(now); !near(d.CV, 0.5, 1e-3) {
		t.Errorf("CV %v, want 0.5", d.CV)
	}
}

// drive adds Poisson arrivals of the given rate, and calls the function seen every 100 ms, until
// the time end.
func drive(a *arrivals, rnd *rand.Rand, rate float64, from, end time.Duration, seen func(time.Duration)) {
	next, look := from, from
	for {
		next += time.Duration(rnd.ExpFloat64() / rate * float64(time.Second))
		for ; look <= min(next, end); look += 100 * ms {
			seen(look)
		}
		if next >= end {
			return
		}
		a.add(at(next))
	}
}

func TestPoissonArrivalsHaveSteadyRateAndCVOfOne(t *testing.T) {
	for _, rate := range []float64{2, 20, 500} {
		var a arrivals
		rnd := rand.New(rand.NewPCG(1, uint64(rate)))
		var sum, cvs, looks, surprises float64
		drive(&a, rnd, rate, 0, 10*time.Minute, func(now time.Duration) {
			if now < 15*time.Second {
				return
			}
			d := a.read(at(now))
			sum, cvs, looks = sum+d.Rate, cvs+d.CV, looks+1
			if d.Rate > rate*1.5+2 {
				surprises++
			}
		})
		if mean := sum / looks; !near(mean/rate, 1, 0.08) {
			t.Errorf("mean rate %.2f/s, want %v", mean, rate)
		}
		if mean := cvs / looks; !near(mean, 1, 0.12) {
			t.Errorf("at %v/s: mean CV %.2f, want 1", rate, mean)
		}
		if part := surprises / looks; part > 0.02 {
			t.Errorf("at %v/s: chance looked like a burst in %.1f %% of the looks, want less than 2 %%", rate, 100*part)
		}
	}
}

func TestRateFollowsABurstAndForgetsIt(t *testing.T) {
	var a arrivals
	rnd := rand.New(rand.NewPCG(3, 3))
	quiet := func(time.Duration) {}
	drive(&a, rnd, 2, 0, 60*time.Second, quiet)
	at1, at2 := 0.0, 0.0
	drive(&a, rnd, 100, 60*time.Second, 70*time.Second, func(now time.Duration) {
		switch now {
		case 61 * time.Second:
			at1 = a.read(at(now)).Rate
		case 62 * time.Second:
			at2 = a.read(at(now)).Rate
		}
	})
	if at1 < 45 || at2 < 80 {
		t.Errorf("rate %.0f/s after 1 s and %.0f/s after 2 s of 100/s, want at least 45 and 80", at1, at2)
	}
	if rate := a.read(at(85 * time.Second)).Rate; rate > 8 {
		t.Errorf("rate %.1f/s 15 s after the burst, want it forgotten", rate)
	}
	if rate := a.read(at(86 * time.Second)).Rate; rate != 0 {
		t.Errorf("rate %.1f/s 16 s after the last arrival, want 0", rate)
	}
}

func TestIdleTimeDoesNotCount(t *testing.T) {
	var a arrivals
	a.add(epoch)
	for i := range 50 {
		a.add(at(time.Hour + time.Duration(i)*20*ms))
	}
	if d := a.read(at(time.Hour + time.Second)); d.Rate < 25 || d.CV > 0.01 {
		t.Errorf("%+v, want at least 25/s, and no trace of the hour in the CV", d)
	}
}

func TestServiceTimesFadeSlowly(t *testing.T) {
	var s services
	s.add(epoch, 10*ms, 1)
	s.add(epoch, 20*ms, 1)
	if got := s.read(); got.Known {
		t.Errorf("%+v after 2 batches, want unknown", got)
	}
	s.add(epoch, 60*ms, 4) // 15 ms per task
	if got := s.read(); !got.Known || got.Mean != 15*ms || got.CV != 0 {
		t.Errorf("%+v, want a mean of 15ms a task and no CV", got)
	}
	if got := s.perBatch(); got != 30*ms {
		t.Errorf("%v a batch, want 30ms", got)
	}

	s = services{}
	for i := range 100 {
		s.add(at(time.Duration(i)*ms), []time.Duration{10 * ms, 30 * ms}[i%2], 1)
	}
	if got := s.read(); !near(got.Mean.Seconds(), 0.020, 0.0005) || !near(got.CV, 0.5, 0.01) {
		t.Errorf("%+v, want a mean of 20ms and a CV of 0.5", got)
	}
	s.add(at(time.Hour), 10*ms, 1)
	if got := s.read(); !near(got.Mean.Seconds(), 0.0195, 0.0005) {
		t.Errorf("%+v an hour later, want about 20ms: the last batches stay known", got)
	}
	for i := range 60 {
		s.add(at(time.Hour+time.Duration(i)*3*time.Second), 5*ms, 1)
	}
	if got := s.read(); got.Mean > 6*ms {
		t.Errorf("%+v after three minutes at 5ms, want about 5ms", got)
	}
}
